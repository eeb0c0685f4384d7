"""What a user hands in, as the body of a request: arrays as one binary tensor, files and folders as a multipart form.

An `Upload` can be sent more than once: each call of `chunks()` starts from the beginning, and files are opened one at
a time as they are sent, so a folder of 50,000 pictures needs neither memory nor 50,000 file descriptors.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TypedDict, cast

import httpx
import numpy as np
from pydantic import BaseModel

from tierkit.errors import InvalidInput
from tierkit.inference.model import Array
from tierkit.types import (
    PICTURE_SUFFIXES,
    Escalate,
    FeatureForm,
    OnBadInput,
    Privacy,
    Recovery,
    Scheme,
    Tier,
    UpstreamLoss,
)
from tierkit.wire.oip import InferRequest, Tensor, encode_request

__all__ = ["Images", "Labels", "PolicyFields", "Upload", "build_upload", "json_upload", "list_images", "shortened"]


class Pixels(Protocol):
    """What numpy turns into an array without guessing: arrays, PIL images."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


_File = str | bytes | os.PathLike[str]
Images = _File | Pixels | Sequence[_File | Pixels]
"""An array (n, height, width, 3) of uint8, a sequence of (height, width, 3) arrays or PIL images, the path of an image
file, .zip, .npz, .npy or folder, encoded bytes, or a sequence of paths and bytes."""

Labels = Sequence[int | str | None] | Array

_CHUNK_BYTES = 1 << 20
_SHOWN_NAME = 120
_SENT_NAME_BYTES = 1024
"""The scheduler keeps this many bytes of a path, from its end; a form has no room for much more."""


class PolicyFields(TypedDict, total=False):
    """How a job is to be served; what is left out or None takes the scheduler's default."""

    scheme: Scheme | str | None
    deadline_s: float | None
    task_deadline_s: float | None
    privacy: Privacy | str | None
    encode_on: Tier | str | None
    feature_form: FeatureForm | str | None
    weight: float | None
    recovery: Recovery | str | None
    on_upstream_loss: UpstreamLoss | str | None
    on_bad_input: OnBadInput | str | None
    escalate: Escalate | str | None
    escalate_from: Tier | str | None
    escalate_accuracy: float | None
    escalate_budget: float | None
    batch_size: int | None
    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A request body that can be sent again."""

    headers: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)
    chunks: Callable[[], AsyncIterator[bytes]]


def json_upload(message: BaseModel) -> Upload:
    """A message as a JSON body."""
    content = message.model_dump_json().encode()

    async def chunks() -> AsyncIterator[bytes]:
        yield content

    return Upload(headers={"Content-Type": "application/json", "Content-Length": str(len(content))}, chunks=chunks)


def build_upload(images: Images, labels: Labels | None, policy: Mapping[str, Any]) -> Upload:
    """Choose the body for what was handed in.

    Raises:
        InvalidInput: nothing to send, or something that is neither pictures nor paths to them.
    """
    fields = {name: str(value) for name, value in policy.items() if value is not None}
    paths = _as_paths(images)
    if paths is not None:
        return _form(paths, labels, fields)
    array = _as_array(images)
    if labels is not None and len(labels) != len(array):
        raise InvalidInput(f"{len(array)} images came with {len(labels)} labels")
    if labels is None or all(isinstance(label, int | np.integer) for label in labels):
        return _tensor(array, labels, fields)
    # Names of classes have no place in a tensor: the form has a part for them.
    held = io.BytesIO()
    np.save(held, array, allow_pickle=False)
    return _form([("images.npy", held.getvalue())], labels, fields)


def list_images(folder: Path) -> list[Path]:
    """The pictures below a folder, in the order in which they are sent: sorted, hidden ones left out."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in PICTURE_SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise InvalidInput(f"no picture in {folder}: no file ends in {', '.join(PICTURE_SUFFIXES)}")
    return found


def _as_paths(images: Images) -> list[tuple[str, Path | bytes]] | None:
    """Named files and bytes to send, or None where `images` holds arrays."""
    if isinstance(images, str | bytes | os.PathLike):
        images = [images]
    if not isinstance(images, Sequence) or not any(isinstance(item, str | bytes | os.PathLike) for item in images):
        return None
    entries: list[tuple[str, Path | bytes]] = []
    for position, item in enumerate(images):
        if isinstance(item, bytes):
            entries.append((f"image-{position}", item))
        elif isinstance(item, str | os.PathLike):
            entries += _entries(Path(item))
        else:
            raise InvalidInput(
                f"cannot send a {type(item).__name__} together with files: send them as jobs of their own"
            )
    return entries


def _entries(path: Path) -> list[tuple[str, Path | bytes]]:
    """One path of the user's: a file, or the pictures below a folder under their names in it."""
    try:
        if path.is_dir():
            return [(found.relative_to(path).as_posix(), found) for found in list_images(path)]
        if path.is_file():
            return [(path.name, path)]
    except OSError as exc:
        raise InvalidInput(f"cannot read {shortened(str(path))}: {exc.strerror}") from exc
    raise InvalidInput(f"no such file or folder: {shortened(str(path))}")


def shortened(name: str) -> str:
    """A name as a message can bear it: the beginning and the end of a very long one."""
    return name if len(name) <= _SHOWN_NAME else f"{name[: _SHOWN_NAME // 2]}…{name[-_SHOWN_NAME // 2 :]}"


def _as_array(images: Images) -> Array:
    try:
        array = np.asarray(images)
    except ValueError as exc:
        raise InvalidInput("images of different sizes do not fit one array: send them as files") from exc
    if not array.size:
        raise InvalidInput("there are no images")
    if array.dtype != np.uint8:
        raise InvalidInput(f"images must be uint8 from 0 to 255, and this is {array.dtype}")
    if array.ndim == 3:
        array = array[np.newaxis]
    if array.ndim != 4 or array.shape[-1] != 3:
        raise InvalidInput(f"images must have the shape (n, height, width, 3), and this is {array.shape}")
    return array


def _tensor(array: Array, labels: Labels | None, fields: dict[str, str]) -> Upload:
    inputs = [Tensor("images", np.ascontiguousarray(array))]
    if labels is not None:
        inputs.append(Tensor("labels", np.asarray(labels, dtype=np.int64)))
    parts, headers = encode_request(InferRequest(inputs=tuple(inputs)))

    async def chunks() -> AsyncIterator[bytes]:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _CHUNK_BYTES):
                yield bytes(view[start : start + _CHUNK_BYTES])

    return Upload(headers=headers, params=fields, chunks=chunks)


def _form(entries: Sequence[tuple[str, Path | bytes]], labels: Labels | None, fields: dict[str, str]) -> Upload:
    if labels is not None:
        fields = {**fields, "labels": json.dumps(list(labels), default=int)}
    files = [
        ("images", (_sent_name(name), body if isinstance(body, bytes) else cast(IO[bytes], _FileOnDisk(body))))
        for name, body in entries
    ]
    form = httpx.Request("POST", "http://scheduler/v1/jobs", data=fields, files=files)

    async def chunks() -> AsyncIterator[bytes]:
        # Small parts are gathered, or each little picture would cost a system call of its own.
        held = bytearray()
        for piece in cast(httpx.SyncByteStream, form.stream):
            held += piece
            if len(held) >= _CHUNK_BYTES:
                yield bytes(held)
                held.clear()
        yield bytes(held)

    return Upload(headers={name: form.headers[name] for name in ("Content-Type", "Content-Length")}, chunks=chunks)


class _FileOnDisk:
    """A file of a form that is open only while it is sent, as far as httpx uses one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = path.stat().st_size

    def tell(self) -> int:
        return 0

    def seek(self, _offset: int, _whence: int = os.SEEK_SET) -> int:
        self._pieces = self._read()
        return self._bytes

    def read(self, _count: int = -1) -> bytes:
        return next(self._pieces, b"")

    def _read(self) -> Iterator[bytes]:
        left = self._bytes
        with self._path.open("rb") as file:
            while left >= 0 and (chunk := file.read(_CHUNK_BYTES)):
                left -= len(chunk)
                if left >= 0:
                    yield chunk
        if left:
            raise InvalidInput(f"{self._path} changed while it was sent")


def _sent_name(name: str) -> str:
    """Of a very long name the end."""
    return name.encode("utf-8", "replace")[-_SENT_NAME_BYTES:].decode("utf-8", "ignore")
