"""Names of the pictures that a user hands in: unique, and with their folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierkit.client.files import gather
from tierkit.errors import InvalidInput


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("photos/cam1/1.jpg", "photos/cam2/1.jpg", "photos/cam2/2.jpg", "more/cam1/1.jpg", "card/3.jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["photos"], ["cam1/1.jpg", "cam2/1.jpg", "cam2/2.jpg"]),
        (["photos/"], ["cam1/1.jpg", "cam2/1.jpg", "cam2/2.jpg"]),
        (["./photos/../photos"], ["cam1/1.jpg", "cam2/1.jpg", "cam2/2.jpg"]),
        (["photos/cam1"], ["1.jpg"]),
        (["photos/cam1", "card"], ["1.jpg", "3.jpg"]),
        (["photos/cam1", "photos/cam2"], ["cam1/1.jpg", "cam2/1.jpg", "cam2/2.jpg"]),
        (["photos/cam1", "more/cam1"], ["photos/cam1/1.jpg", "more/cam1/1.jpg"]),
        (["photos", "more"], ["photos/cam1/1.jpg", "photos/cam2/1.jpg", "photos/cam2/2.jpg", "more/cam1/1.jpg"]),
        (["photos/cam2/2.jpg"], ["2.jpg"]),
        (["photos/cam1/1.jpg", "photos/cam2/1.jpg"], ["cam1/1.jpg", "cam2/1.jpg"]),
        (["photos/cam1", "photos/cam2/1.jpg"], ["cam1/1.jpg", "cam2/1.jpg"]),
        (["photos/cam1", "photos/cam2", b"raw"], ["cam1/1.jpg", "cam2/1.jpg", "cam2/2.jpg", "image-2"]),
    ],
)
def test_names(sources: list[str | bytes], names: list[str]) -> None:
    assert list(gather(sources).by_name) == names


def test_a_name_leads_to_its_file() -> None:
    found = gather(["photos/cam2", "photos/cam1"]).by_name
    assert {name: Path(str(path)).read_bytes() for name, path in found.items()} == {
        name.removeprefix("photos/"): name.encode()
        for name in ("photos/cam2/1.jpg", "photos/cam2/2.jpg", "photos/cam1/1.jpg")
    }


@pytest.mark.parametrize(
    "sources",
    [
        ["photos", "photos/cam1"],
        ["card/3.jpg", "card/3.jpg"],
        ["card", "card"],
        ["card", "./card/3.jpg"],
    ],
)
def test_a_file_that_is_given_twice_is_an_error(sources: list[str]) -> None:
    with pytest.raises(InvalidInput, match="given twice"):
        gather(sources)


def test_names_that_are_equal_once_they_are_cut_are_an_error(folder: Path) -> None:
    deep = "/".join(["é" * 100] * 6)
    for top in ("a", "b"):
        path = folder / "long" / top / deep / "1.jpg"
        path.parent.mkdir(parents=True)
        path.touch()
    with pytest.raises(InvalidInput, match="same name"):
        gather(["long"])


@pytest.mark.parametrize(
    ("sources", "classes"),
    [
        (["photos"], ["cam1", "cam2", "cam2"]),
        (["photos/cam2"], ["cam2", "cam2"]),
        (["photos/cam1", "photos/cam2"], ["cam1", "cam2", "cam2"]),
        (["photos/cam1/1.jpg"], ["cam1"]),
        (["photos", "more"], ["cam1", "cam2", "cam2", "cam1"]),
    ],
)
def test_folders_that_name_classes(sources: list[str], classes: list[str]) -> None:
    assert list(gather(sources).classes) == classes


def test_a_picture_beside_the_folders_of_classes_has_none(folder: Path) -> None:
    (folder / "photos" / "9.jpg").touch()
    assert list(gather(["photos"]).classes) == [None, "cam1", "cam2", "cam2"]


def test_a_picture_deep_in_a_class_belongs_to_it(folder: Path) -> None:
    deep = folder / "photos" / "cam1" / "2026" / "deep" / "1.jpg"
    deep.parent.mkdir(parents=True)
    deep.touch()
    assert gather(["photos"]).classes[:2] == ("cam1", "cam1")


def test_what_is_left_out_is_counted_over_all_sources(folder: Path) -> None:
    for name in ("photos/a.txt", "more/b.txt", "more/.c"):
        (folder / name).touch()
    assert gather(["photos", "more"]).left_out == {".txt": 2, "hidden": 1}


def test_bytes_of_names_that_are_no_utf8_are_written_out(folder: Path) -> None:
    for name in (b"M\xfcller.jpg", b"M\xf6ller.jpg", b"M?ller.jpg"):
        (folder / "card" / os.fsdecode(name)).touch()
    assert list(gather(["card"]).by_name) == ["3.jpg", "M?ller.jpg", "M\\udcf6ller.jpg", "M\\udcfcller.jpg"]
