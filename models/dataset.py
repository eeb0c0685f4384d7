"""A data set with its hierarchy: CIFAR-100, MNIST, or any folder of images with a hierarchy file.

A folder data set looks like this; class folders are named as the classes in `hierarchy.toml`:

    shapes/
        hierarchy.toml          or hierarchy.json
        train/circle/*.png      train/square/*.png
        test/circle/*.png       test/square/*.png

For networks whose classes are known, pictures in folders that are called like these will do, `shapes/circle/*.png`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from models.data import ImageSet, Split, in_colours, read_cifar100, read_folder
from models.folders import FolderImages, read_labelled
from models.hierarchy import Hierarchy, bundled_hierarchy
from models.manifest import ModelEntry
from models.mnist import DIGITS, read_mnist
from tierkit.errors import DataError

__all__ = ["CIFAR100", "BuiltIn", "Dataset"]

BuiltIn = Literal["cifar100", "mnist"]
CIFAR100: BuiltIn = "cifar100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A set of labelled images and its label hierarchy."""

    name: str
    hierarchy: Hierarchy
    source: str
    """Origin and terms of use; the manifest repeats it."""
    folder: Path | None
    """The folder data set, or the folder that holds `cifar-100-python/` and `mnist/`."""
    size: tuple[int, int] = (32, 32)
    """Height and width that images are brought to."""
    reader: Callable[[Split, Path | None], ImageSet] | None = None
    """Reads a built-in data set from `folder`; None for a folder data set."""

    @classmethod
    def open(cls, name: str, root: Path | None, *, hierarchy: Hierarchy | None = None) -> Dataset:
        """Open a data set by name or folder. Images are read later, by `read`.

        Args:
            name: "cifar100", "mnist", or the path of a folder data set.
            root: folder that holds `cifar-100-python/` and `mnist/`; only these two need it.
            hierarchy: hierarchy of a folder that has no file for it.

        Raises:
            DataError: no such folder, or no usable hierarchy in it.
        """
        if name == CIFAR100:
            return cls(
                name=CIFAR100,
                hierarchy=bundled_hierarchy(),
                source=(
                    "CIFAR-100, A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; "
                    "https://www.cs.toronto.edu/~kriz/cifar.html, free for research with this citation"
                ),
                folder=root,
                reader=read_cifar100,
            )
        if name == DIGITS.name:
            return cls(
                name=name,
                hierarchy=DIGITS,
                source="MNIST, Y. LeCun, C. Cortes, C. J. C. Burges, The MNIST Database of Handwritten Digits, 1998",
                folder=root,
                size=(28, 28),
                reader=read_mnist,
            )
        folder = Path(name)
        files = [path for path in (folder / "hierarchy.toml", folder / "hierarchy.json") if path.is_file()]
        if not files and hierarchy is not None:
            return cls(name=folder.name, hierarchy=hierarchy, source=folder.name, folder=folder)
        if not files:
            known = " nor ".join(map(repr, get_args(BuiltIn)))
            raise DataError(f"{name!r} is neither {known} nor a folder with a hierarchy.toml or hierarchy.json")
        hierarchy = Hierarchy.load(files[0])
        return cls(name=hierarchy.name, hierarchy=hierarchy, source=hierarchy.name, folder=folder)

    def read(self, split: Split) -> ImageSet:
        """The images of a split.

        Raises:
            DataError: they are missing or damaged.
        """
        if self.reader is not None:
            return self.reader(split, self.folder)
        assert self.folder is not None
        return read_folder(self.folder / split, self.hierarchy, size=self.size)

    def read_for(self, entry: ModelEntry, split: Split) -> ImageSet | FolderImages:
        """Return the images of a split in the form that a network takes. Images of a folder are decoded when they are
        needed. A folder without splits counts as test images.

        Raises:
            DataError: the images are missing, or a sub-folder is not called like a class.
        """
        if self.reader is not None:
            return in_colours(self.reader(split, self.folder), entry.input_shape[2])
        assert self.folder is not None
        splits = set(get_args(Split)) - set(self.hierarchy.fine)
        parted = any((self.folder / each).is_dir() for each in splits)
        if split == "train" and not parted:
            raise DataError(f"{self.folder} has no folder train/")
        return read_labelled(self.folder / split if parted else self.folder, self.hierarchy, entry)

    def decoded_for(self, entry: ModelEntry, split: Split) -> ImageSet:
        """Return the images of `read_for` as one decoded array.

        Raises:
            DataError: the images are missing, misplaced or unreadable.
        """
        found = self.read_for(entry, split)
        if isinstance(found, ImageSet):
            return found
        return ImageSet(
            images=found.images[:],
            fine=found.fine,
            coarse=found.coarse,
            names=tuple(str(path) for path in found.images.paths),
            hierarchy_name=self.hierarchy.name,
        )
