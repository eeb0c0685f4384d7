"""Makes an input file from the staging file: finds the kind of upload and the facts about its images. Blocks."""

from __future__ import annotations

import posixpath
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import IO

import numpy as np
from numpy.typing import NDArray

from models.pictures import Picture
from scheduler.ingest.archives import image_entries, open_archive, open_entry, read_entry
from scheduler.ingest.arrays import (
    ArrayHeader,
    ReadableFile,
    append_images,
    check_images,
    read_header,
    read_npy_images,
    read_small,
)
from scheduler.ingest.inputs import ImageWriter
from scheduler.ingest.labels import Labels, labels_from_array
from scheduler.ingest.staging import Part, StagedUpload
from scheduler.ingest.turns import Steps
from scheduler.settings import SchedulerSettings
from tierkit.errors import InvalidInput
from tierkit.picture_files import kind_of
from tierkit.wire.oip import Limits, decode_request

__all__ = ["Collector", "is_file"]

_MAX_NAME = 1024
_MOST_NAMED = 5
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_NUMPY = b"\x93NUMPY"
_LABELS = ("fine_labels", "labels")
"""Arrays of an .npz; the first one that is there counts."""
_UNREAD_ARRAY = "array of a name that means nothing here"


def is_file(data: memoryview) -> bool:
    """True if a body begins like one of the files that are read here."""
    return bytes(data[:6]).startswith((*_ZIP, _NUMPY)) or kind_of(data) is not None


class Collector:
    """Writes the images of an upload and gathers the facts, in steps: see `scheduler.ingest.turns`.

    Args:
        writer: receives the pixels.
        limits: bounds.
        fine: names of the fine classes, which labels may give.
        stopped: ends the decoding of a picture when it is set.
        mend: take the part of a damaged picture that can be decoded.

    A picture that cannot be read leaves its place empty, and the others follow, so that the client learns of all bad
    pictures.
    """

    def __init__(
        self,
        writer: ImageWriter,
        limits: SchedulerSettings,
        fine: Sequence[str],
        stopped: threading.Event | None = None,
        *,
        mend: bool = False,
    ) -> None:
        self._mend = mend
        self._stopped = stopped or threading.Event()
        self._writer = writer
        self._limits = limits
        self._fine = fine
        self.names: dict[int, str] = {}
        """File names by image."""
        self.resized: dict[int, tuple[int, int]] = {}
        """Height and width as sent, by image, where they were not the networks' own."""
        self.damaged: dict[int, InvalidInput] = {}
        """Error of each picture that cannot be read, by image."""
        self.mended: dict[int, str] = {}
        """Fault of each damaged picture that was decoded in part, by image."""
        self.left_out: Counter[str] = Counter()
        """Files in archives that are not pictures, by reason."""
        self._archives: dict[int, str] = {}
        """Names of the archives by image."""
        self._labels: dict[int, Labels] = {}
        """Labels that came inside files, by the number of the file's first image."""

    def add_file(self, staging: StagedUpload, part: Part) -> Steps:
        """Add one file: an image, .npy, .npz or .zip, recognised by its first bytes and not by its name.

        Raises:
            InvalidInput, UnsupportedMedia, TooLarge: with the file's name; nothing of the upload must be used then.
        """
        name = _name_of(part.name)
        data = staging.view(part)
        magic = bytes(data[:6])
        if magic.startswith(_ZIP):
            with staging.as_file(part) as file:
                yield from self._add_zip(file, name)
        elif magic == _NUMPY:
            with staging.as_file(part) as file:
                yield from self._add_npy(file, name)
        else:
            yield from self._add_image(lambda: data, name)

    def add_tensor(self, staging: StagedUpload, part: Part, header_length: int) -> Steps:
        """Add an Open Inference Protocol request with binary tensors `images` and, where known, `labels`.

        Raises:
            MalformedMessage, InvalidInput, TooLarge: as above.
        """
        request = decode_request(
            staging.view(part), header_length, limits=Limits(max_body_bytes=self._limits.max_body_bytes)
        )
        tensors = {tensor.name: tensor.data for tensor in request.inputs}
        unknown = sorted(set(tensors) - {"images", "labels"})
        if "images" not in tensors or unknown:
            raise InvalidInput(
                f"the tensors are {', '.join(tensors) or 'none'}; 'images' is needed, 'labels' may come with it"
            )
        images = tensors["images"]
        check_images(ArrayHeader(images.shape, images.dtype), "images", max_pixels=self._limits.max_pixels)
        self.resized |= yield from append_images(images.shape, lambda start, end: images[start:end], self._writer)
        if "labels" in tensors:
            self._labels[0] = labels_from_array(tensors["labels"], self._fine, len(images))

    def joined_labels(self, given: Labels | None) -> Labels | None:
        """Return one label per image: the labels sent next to the upload, or the labels inside its files. Raises
        InvalidInput."""
        if given is not None and self._labels:
            raise InvalidInput("labels: given twice, in the form and inside a file")
        if given is not None and len(given) != self._writer.images:
            raise InvalidInput(f"labels: {len(given)} for {self._writer.images} images")
        if not self._labels:
            return given
        joined = np.full(self._writer.images, -1, np.int32)
        for first, labels in self._labels.items():
            joined[first : first + len(labels)] = labels
        return joined

    def unique_names(self) -> dict[int, str]:
        """Return the name of each image that has one. If two names would be equal, names from archives begin with the
        name of their archive.

        Raises:
            InvalidInput: two names are still equal.
        """
        names = self.names
        if _repeated(names.values()):
            below = {image: PurePosixPath(archive).with_suffix("") for image, archive in self._archives.items()}
            names = {image: str(below[image] / name) if image in below else name for image, name in names.items()}
        if twice := _repeated(names.values()):
            more = f" and {len(twice) - _MOST_NAMED} more" if len(twice) > _MOST_NAMED else ""
            said = ", ".join(map(repr, twice[:_MOST_NAMED]))
            raise InvalidInput(f"two images have the same name, so their results could not be told apart: {said}{more}")
        return names

    def _add_image(self, read: Callable[[], bytes | memoryview], name: str) -> Steps:
        writer = self._writer
        writer.check_room(1)
        image = writer.images
        self.names[image] = name
        try:
            data = read()
            picture = self._picture(data, name)
            yield picture.large
            size = picture.size
            if self._mend:
                if (mended := picture.mended()) is not None:
                    data, self.mended[image] = mended
                picture = self._picture(data, name)
            writer.add(picture, data)
        except InvalidInput as exc:
            if self._stopped.is_set():
                raise
            self.damaged[image] = exc
            writer.skip()
        else:
            if not writer.keeps(size):
                self.resized[image] = size

    def _picture(self, data: bytes | memoryview, name: str) -> Picture:
        limits = self._limits
        return Picture(data, name, max_bytes=limits.max_file_bytes, max_pixels=limits.max_pixels, stopped=self._stopped)

    def _add_npy(self, file: ReadableFile, name: str) -> Steps:
        header = read_header(file, name)
        check_images(header, name, max_pixels=self._limits.max_pixels)
        self.resized |= yield from read_npy_images(
            file, header, name, self._writer, max_bytes=self._limits.max_inflated_bytes
        )

    def _add_zip(self, file: IO[bytes], name: str) -> Steps:
        # What numpy saves is a zip whose entries all end in .npy; no image does.
        with open_archive(file, name, self._limits) as archive:
            entries = archive.infolist()
            if entries and all(entry.filename.endswith(".npy") for entry in entries):
                yield from self._add_npz(archive, name)
                return
            for entry, path in image_entries(archive, name, self.left_out):
                read = partial(read_entry, archive, entry, name, max_bytes=self._limits.max_file_bytes)
                self._archives[self._writer.images] = name
                yield from self._add_image(read, _name_of(str(path)))

    def _add_npz(self, archive: zipfile.ZipFile, name: str) -> Steps:
        keys = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        if len(keys) != len(archive.infolist()):
            raise InvalidInput(f"{name}: two arrays have the same name")
        before = self._writer.images
        images = self._images_key(archive, keys, name)
        if unread := keys.keys() - {images, "names", *_LABELS}:
            self.left_out[_UNREAD_ARRAY] += len(unread)
        with open_entry(archive, keys[images], name) as file:
            yield from self._add_npy(file, f"{name}: images")
        count = self._writer.images - before
        if "names" in keys:
            self.names |= enumerate(_read_names(archive, keys["names"], f"{name}: names", count), start=before)
        for key in _LABELS:
            if key in keys:
                with open_entry(archive, keys[key], name) as file:
                    self._labels[before] = labels_from_array(read_small(file, f"{name}: {key}"), self._fine, count)
                break

    @staticmethod
    def _images_key(archive: zipfile.ZipFile, keys: dict[str, zipfile.ZipInfo], name: str) -> str:
        if "images" in keys:
            return "images"
        found = []
        for key, entry in keys.items():
            with open_entry(archive, entry, name) as file:
                header = read_header(file, f"{name}: {key}")
            if header.dtype == np.uint8 and len(header.shape) == 4:
                found.append(key)
        if len(found) != 1:
            raise InvalidInput(
                f"{name}: no array called 'images', and {len(found) or 'none'} of {', '.join(keys)} could be it "
                "(uint8, 4 axes)"
            )
        return found[0]


def _read_names(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str, count: int) -> list[str]:
    with open_entry(archive, entry, name) as file:
        names: NDArray[np.generic] = read_small(file, name)
    if names.dtype.kind != "U" or names.shape != (count,):
        raise InvalidInput(f"{name}: {count} strings are needed, not {names.dtype} {list(names.shape)}")
    return [_name_of(str(value)) for value in names.tolist()]


def _name_of(name: str) -> str:
    """The name of a file in results: as it came, but without `./` and the like, and of a very long one the end."""
    return posixpath.normpath(name)[-_MAX_NAME:] if name else "file"


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
