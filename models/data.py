"""Data readers that need only numpy and Pillow.

CIFAR-100 comes as Python pickles. A pickle can run code, so a file is opened only if its md5 equals the published one
(https://www.cs.toronto.edu/~kriz/cifar.html); no other file is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from models.folders import Pictures, find_pictures
from models.hierarchy import Hierarchy, bundled_hierarchy
from models.manifest import Fit
from tierkit.atomic import write_atomically
from tierkit.errors import DataError
from tierkit.tensors import Array

__all__ = ["ImageSet", "Split", "in_colours", "read_cifar100", "read_folder", "read_sample", "write_sample"]

Split = Literal["train", "test"]

_CIFAR100_FOLDER = "cifar-100-python"
_CIFAR100_MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
_SAMPLES = Path(__file__).parent / "samples"
_SAMPLE = "cifar-100-test-1000"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """Images of one size with their labels, if they have any."""

    images: Array
    """UINT8 `[n, h, w, 3]`, RGB; `[n, h, w, 1]` of MNIST."""
    fine: Array | None
    """int64 `[n]`; None if the images are unlabelled."""
    coarse: Array | None
    """int64 `[n]`; None if the images are unlabelled."""
    names: tuple[str, ...]
    """int64 `[n]`; None if the images are unlabelled."""
    hierarchy_name: str

    def __len__(self) -> int:
        return len(self.images)

    def digest(self) -> str:
        """sha256 of size, pixels and fine labels, in this order."""
        digest = hashlib.sha256(repr(self.images.shape).encode())
        digest.update(np.ascontiguousarray(self.images).data)
        if self.fine is not None:
            digest.update(np.ascontiguousarray(self.fine, dtype="<i8").data)
        return digest.hexdigest()

    def take(self, indices: Array) -> ImageSet:
        """The images at `indices` (integers `[m]`), in that order."""
        return ImageSet(
            images=self.images[indices],
            fine=None if self.fine is None else self.fine[indices],
            coarse=None if self.coarse is None else self.coarse[indices],
            names=tuple(self.names[int(index)] for index in indices),
            hierarchy_name=self.hierarchy_name,
        )


def read_cifar100(split: Split, root: Path | None = None) -> ImageSet:
    """Read one split of CIFAR-100: 50,000 training or 10,000 test images of 32x32 pixels.

    Args:
        split: "train" or "test".
        root: folder that holds `cifar-100-python/`.

    Raises:
        DataError: `root` is not given, or the split's file or `meta` is missing or not the official one.
    """
    if root is None:
        raise DataError("no data folder given: set --data or TERRACE_DATA to the folder that holds cifar-100-python/")
    # Nothing is taken from `meta`, since the bundled hierarchy has the class names; but where it differs, something is
    # wrong with the folder.
    _read_official(root, "meta")
    content = pickle.load(io.BytesIO(_read_official(root, split)), encoding="bytes")
    planes = np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
    return ImageSet(
        images=np.ascontiguousarray(planes.transpose(0, 2, 3, 1)),
        fine=np.asarray(content[b"fine_labels"], dtype=np.int64),
        coarse=np.asarray(content[b"coarse_labels"], dtype=np.int64),
        names=tuple(f"{split}/{index:05d}" for index in range(len(planes))),
        hierarchy_name="cifar-100",
    )


def _read_official(root: Path, name: str) -> bytes:
    """Return the content of a CIFAR-100 file after comparing its md5 with the published one."""
    path = root / _CIFAR100_FOLDER / name
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}): set --data or TERRACE_DATA to the folder that holds "
            f"{_CIFAR100_FOLDER}/, unpacked from cifar-100-python.tar.gz"
        ) from error
    found = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    if found != _CIFAR100_MD5[name]:
        raise DataError(
            f"{path} is damaged or another file: md5 {found}, expected {_CIFAR100_MD5[name]}; "
            "it was not opened. Unpack cifar-100-python.tar.gz again."
        )
    return raw


def read_sample() -> ImageSet:
    """The bundled sample: 1,000 CIFAR-100 test images, 10 per class, lossless.

    The order is fixed and the classes are interleaved: image `i` has fine label `i % 100`, so any run of 100 images
    holds each class once.

    Raises:
        DataError: the installation lacks the sample.
    """
    try:
        facts = json.loads((_SAMPLES / f"{_SAMPLE}.json").read_bytes())
        with Image.open(_SAMPLES / f"{_SAMPLE}.webp") as picture:
            grid = np.asarray(picture.convert("RGB"))
    except (OSError, ValueError) as error:
        raise DataError(f"the bundled sample in {_SAMPLES} cannot be read: {error}") from error
    hierarchy = bundled_hierarchy(facts["hierarchy"])
    height, width = facts["height"], facts["width"]
    across = grid.shape[1] // width
    images = grid.reshape(-1, height, across, width, 3).swapaxes(1, 2).reshape(-1, height, width, 3)
    fine = np.asarray(facts["fine"], dtype=np.int64)
    return ImageSet(
        images=np.ascontiguousarray(images),
        fine=fine,
        coarse=hierarchy.coarse_labels(fine),
        names=tuple(facts["names"]),
        hierarchy_name=hierarchy.name,
    )


def write_sample(test: ImageSet, folder: Path) -> None:
    """Write the bundled sample from the CIFAR-100 test images: the first 10 of each class, classes interleaved, as one
    lossless WebP picture of 50 images across, and a JSON file with their labels and names.

    Raises:
        DataError: `test` has no labels.
    """
    if test.fine is None:
        raise DataError("a sample needs labelled images")
    by_class = [np.flatnonzero(test.fine == label)[:10] for label in np.unique(test.fine)]
    sample = test.take(np.stack(by_class, axis=1).ravel())
    assert sample.fine is not None
    n, height, width = sample.images.shape[:3]
    across = 50
    grid = sample.images.reshape(n // across, across, height, width, 3).swapaxes(1, 2)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(grid.reshape(-1, across * width, 3)).save(
        folder / f"{_SAMPLE}.webp", lossless=True, quality=100, method=6
    )
    facts = {
        "hierarchy": sample.hierarchy_name,
        "height": height,
        "width": width,
        "fine": sample.fine.tolist(),
        "names": list(sample.names),
    }
    write_atomically(folder / f"{_SAMPLE}.json", (json.dumps(facts) + "\n").encode())


def in_colours(images: ImageSet, colours: int) -> ImageSet:
    """Images with this number of colours `[n, h, w, colours]`; grey ones get the same value in each."""
    if images.images.shape[-1] == colours:
        return images
    return replace(images, images=np.repeat(images.images, colours, axis=-1))


def read_folder(path: Path, hierarchy: Hierarchy, *, size: tuple[int, int] = (32, 32)) -> ImageSet:
    """Read a folder with one sub-folder of images per class, named as the classes of `hierarchy`.

    Args:
        path: the folder; images may be at any depth below a class's sub-folder.
        hierarchy: gives the labels.
        size: `(height, width)` in pixels; images of another size are resized.

    Raises:
        DataError: a sub-folder is not called like a class, a class has no images, or a file is not a readable image.
    """
    found = find_pictures(path, {name: label for label, name in enumerate(hierarchy.fine)})
    labels = np.array([label for _, label in found], np.int64)
    if empty := sorted(set(hierarchy.fine) - {hierarchy.fine[label] for label in labels}):
        raise DataError(f"{path} has no images of {empty}")
    return ImageSet(
        images=Pictures(paths=tuple(file for file, _ in found), fit=Fit(*size))[:],
        fine=labels,
        coarse=hierarchy.coarse_labels(labels),
        names=tuple(file.relative_to(path).as_posix() for file, _ in found),
        hierarchy_name=hierarchy.name,
    )
