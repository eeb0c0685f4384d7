"""What `terrace classify` makes of its arguments."""

from pathlib import Path

import numpy as np
import pytest

from models.folders import find_pictures
from terrace.sources import open_source
from tierkit.errors import DataError, InvalidInput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("apple/1.png", "apple/2.png", "ray/1.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"png")
    return tmp_path / "photos"


def test_the_sample_brings_its_labels() -> None:
    source = open_source(["sample"], labels=None, data=None)
    assert isinstance(source.images, np.ndarray)
    assert source.labels is not None
    assert len(source.images) == len(source.labels) > 0


def test_files_have_the_names_that_results_will_have(folder: Path) -> None:
    (folder / "notes.txt").touch()
    source = open_source([str(folder)], labels=None, data=None)
    assert isinstance(source.images, dict)
    assert list(source.images) == ["apple/1.png", "apple/2.png", "ray/1.png"]
    assert (source.labels, source.title, source.left_out) == (None, "photos", {".txt": 1})
    assert open_source([str(folder / "apple"), str(folder / "ray")], labels=None, data=None).title == "2 sources"


def test_folders_can_be_labels(folder: Path) -> None:
    assert open_source([str(folder)], labels="folders", data=None).labels == ["apple", "apple", "ray"]
    assert open_source([str(folder / "ray" / "1.png")], labels="folders", data=None).labels == ["ray"]


def test_folders_are_read_as_an_import_reads_them(folder: Path) -> None:
    """Class, camera, picture."""
    for name in ("apple/cam1/1.png", "ray/cam1/2026/1.png"):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.touch()
    source = open_source([str(folder)], labels="folders", data=None)
    assert isinstance(source.images, dict)
    by_path = dict(zip(source.images.values(), source.labels or [], strict=True))
    classes = ["apple", "ray"]
    assert by_path == {path: classes[label] for path, label in find_pictures(folder, {"apple": 0, "ray": 1})}


def test_a_picture_in_no_folder_of_a_class_is_an_error(folder: Path) -> None:
    (folder / "9.png").touch()
    with pytest.raises(InvalidInput, match=r"9\.png"):
        open_source([str(folder)], labels="folders", data=None)
    with pytest.raises(DataError, match=r"9\.png"):
        find_pictures(folder, {"apple": 0, "ray": 1})


def test_a_folder_that_is_no_class_is_named_with_a_picture_of_it(folder: Path) -> None:
    source = open_source([str(folder)], labels="folders", data=None)
    assert source.labels_for(["ray", "apple", "pear"]) == ["apple", "apple", "ray"]
    with pytest.raises(InvalidInput, match="'apple'") as refused:
        source.labels_for(["ray", "pear"])
    said = str(refused.value)
    assert "apple/2.png" in said
    assert "ray/" not in said


TABLE = "name,label\nray/1.png,ray\napple/2.png,pear\napple/1.png,apple\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("labels.json", '["apple", null, 3]', ["apple", None, 3]),
        ("labels.json", '\ufeff["apple", null, 3]', ["apple", None, 3]),
        ("labels.txt", "apple\n\nray\n", ["apple", None, "ray"]),
        ("labels.txt", "\ufeffapple\r\n\r\nray\r\n", ["apple", None, "ray"]),
        ("labels.csv", TABLE, ["apple", "pear", "ray"]),
        ("labels.CSV", TABLE.replace("\n", "\r\n"), ["apple", "pear", "ray"]),
        ("labels.csv", "\ufeff" + TABLE, ["apple", "pear", "ray"]),
        ("labels.csv", TABLE.replace("/", "\\"), ["apple", "pear", "ray"]),
        ("labels.csv", TABLE.replace("apple/", "./apple/"), ["apple", "pear", "ray"]),
        ("labels.csv", TABLE.replace("apple/", ".\\apple\\"), ["apple", "pear", "ray"]),
        (
            "labels.csv",
            "id,label,name\n1,ray,ray/1.png\n2,pear,apple/2.png\n3,apple,apple/1.png\n",
            ["apple", "pear", "ray"],
        ),
    ],
)
def test_files_of_labels(folder: Path, tmp_path: Path, name: str, text: str, expected: list[object]) -> None:
    (tmp_path / name).write_bytes(text.encode())
    source = open_source([str(folder)], labels=str(tmp_path / name), data=None)
    assert (source.labels, source.remarks) == (expected, ())


def test_a_name_with_a_comma_and_a_line_break(folder: Path, tmp_path: Path) -> None:
    (folder / "a,\nb.png").touch()
    (tmp_path / "labels.csv").write_text('name,label\n"a,\nb.png",pear\n')
    source = open_source([str(folder)], labels=str(tmp_path / "labels.csv"), data=None)
    assert source.labels == ["pear", None, None, None]


def test_line_breaks_in_names_are_told_apart(folder: Path, tmp_path: Path) -> None:
    (folder / "a\nb.png").touch()
    (folder / "a\rb.png").touch()
    (tmp_path / "labels.csv").write_bytes(b'name,label\r\n"a\rb.png",pear\r\n"a\nb.png",ray\r\n')
    source = open_source([str(folder)], labels=str(tmp_path / "labels.csv"), data=None)
    assert source.labels == ["ray", "pear", None, None, None]


def test_names_as_a_table_of_results_has_them(folder: Path, tmp_path: Path) -> None:
    (folder / "=1.png").touch()
    (tmp_path / "labels.csv").write_text("name,label\n'=1.png,pear\n")
    source = open_source([str(folder)], labels=str(tmp_path / "labels.csv"), data=None)
    assert source.labels == ["pear", None, None, None]


def test_labels_that_are_missing_or_left_over_are_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("name,label\nray/1.png,ray\napple/1.png,\n1.png,apple\nx.png,apple\n")
    source = open_source([str(folder)], labels=str(tmp_path / "labels.csv"), data=None)
    assert source.labels == [None, None, "ray"]
    missing, unused = source.remarks
    assert "2 of 3 pictures" in missing
    assert "apple/1.png, apple/2.png" in missing
    assert "2 labels" in unused
    assert "1.png, x.png" in unused


@pytest.mark.parametrize(
    ("sources", "labels", "message"),
    [
        (["sample", "a.png"], None, "needs a separate job"),
        (["sample"], "labels.json", "has labels already"),
        (["cifar100:test"], None, "TERRACE_DATA"),
        (["photos.zip"], "folders", "image files and folders"),
        (["photos"], "absent.json", r"^cannot read the labels in absent\.json: No such file or directory$"),
        (["photos"], "x" * 5000 + ".json", r"^cannot read the labels in x+…x+\.json: File name too long$"),
        (["photos", "photos/apple"], None, "given twice"),
        (["photos", "link"], None, "given twice"),
        (["sample"], None, r"the latter \./sample"),
        (["absent.png"], None, r"no such file or folder: absent\.png"),
    ],
)
def test_contradictions_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], labels: str | None, message: str
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("photos.zip").touch()
    Path("link").symlink_to("photos")
    Path("sample").mkdir()
    with pytest.raises(InvalidInput, match=message):
        open_source(sources, labels=labels, data=None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("labels.json", "{}", "JSON list"),
        ("labels.json", "[", "not JSON"),
        ("labels.json", '["apple"]', "1 labels for 3 images"),
        ("labels.csv", "", "columns name,label"),
        ("labels.csv", "file,class\n1.png,apple\n", "columns name,label"),
        ("labels.csv", "name,label,label\napple/1.png,apple,ray\n", "two columns that are called label"),
        ("labels.csv", "name,label,name\napple/1.png,apple,ray/1.png\n", "two columns that are called name"),
        ("labels.csv", "name;label\napple/1.png;apple\n", "columns name,label"),
        ("labels.csv", TABLE + "apple/1.png,apple\n", r"apple/1\.png twice"),
        ("labels.csv", TABLE + ".\\apple\\1.png,ray\n", r"apple/1\.png twice"),
        ("labels.csv", "name,label\na,b.png,apple\n", "line 2: more cells"),
        ("labels.csv", 'name,label\n"apple/1.png,apple\n', "unexpected end"),
        ("labels.csv", "name,label\n1.png,apple\n2.png,ray\n", r"no label for any .*apple/1\.png.* such as 1\.png"),
        ("labels.csv", "name,label\n", "no label for any"),
        ("labels.json", "[" * 200_000, "is not JSON"),
    ],
)
def test_wrong_files_of_labels(folder: Path, tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=message):
        open_source([str(folder)], labels=str(tmp_path / name), data=None)


def test_a_data_set_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="TERRACE_DATA"):
        open_source(["cifar100:test"], labels=None, data=tmp_path)


def test_labels_of_other_classes_are_no_labels() -> None:
    source = open_source(["sample"], labels=None, data=None)
    assert source.classes is not None
    assert source.labels_for(source.classes) is source.labels
    assert source.labels_for(["cat", *source.classes[1:]]) is None
    named = open_source([__file__], labels=None, data=None)
    assert named.labels_for(["cat"]) == named.labels
