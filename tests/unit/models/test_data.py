"""Readers of CIFAR-100, of the bundled sample and of folders of images."""

import hashlib
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import models.data
from models.data import ImageSet, read_cifar100, read_folder, read_sample, write_sample
from models.hierarchy import Hierarchy, bundled_hierarchy
from tierkit.errors import DataError

SHAPES = Hierarchy.parse(
    {"name": "shapes", "fine": ["circle", "square"], "superclasses": {"round": ["circle"], "angular": ["square"]}},
    source="test",
)


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def fake_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, content: object) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir()
    raw = pickle.dumps(content)
    for name in ("test", "meta"):
        (folder / name).write_bytes(raw)
        monkeypatch.setitem(models.data._CIFAR100_MD5, name, hashlib.md5(raw, usedforsecurity=False).hexdigest())


def test_the_sample_is_balanced_and_interleaved():
    sample = read_sample()
    assert sample.images.shape == (1000, 32, 32, 3)
    assert sample.images.dtype == np.uint8
    assert sample.fine is not None
    assert sample.fine.tolist() == list(range(100)) * 10
    assert sample.coarse is not None
    np.testing.assert_array_equal(sample.coarse, bundled_hierarchy().coarse_labels(sample.fine))
    assert len(set(sample.names)) == 1000


@pytest.mark.skipif("TERRACE_DATA" not in os.environ, reason="needs CIFAR-100: set TERRACE_DATA")
def test_the_sample_is_a_lossless_part_of_the_test_set():
    test, sample = read_cifar100("test", Path(os.environ["TERRACE_DATA"])), read_sample()
    assert test.fine is not None
    assert sample.fine is not None
    index = np.array([int(name.removeprefix("test/")) for name in sample.names])
    np.testing.assert_array_equal(sample.images, test.images[index])
    np.testing.assert_array_equal(sample.fine, test.fine[index])


def test_a_sample_that_is_written_reads_back_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sample = read_sample()
    sample = replace(
        sample, images=sample.images[:, :8, :6]
    )  # small: it is the search for the smallest file that takes
    shuffled = sample.take(np.random.default_rng(1).permutation(1000))
    write_sample(shuffled, tmp_path)
    monkeypatch.setattr(models.data, "_SAMPLES", tmp_path)
    again = read_sample()
    assert sorted(again.names) == sorted(sample.names)
    assert again.fine is not None
    assert again.fine.tolist() == list(range(100)) * 10
    where = {name: index for index, name in enumerate(sample.names)}
    np.testing.assert_array_equal(again.images, sample.images[[where[name] for name in again.names]])


def test_a_missing_sample_is_an_error_that_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models.data, "_SAMPLES", tmp_path)
    with pytest.raises(DataError, match="bundled sample"):
        read_sample()


def test_cifar_planes_become_interleaved_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planes = np.arange(2 * 3072, dtype=np.int64).astype(np.uint8).reshape(2, 3072)
    fake_cifar(tmp_path, monkeypatch, {b"data": planes, b"fine_labels": [3, 7], b"coarse_labels": [1, 2]})
    images = read_cifar100("test", tmp_path)
    assert images.images.shape == (2, 32, 32, 3)
    np.testing.assert_array_equal(images.images[1, 0, 5], planes[1][[5, 1024 + 5, 2048 + 5]])
    assert images.fine is not None
    assert images.fine.tolist() == [3, 7]
    assert images.names == ("test/00000", "test/00001")


class Bomb:
    """Would be noticed if it were ever unpickled."""

    def __reduce__(self):
        return (os.abort, ())


@pytest.mark.parametrize("name", ["test", "meta"])
def test_a_damaged_file_is_refused_before_it_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    fake_cifar(tmp_path, monkeypatch, {})
    path = tmp_path / "cifar-100-python" / name
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=f"{path} is damaged or another file: .* was not opened"):
        read_cifar100("test", tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=f"cannot read {path}"):
        read_cifar100("test", tmp_path)


@pytest.mark.parametrize("root", [None, Path("nowhere")])
def test_missing_data_says_what_to_set(root: Path | None):
    with pytest.raises(DataError, match="TERRACE_DATA"):
        read_cifar100("test", root)


def test_a_folder_gives_labels_by_class_name_and_one_size(tmp_path: Path):
    picture(tmp_path / "square" / "deep" / "b.png", (0, 0, 255), (20, 10))
    picture(tmp_path / "circle" / "a.png", (255, 0, 0))
    (tmp_path / "circle" / "notes.txt").write_text("no image")
    images = read_folder(tmp_path, SHAPES, size=(8, 6))
    assert images.images.shape == (2, 8, 6, 3)
    assert images.fine is not None
    assert images.fine.tolist() == [0, 1]
    assert images.names == ("circle/a.png", "square/deep/b.png")
    assert images.images[0, 0, 0].tolist() == [255, 0, 0]


def test_a_folder_that_is_no_class_is_named(tmp_path: Path):
    picture(tmp_path / "star" / "a.png", (0, 0, 0))
    with pytest.raises(DataError, match="star"):
        read_folder(tmp_path, SHAPES)


def test_a_class_without_images_is_named(tmp_path: Path):
    picture(tmp_path / "circle" / "a.png", (0, 0, 0))
    with pytest.raises(DataError, match="square"):
        read_folder(tmp_path, SHAPES)


def test_a_file_that_is_no_image_is_named(tmp_path: Path):
    picture(tmp_path / "square" / "a.png", (0, 0, 0))
    (tmp_path / "circle").mkdir()
    (tmp_path / "circle" / "torn.png").write_bytes((tmp_path / "square" / "a.png").read_bytes()[:40])
    with pytest.raises(DataError, match=r"torn\.png"):
        read_folder(tmp_path, SHAPES)


def test_no_folder_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="not a folder"):
        read_folder(tmp_path / "absent", SHAPES)


def test_taking_images_without_labels_keeps_them_unlabelled():
    images = ImageSet(
        images=np.zeros((3, 2, 2, 3), np.uint8), fine=None, coarse=None, names=("a", "b", "c"), hierarchy_name="x"
    )
    taken = images.take(np.array([2, 0]))
    assert (taken.names, taken.fine, len(taken)) == (("c", "a"), None, 2)
