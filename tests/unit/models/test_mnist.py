"""Reader of MNIST's idx files, and what it says of damaged ones."""

import gzip
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.dataset import Dataset
from models.mnist import read_mnist
from tierkit.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
IMAGES = struct.pack(">4I", 0x803, 3, 28, 28) + PIXELS.tobytes()
LABELS = struct.pack(">2I", 0x801, 3) + bytes([7, 0, 9])
PACKED = gzip.compress(IMAGES, mtime=0)  # without the time of day: pytest's workers must name each test alike


def written(root: Path, images: bytes = IMAGES, labels: bytes = LABELS, *, split: str = "t10k") -> Path:
    """Files as they are given: packed where they begin like gzip."""
    folder = root / "mnist"
    folder.mkdir()
    for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
        suffix = ".gz" if content.startswith(b"\x1f\x8b") else ""
        (folder / f"{split}-{kind}-ubyte{suffix}").write_bytes(content)
    return root


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_images_keep_their_one_colour(tmp_path: Path, pack):
    found = read_mnist("test", written(tmp_path, pack(IMAGES), pack(LABELS)))
    np.testing.assert_array_equal(found.images, PIXELS[..., None])
    assert found.images.flags.writeable
    assert found.fine is not None
    assert found.fine.tolist() == [7, 0, 9]
    assert found.coarse is not None
    assert found.coarse.tolist() == [7, 0, 9]
    assert found.names == ("test/00000", "test/00001", "test/00002")


@pytest.mark.skipif("TERRACE_DATA" not in os.environ, reason="needs MNIST: set TERRACE_DATA")
def test_the_official_files():
    dataset = Dataset.open("mnist", Path(os.environ["TERRACE_DATA"]))
    assert dataset.hierarchy.is_flat
    for found, count in ((dataset.read("train"), 60_000), (dataset.read("test"), 10_000)):
        assert found.images.shape == (count, *dataset.size, 1)
        assert found.fine is not None
        assert np.unique(found.fine).tolist() == list(range(10))


def header(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)


MANY = 2**32 - 1


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (b"", LABELS, "ends within its header"),
        (IMAGES[:10], LABELS, "ends within its header"),
        (IMAGES[:-1], LABELS, "shorter than its header says"),
        (IMAGES + b"\0", LABELS, "longer than its header says"),
        (LABELS + bytes(9), LABELS, "magic number is 2049, expected 2051"),
        (IMAGES, IMAGES, "magic number is 2051, expected 2049"),
        (header(0x803, MANY, 28, 28), LABELS, f"header says {MANY} items"),
        (header(0x803, 3, MANY, MANY), LABELS, "pixels, expected 28 x 28"),
        (header(0x803, 0, 28, 28), header(0x801, 0), "header says 0 items"),
        (IMAGES, header(0x801, 2) + b"\0\1", "3 images and 2 labels"),
        (IMAGES, header(0x801, 3) + bytes([1, 2, 10]), "label 10"),
        (PACKED[:-9], LABELS, "damaged"),
        (PACKED[:-8] + bytes(8), LABELS, "damaged"),
        (PACKED[:20] + b"\xff" * 40, LABELS, "damaged"),
        (gzip.compress(IMAGES + bytes(100), mtime=0), LABELS, "longer than its header says"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(tmp_path: Path, images: bytes, labels: bytes, message: str):
    with pytest.raises(DataError, match=message) as caught:
        read_mnist("test", written(tmp_path, images, labels))
    assert "again" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [3, MANY])
def test_a_small_file_that_unpacks_to_much_takes_no_memory(tmp_path: Path, count: int):
    bomb = gzip.compress(header(0x803, count, 28, 28) + bytes(100_000_000), compresslevel=1)
    written(tmp_path, bomb)
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            read_mnist("test", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_missing_file_says_what_to_set(tmp_path: Path, name: str):
    written(tmp_path)
    (tmp_path / "mnist" / name).unlink()
    with pytest.raises(DataError, match=rf"{name}\.gz .*TERRACE_DATA"):
        read_mnist("test", tmp_path)


def test_no_folder_says_what_to_set():
    with pytest.raises(DataError, match="TERRACE_DATA"):
        Dataset.open("mnist", None).read("test")


def test_a_folder_whose_hierarchy_is_called_mnist_is_read_as_a_folder(tmp_path: Path):
    (tmp_path / "hierarchy.toml").write_text('name = "mnist"\nfine = ["0"]\n[superclasses]\neven = ["0"]\n')
    (tmp_path / "test" / "0").mkdir(parents=True)
    Image.new("L", (28, 28)).save(tmp_path / "test" / "0" / "a.png")
    assert Dataset.open(str(tmp_path), None).read("test").images.shape == (1, 32, 32, 3)
