"""Labelled pictures in folders called like their classes, decoded for one network, a batch at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from models.hierarchy import Hierarchy
from models.manifest import Fit, ModelEntry
from models.pictures import Picture
from tierkit.errors import DataError, InvalidInput
from tierkit.picture_files import class_of, pictures_in, told
from tierkit.tensors import Array

__all__ = ["FolderImages", "Images", "Labelled", "Pictures", "all_pictures", "find_pictures", "read_labelled"]

_log = logging.getLogger(__name__)

_MAX_BYTES, _MAX_PIXELS = 64 * 1024**2, 64 * 1024**2


class Images(Protocol):
    """UINT8 `[n, h, w, 3]`: an array, or pictures that are decoded when a part of them is taken."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, which: slice, /) -> Array: ...


class Labelled(Protocol):
    """Images of one size and their labels; `models.data.ImageSet` is one as well."""

    @property
    def images(self) -> Images: ...

    @property
    def fine(self) -> Array | None:
        """int64 `[n]`."""
        ...

    @property
    def coarse(self) -> Array | None:
        """int64 `[n]`."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Files, as the pixels that one network takes."""

    paths: tuple[Path, ...]
    fit: Fit

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.paths), self.fit.height, self.fit.width, 3)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, which: slice, /) -> Array:
        """Raises DataError for a file that is not a readable picture."""
        return self._stacked([self._pixels(path) for path in self.paths[which]])

    def readable(self, which: slice) -> tuple[Array, list[int], list[str]]:
        """Return the pictures that can be read, their numbers, and the fault of each of the others."""
        pixels, numbers, damage = [], [], []
        for number in range(len(self))[which]:
            try:
                pixels.append(self._pixels(self.paths[number]))
                numbers.append(number)
            except DataError as exc:
                damage.append(str(exc))
        return self._stacked(pixels), numbers, damage

    def take(self, numbers: Iterable[int]) -> Pictures:
        """Return the pictures with these numbers, in this order."""
        return replace(self, paths=tuple(self.paths[number] for number in numbers))

    def _stacked(self, pixels: list[Array]) -> Array:
        return np.stack(pixels) if pixels else np.zeros((0, *self.shape[1:]), np.uint8)

    def _pixels(self, path: Path) -> Array:
        try:
            content = path.read_bytes()
        except OSError as exc:
            raise DataError(f"cannot read {path}: {exc.strerror}") from exc
        try:
            return Picture(content, str(path), max_bytes=_MAX_BYTES, max_pixels=_MAX_PIXELS).decode(self.fit)
        except InvalidInput as exc:
            raise DataError(str(exc)) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderImages:
    """The pictures of a folder for one network."""

    images: Pictures
    fine: Array
    coarse: Array

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Array) -> FolderImages:
        """The images at `indices` (integers `[m]`), in that order."""
        return FolderImages(
            images=self.images.take(map(int, indices)), fine=self.fine[indices], coarse=self.coarse[indices]
        )


def read_labelled(folder: Path, hierarchy: Hierarchy, entry: ModelEntry) -> FolderImages:
    """Return the pictures of a folder with one sub-folder per class, in the form that a network takes. Classes may be
    missing.

    Raises:
        DataError: the pictures are missing or misplaced. See `find_pictures`.
    """
    found = find_pictures(folder, {name: label for label, name in enumerate(hierarchy.fine)})
    fine = np.array([label for _, label in found], np.int64)
    pictures = Pictures(paths=tuple(path for path, _ in found), fit=entry.fit)
    return FolderImages(images=pictures, fine=fine, coarse=hierarchy.coarse_labels(fine))


def find_pictures(folder: Path, labels: Mapping[str, int]) -> list[tuple[Path, int]]:
    """Find the pictures in sub-folders named after classes, at any depth, with the labels of these classes.

    Raises:
        DataError: the folder is missing or has no pictures, a sub-folder is not named after a class, or a picture is
            outside the sub-folders.
    """
    found = [(path, class_of(path.relative_to(folder).as_posix())) for path in all_pictures(folder)]
    if stray := sorted({name for _, name in found if name is not None and name not in labels}):
        raise DataError(f"{folder} has folders that are called like no class: {', '.join(map(repr, stray[:5]))}")
    if beside := [path.name for path, name in found if name is None]:
        raise DataError(f"{folder} holds pictures outside the folders named after classes: {', '.join(beside[:5])}")
    return [(path, labels[name]) for path, name in found if name is not None]


def all_pictures(folder: Path) -> list[Path]:
    """The pictures of a folder, at any depth. What is left out is logged.

    Raises:
        DataError: no such folder, or no picture in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    found, left_out = pictures_in(folder)
    if not found:
        raise DataError(f"{folder} holds no pictures ({told(left_out) or 'it is empty'})")
    if left_out:
        _log.warning("%s: %s", folder, told(left_out))
    return found
