"""Which files of a folder are taken for pictures, and that each of the others is counted."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tierkit.errors import InvalidInput
from tierkit.picture_files import SUFFIXES, class_of, left_out_by_name, pictures_in, told

JPEG = b"\xff\xd8\xff\xe0 and so on"


def made(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(JPEG)
    return folder


def found_in(folder: Path) -> tuple[list[str], dict[str, int]]:
    found, left_out = pictures_in(folder)
    return [path.relative_to(folder).as_posix() for path in found], dict(left_out)


def test_pictures_are_told_by_their_suffix_in_any_case(tmp_path: Path) -> None:
    names = [f"{number:02}{suffix}" for number, suffix in enumerate(SUFFIXES)]
    names += [f"{number:02}{suffix.upper()}" for number, suffix in enumerate(SUFFIXES, 50)]
    assert found_in(made(tmp_path, *names)) == (names, {})


@pytest.mark.parametrize("name", ["IMG_0005", "IMG.0001", "frame.20260101", "a picture"])
def test_the_first_bytes_decide_where_there_is_no_suffix(tmp_path: Path, name: str) -> None:
    made(tmp_path, name)
    (tmp_path / "README").write_text("hello")
    (tmp_path / "empty").touch()
    assert found_in(tmp_path) == ([name], {"without a suffix, and no picture": 2})


def test_other_files_are_counted_by_their_suffix(tmp_path: Path) -> None:
    made(tmp_path, "a.jpg", "a.xmp", "b/c.XMP", "clip.mp4", "a.jpg_original", "a.jpg~", "a.CR2", "all.zip")
    names, left_out = found_in(tmp_path)
    assert names == ["a.jpg"]
    assert left_out == {".xmp": 2, ".mp4": 1, ".jpg_original": 1, ".jpg~": 1, ".cr2": 1, ".zip": 1}


def test_hidden_files_and_copies_of_programs_are_counted(tmp_path: Path) -> None:
    made(tmp_path, "a.jpg", ".DS_Store", "._a.jpg", ".thumbs/a.jpg", ".thumbs/b.jpg", "@eaDir/a.jpg", "__MACOSX/a.jpg")
    assert found_in(tmp_path) == (["a.jpg"], {"hidden": 2, "hidden folder, with all that is in it": 3})


def test_a_linked_folder_is_followed(tmp_path: Path) -> None:
    card, photos = made(tmp_path / "card", "deep/2.jpg"), made(tmp_path / "photos", "cam1/1.jpg")
    (photos / "cam3").symlink_to(card)
    (card / "deeper").symlink_to(made(tmp_path / "other", "3.jpg"))
    assert found_in(photos) == (["cam1/1.jpg", "cam3/deep/2.jpg", "cam3/deeper/3.jpg"], {})


def test_each_folder_is_read_once(tmp_path: Path) -> None:
    photos = made(tmp_path / "photos", "cam2/1.jpg")
    (photos / "a").symlink_to(photos / "cam2")
    (photos / "cam2" / "up").symlink_to(photos)
    (photos / "z").symlink_to(made(tmp_path / "card", "2.jpg"))
    (photos / "zz").symlink_to(tmp_path / "card")
    assert found_in(photos) == (["cam2/1.jpg", "z/2.jpg"], {"linked folder that is read already": 3})


def test_each_file_is_taken_once(tmp_path: Path) -> None:
    photos = made(tmp_path / "photos", "m.jpg")
    (photos / "a.jpg").symlink_to(photos / "m.jpg")
    made(tmp_path / "card", "2.jpg")
    for name in ("x.jpg", "y.jpg"):
        (photos / name).symlink_to(tmp_path / "card" / "2.jpg")
    assert found_in(photos) == (["m.jpg", "x.jpg"], {"link to a file that is taken": 2})


def test_links_that_lead_nowhere_are_counted(tmp_path: Path) -> None:
    made(tmp_path, "a.jpg")
    (tmp_path / "b.jpg").symlink_to(tmp_path / "gone.jpg")
    (tmp_path / "c").symlink_to(tmp_path / "c")
    assert found_in(tmp_path) == (["a.jpg"], {"broken link": 2})


def test_what_is_no_file_is_counted(tmp_path: Path) -> None:
    made(tmp_path, "a.jpg")
    os.mkfifo(tmp_path / "b.jpg")
    os.mkfifo(tmp_path / "c")
    assert found_in(tmp_path) == (["a.jpg"], {"no regular file": 2})


def test_what_cannot_be_read_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may run as root, who may read everything.
    made(tmp_path, "a.jpg", "b.jpg", "locked/c.jpg")
    scandir = os.scandir

    def refusing(path: Path) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "b.jpg")
    assert found_in(tmp_path) == (["a.jpg"], {"file that cannot be read": 1, "folder that cannot be read": 1})


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot read"):
        pictures_in(tmp_path / "none")


NAMES = ["a.jpg", "B.JPG", "c.jfif", "d", "e.txt", ".f", "g.jpg", "h.mov", "2"]
FOLDERS = ["cam1", "cam2", ".hidden", "deep er", "@eaDir"]
PATHS = st.tuples(st.lists(st.sampled_from(FOLDERS), max_size=3), st.sampled_from(NAMES))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(PATHS, min_size=1, max_size=12),
    links=st.lists(st.tuples(PATHS, st.integers(0, 11), st.booleans()), max_size=5),
    content=st.sampled_from([JPEG, b"text", b""]),
)
def test_every_file_is_taken_or_counted(tmp_path_factory: pytest.TempPathFactory, files, links, content) -> None:
    root = tmp_path_factory.mktemp("tree")
    for folders, name in files:
        path = root.joinpath(*folders, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    targets = [path for path in files if not {".hidden", "@eaDir"} & {*path[0]}]
    for (folders, name), number, whole_folder in links if targets else []:
        path = root.joinpath(*folders, f"link {name}")
        folders_of_target, file = targets[number % len(targets)]
        if path.parent.is_dir() and not path.is_symlink():
            path.symlink_to(root.joinpath(*folders_of_target, *([] if whole_folder else [file])))
    names, left_out = found_in(root)
    expected = 0
    for folder, below, inside in os.walk(root):
        hidden = [name for name in below if left_out_by_name(PurePosixPath(name)) == "hidden"]
        links_to_folders = [name for name in below if Path(folder, name).is_symlink()]
        expected += len(inside) + len({*hidden, *links_to_folders})  # a hidden folder counts as one
        below[:] = [name for name in below if name not in hidden]
    assert len(names) + sum(left_out.values()) == expected
    assert len({(root / name).resolve() for name in names}) == len(names)


def test_what_is_left_out_is_told_in_one_line() -> None:
    assert told({}) == ""
    assert told({".jfif": 2, "broken link": 1}) == "left out: 3 files (2 .jfif, 1 broken link)"
    assert told({".txt": 1}) == "left out: 1 file (1 .txt)"
    assert told({f".{number}x": 1 for number in range(20)}).endswith("12 others)")


def test_the_class_is_the_first_folder() -> None:
    assert [class_of(name) for name in ("red/cam1/1.jpg", "red/1.jpg", "1.jpg")] == ["red", "red", None]
