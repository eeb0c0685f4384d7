"""Bodies of submissions: arrays as one binary tensor, files and folders as a multipart form.

An `UploadBody` can be sent more than once, because each call of `chunks()` starts from the beginning. Files are opened
one at a time as they are sent, so a folder of 50,000 pictures needs neither memory nor 50,000 file descriptors.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TypedDict, cast
from urllib.parse import quote

import httpx
import numpy as np
from pydantic import BaseModel
from pydantic_core import to_json

from tierkit.client.files import File, Files, gather, named_files
from tierkit.errors import InvalidInput
from tierkit.picture_files import told
from tierkit.tensors import Array
from tierkit.types import (
    EncodeOn,
    Escalate,
    FeatureForm,
    OnBadInput,
    Privacy,
    Recovery,
    Scheme,
    Tier,
    UpstreamLoss,
)
from tierkit.wire.messages import NAME_HEADER
from tierkit.wire.oip import InferRequest, Tensor, encode_request

__all__ = ["Images", "Labels", "PolicyFields", "UploadBody", "build_upload", "json_upload"]


_log = logging.getLogger(__name__)


class Pixels(Protocol):
    """Object that numpy turns into an array without guessing: an array or PIL image."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


Images = File | Pixels | Sequence[File | Pixels] | Mapping[str, File]
"""An array (n, height, width, 3) of uint8, or a sequence of (height, width, 3) arrays or PIL images. Or the path of an
image file, .zip, .npz, .npy or folder, encoded bytes, or a sequence of paths and bytes. Or a mapping from names in the
results to files."""

Labels = Sequence[int | str | None] | Array

_CHUNK_BYTES = 1 << 20
_PLAIN = re.compile(r'[^\x00-\x1f\x7f"\\%]*')


class PolicyFields(TypedDict, total=False):
    """Settings of a job; an omitted or empty one takes the scheduler's default."""

    scheme: Scheme | str | None
    deadline_s: float | None
    task_deadline_s: float | None
    privacy: Privacy | str | None
    encode_on: EncodeOn | str | None
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
    site: str | None
    release: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadBody:
    """A request body that can be sent again."""

    headers: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)
    chunks: Callable[[], AsyncIterator[bytes]]


def json_upload(message: BaseModel | Mapping[str, Any]) -> UploadBody:
    """A message as a JSON body."""
    content = to_json(message)

    async def chunks() -> AsyncIterator[bytes]:
        yield content

    return UploadBody(headers={"Content-Type": "application/json", "Content-Length": str(len(content))}, chunks=chunks)


def build_upload(images: Images, labels: Labels | None, policy: Mapping[str, Any]) -> UploadBody:
    """Choose the body for what was handed in.

    Raises:
        InvalidInput: nothing to send, or something that is neither pictures nor paths to them.
    """
    fields = {name: str(value) for name, value in policy.items() if value is not None}
    files = _as_files(images)
    if files is not None:
        return _form(files.by_name, labels, fields)
    assert not isinstance(images, Mapping)
    array = _as_array(images)
    if labels is not None and len(labels) != len(array):
        raise InvalidInput(f"{len(array)} images came with {len(labels)} labels")
    if labels is None or all(isinstance(label, int | np.integer) for label in labels):
        return _tensor(array, labels, fields)
    # Names of classes have no place in a tensor: the form has a part for them.
    held = io.BytesIO()
    np.save(held, array, allow_pickle=False)
    return _form({"images.npy": held.getvalue()}, labels, fields)


def _as_files(images: Images) -> Files | None:
    """Files to send, or None if `images` holds arrays."""
    if isinstance(images, Mapping):
        return named_files(images)
    if isinstance(images, str | bytes | os.PathLike):
        images = [images]
    if not isinstance(images, Sequence) or not any(isinstance(item, str | bytes | os.PathLike) for item in images):
        return None
    sources: list[File] = []
    for item in images:
        if not isinstance(item, str | bytes | os.PathLike):
            raise InvalidInput(f"cannot send a {type(item).__name__} together with files: send them in a separate job")
        sources.append(item)
    files = gather(sources)
    if files.left_out:
        _log.warning(told(files.left_out))
    return files


def _as_array(images: Images) -> Array:
    for picture in images if isinstance(images, Sequence) else [images]:
        if (mode := getattr(picture, "mode", "RGB")) != "RGB":  # others may have three channels that are no RGB
            raise InvalidInput(f"a picture has the mode {mode}: convert it to RGB, or hand in the file")
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


def _tensor(array: Array, labels: Labels | None, fields: dict[str, str]) -> UploadBody:
    inputs = [Tensor("images", np.ascontiguousarray(array))]
    if labels is not None:
        inputs.append(Tensor("labels", np.asarray(labels, dtype=np.int64)))
    parts, headers = encode_request(InferRequest(inputs=tuple(inputs)))

    async def chunks() -> AsyncIterator[bytes]:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), _CHUNK_BYTES):
                yield bytes(view[start : start + _CHUNK_BYTES])

    return UploadBody(headers=headers, params=fields, chunks=chunks)


def _form(files: Mapping[str, Path | bytes], labels: Labels | None, fields: dict[str, str]) -> UploadBody:
    if labels is not None:
        fields = {**fields, "labels": json.dumps(list(labels), default=int)}
    parts = [
        ("images", _part(name, body if isinstance(body, bytes) else cast(IO[bytes], _FileOnDisk(body))))
        for name, body in files.items()
    ]
    form = httpx.Request("POST", "http://scheduler/v1/jobs", data=fields, files=parts)

    async def chunks() -> AsyncIterator[bytes]:
        # Small parts are gathered, or each little picture would cost a system call of its own.
        held = bytearray()
        for piece in cast(httpx.SyncByteStream, form.stream):
            held += piece
            if len(held) >= _CHUNK_BYTES:
                yield bytes(held)
                held.clear()
        yield bytes(held)

    return UploadBody(headers={name: form.headers[name] for name in ("Content-Type", "Content-Length")}, chunks=chunks)


def _part(name: str, body: bytes | IO[bytes]) -> tuple[str, bytes | IO[bytes], str, dict[str, str]]:
    """A file of a form. What an escape stands for in `filename` is not agreed on."""
    if _PLAIN.fullmatch(name):
        return name, body, "application/octet-stream", {}
    return "file", body, "application/octet-stream", {NAME_HEADER: quote(name)}


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
