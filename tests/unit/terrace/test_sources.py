"""What `terrace classify` makes of its arguments."""

from pathlib import Path

import numpy as np
import pytest

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


def test_paths_are_left_to_the_client(folder: Path) -> None:
    source = open_source([str(folder), "x.npz"], labels=None, data=None)
    assert (source.images, source.labels, source.title) == ([str(folder), "x.npz"], None, "2 sources")


def test_folders_can_be_labels(folder: Path) -> None:
    source = open_source([str(folder)], labels="folders", data=None)
    assert source.labels == ["apple", "apple", "ray"]
    assert source.images == [str(folder / name) for name in ("apple/1.png", "apple/2.png", "ray/1.png")]


def test_a_folder_that_is_no_class_is_named_with_a_picture_of_it(folder: Path) -> None:
    source = open_source([str(folder)], labels="folders", data=None)
    assert source.labels_for(["ray", "apple", "pear"]) == ["apple", "apple", "ray"]
    with pytest.raises(InvalidInput, match="'apple'") as refused:
        source.labels_for(["ray", "pear"])
    said = str(refused.value)
    assert str(folder / "apple" / "1.png") in said
    assert str(folder / "ray") not in said


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("labels.json", '["apple", null, 3]', ["apple", None, 3]),
        ("labels.txt", "apple\n\nray\n", ["apple", None, "ray"]),
        ("labels.csv", "name,label\n2.png,ray\n1.png,apple\n", ["apple", "ray", "apple"]),
    ],
)
def test_files_of_labels(folder: Path, tmp_path: Path, name: str, text: str, expected: list[object]) -> None:
    (tmp_path / name).write_text(text)
    assert open_source([str(folder)], labels=str(tmp_path / name), data=None).labels == expected


@pytest.mark.parametrize(
    ("sources", "labels", "message"),
    [
        (["sample", "a.png"], None, "a job of its own"),
        (["sample"], "labels.json", "has labels already"),
        (["cifar100:test"], None, "TERRACE_DATA"),
        (["photos.zip"], "folders", "image files and folders"),
        (["a.png"], "absent.json", r"^cannot read the labels in absent\.json: No such file or directory$"),
        (["a.png"], "x" * 5000 + ".json", r"^cannot read the labels in x+…x+\.json: File name too long$"),
    ],
)
def test_contradictions_are_refused(sources: list[str], labels: str | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        open_source(sources, labels=labels, data=None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("labels.json", "{}", "JSON list"),
        ("labels.json", "[", "not JSON"),
        ("labels.json", '["apple"]', "1 labels for 3 images"),
        ("labels.csv", "file,class\n1.png,apple\n", "columns name,label"),
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
