"""Staging of uploads on the disk: a body of any size passes through a small, constant amount of memory.

The bytes of a multipart form are parsed as they arrive. The contents of its files follow one another in the staging
file, and each `Part` is a slice of it. The staging file has no name in the file system, so the end of the process frees
it.
"""

from __future__ import annotations

import asyncio
import io
import logging
import mmap
import tempfile
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tierkit.errors import InvalidInput, MalformedMessage, TooLarge, Unavailable
from tierkit.wire.messages import NAME_HEADER

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

__all__ = ["MAX_FIELDS_BYTES", "Part", "StagedUpload", "receive_body", "receive_form", "staged"]

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1024**2
MAX_FIELDS_BYTES = 4 * 1024**2
"""Form fields other than files stay in memory; the largest honest one is the list of labels, 40 bytes for each of
100,000."""
_MAX_FIELDS = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One file of an upload, as a slice of the staging file."""

    field: str
    name: str
    start: int
    length: int


class StagedUpload:
    """A received upload, see `staged`."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self.file = file
        self.parts: list[Part] = []
        self.fields: list[tuple[str, str]] = []
        self.blocks = not isinstance(file, io.BytesIO)
        """True if it is on the disk, so that writing and reading may take a while."""
        self._folder = folder
        self._map: mmap.mmap | None = None

    def view(self, part: Part) -> memoryview:
        """The bytes of a part, without a copy."""
        if isinstance(self.file, io.BytesIO):
            return memoryview(self.file.getvalue())[part.start : part.start + part.length]
        if self._map is None:
            self.file.flush()
            size = self.file.seek(0, io.SEEK_END)
            if size == 0:
                return memoryview(b"")
            self._map = mmap.mmap(self.file.fileno(), size, access=mmap.ACCESS_READ)
        return memoryview(self._map)[part.start : part.start + part.length]

    @contextmanager
    def as_file(self, part: Part) -> Iterator[IO[bytes]]:
        """Write a part to a separate file on the disk, which some readers need."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(self.view(part))
            file.seek(0)
            yield file


@contextmanager
def staged(folder: Path, *, in_memory: bool = False) -> Iterator[StagedUpload]:
    """Room for an upload, until it has been read. Files that are written inside count as well.

    Args:
        folder: where the room is.
        in_memory: keep a small upload in memory instead.

    Raises:
        Unavailable: the disk is full or read-only, or the folder is gone.
    """
    try:
        with io.BytesIO() if in_memory else tempfile.TemporaryFile(dir=folder) as file:
            yield StagedUpload(file, folder)
    except OSError as exc:
        if exc.errno is None or isinstance(exc, ConnectionError | TimeoutError):
            raise
        _log.error("an upload cannot be stored", extra={"why": str(exc)})
        raise Unavailable(f"the upload cannot be stored now: {exc.strerror}", retry_after_s=5) from exc


async def receive_body(stream: AsyncIterable[bytes], staging: StagedUpload, *, name: str) -> None:
    """Write a request body that is one file."""
    await _pump(stream, staging.file.write, blocks=staging.blocks)
    staging.parts.append(Part("images", name, 0, staging.file.tell()))


async def receive_form(
    stream: AsyncIterable[bytes], staging: StagedUpload, *, content_type: str, max_files: int
) -> None:
    """Write the files of a multipart form to the staging file and gather its fields.

    Raises:
        MalformedMessage: not a multipart form, or cut short.
        TooLarge: more files or fields than a job may have.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise MalformedMessage("the Content-Type of the form names no boundary")
    reader = _FormReader(staging, max_files)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        await _pump(stream, parser.write, blocks=staging.blocks)
        parser.finalize()
    except FormParserError as exc:
        raise MalformedMessage(f"this is not a valid multipart form: {exc}") from exc
    if not reader.complete:
        raise MalformedMessage("the multipart form is cut short: its closing boundary is missing")


async def _pump(stream: AsyncIterable[bytes], write: Callable[[bytes], object], *, blocks: bool) -> None:
    """Feed `write` with about a megabyte at a time; in a thread, where it may block."""
    pending = bytearray()
    async for chunk in stream:
        pending += chunk
        if len(pending) >= _CHUNK_BYTES:
            await asyncio.to_thread(write, bytes(pending))
            pending.clear()
    if blocks:
        await asyncio.to_thread(write, bytes(pending))
    else:
        write(bytes(pending))


def _as_named(filename: str) -> str:
    """A file's name as it was before the client wrote it into a form (HTML, multipart form data)."""
    return filename.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")


class _FormReader:
    """The callbacks of the multipart parser."""

    def __init__(self, staging: StagedUpload, max_files: int) -> None:
        self.complete = False
        self._staging = staging
        self._max_files = max_files
        self._header_name = b""
        self._header_value = b""
        self._headers: dict[bytes, bytes] = {}
        self._field = ""
        self._filename: str | None = None
        self._start = 0
        self._value = bytearray()
        self._fields_bytes = 0

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._headers = {}
        self._value = bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if b"name" not in options:
            raise MalformedMessage("a part of the form has no name")
        self._field = options[b"name"].decode("utf-8", "replace")
        filename = options.get(b"filename")
        self._filename = None if filename is None else _as_named(filename.decode("utf-8", "replace"))
        if filename is not None and (name := self._headers.get(NAME_HEADER.lower().encode())):
            self._filename = unquote(name.decode("latin-1"))
        self._start = self._staging.file.tell()
        if self._filename is not None and len(self._staging.parts) >= self._max_files:
            raise TooLarge(f"more than {self._max_files} files in one upload; send a zip or several jobs")
        if self._filename is None and len(self._staging.fields) >= _MAX_FIELDS:
            raise InvalidInput(f"more than {_MAX_FIELDS} form fields")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._filename is not None:
            self._staging.file.write(data[start:end])
            return
        self._value += data[start:end]
        self._fields_bytes += end - start
        if self._fields_bytes > MAX_FIELDS_BYTES:
            raise TooLarge(
                f"the form fields have more than {MAX_FIELDS_BYTES} bytes, {self._field[:64]!r} among them; "
                "more labels than fit go into an .npz"
            )

    def _on_part_end(self) -> None:
        if self._filename is None:
            try:
                self._staging.fields.append((self._field, self._value.decode()))
            except UnicodeDecodeError as exc:
                hint = "; a file needs a file name" if self._field == "images" else ""
                raise InvalidInput(f"the form field {self._field[:64]!r} is not UTF-8{hint}") from exc
            return
        length = self._staging.file.tell() - self._start
        self._staging.parts.append(Part(self._field, self._filename, self._start, length))

    def _on_end(self) -> None:
        self.complete = True
