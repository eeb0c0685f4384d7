"""From the spool to an input file: which kind of upload it is, and the facts about its images. Blocks."""

from __future__ import annotations

import posixpath
import threading
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO

import numpy as np
from numpy.typing import NDArray

from models.pictures import Picture, is_picture
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
from scheduler.ingest.spool import Part, Spool
from scheduler.ingest.turns import Steps
from scheduler.settings import SchedulerSettings
from tierkit.errors import InvalidInput
from tierkit.wire.oip import Limits, decode_request

__all__ = ["Collector", "is_file"]

_MAX_NAME = 1024
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_NUMPY = b"\x93NUMPY"


def is_file(data: memoryview) -> bool:
    """Whether a body begins like one of the files that are read here."""
    start = bytes(data[:64])
    return start.startswith((*_ZIP, _NUMPY)) or is_picture(start)


class Collector:
    """Writes the images of an upload and gathers the facts, in steps: see `scheduler.ingest.turns`.

    Args:
        writer: receives the pixels.
        limits: bounds.
        fine: names of the fine classes, for labels.
        stopped: ends the decoding of a picture when it is set.
        mend: take a damaged picture as far as it can be decoded.

    A picture that cannot be read leaves its place empty, and the others follow: who submits learns of all of them.
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
        """What is wrong with the pictures that cannot be read, by image."""
        self.mended: dict[int, str] = {}
        """What is wrong with those that are taken as far as they can be decoded, by image."""
        self._labels: dict[int, Labels] = {}
        """Those that files have brought, by the number of the file's first image."""

    def add_file(self, spool: Spool, part: Part) -> Steps:
        """Add one file: an image, .npy, .npz or .zip, told apart by its first bytes and not by its name.

        Raises:
            InvalidInput, UnsupportedMedia, TooLarge: with the file's name; nothing of the upload must be used then.
        """
        name = _display_name(part.name)
        data = spool.view(part)
        magic = bytes(data[:6])
        if magic.startswith(_ZIP):
            with spool.as_file(part) as file:
                yield from self._add_zip(file, name)
        elif magic == _NUMPY:
            with spool.as_file(part) as file:
                yield from self._add_npy(file, name)
        else:
            yield from self._add_image(lambda: data, name)

    def add_tensor(self, spool: Spool, part: Part, header_length: int) -> Steps:
        """Add an Open Inference Protocol request with binary tensors `images` and, where known, `labels`.

        Raises:
            MalformedMessage, InvalidInput, TooLarge: as above.
        """
        request = decode_request(
            spool.view(part), header_length, limits=Limits(max_body_bytes=self._limits.max_body_bytes)
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
        """One label per image: those that came beside the upload, or those inside its files. Raises InvalidInput."""
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
            for entry in image_entries(archive, name):
                read = partial(read_entry, archive, entry, name, max_bytes=self._limits.max_file_bytes)
                yield from self._add_image(read, _display_name(entry.filename))

    def _add_npz(self, archive: zipfile.ZipFile, name: str) -> Steps:
        keys = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        if len(keys) != len(archive.infolist()):
            raise InvalidInput(f"{name}: two arrays have the same name")
        before = self._writer.images
        with open_entry(archive, keys[self._images_key(archive, keys, name)], name) as file:
            yield from self._add_npy(file, f"{name}: images")
        count = self._writer.images - before
        if "names" in keys:
            self.names |= enumerate(_read_names(archive, keys["names"], f"{name}: names", count), start=before)
        for key in ("fine_labels", "labels"):
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
    return [_display_name(str(value)) for value in names.tolist()]


def _display_name(name: str) -> str:
    """A file name as shown in results and messages: no folders above, no control characters, bounded."""
    cleaned = "".join(char for char in name if char.isprintable())
    return posixpath.normpath(cleaned)[-_MAX_NAME:] if cleaned else "file"
