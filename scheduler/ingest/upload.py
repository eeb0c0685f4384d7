"""A request body in any accepted form: received into the staging file, then turned into images and facts about them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache

from scheduler.core.job import ImageFacts
from scheduler.core.policy import PolicyRequest, read_policy
from scheduler.ingest.collect import Collector, is_file
from scheduler.ingest.inputs import ImageWriter
from scheduler.ingest.labels import labels_from_json
from scheduler.ingest.staging import MAX_FIELDS_BYTES, StagedUpload, receive_body, receive_form
from scheduler.settings import SchedulerSettings
from tierkit.errors import InvalidInput, MalformedMessage, TooLarge, UnsupportedMedia
from tierkit.types import OnBadInput
from tierkit.wire.oip import BINARY_HEADER, parse_header_length

__all__ = ["ACCEPTED", "Incoming", "Upload", "build_input", "receive_upload"]

_FILES = {
    "application/zip": "upload.zip",
    "application/x-zip-compressed": "upload.zip",
    "application/x-npy": "upload.npy",
    "application/x-npz": "upload.npz",
    "image/png": "upload.png",
    "image/jpeg": "upload.jpg",
    "image/jpg": "upload.jpg",
    "image/pjpeg": "upload.jpg",
    "image/webp": "upload.webp",
    "image/tiff": "upload.tiff",
    "image/bmp": "upload.bmp",
    "image/gif": "upload.gif",
    "image/avif": "upload.avif",
    "image/heic": "upload.heic",
    "image/heif": "upload.heif",
}
_MOST_NAMED, _MOST_SAID = 1000, 200
"""Most faulty files of an upload that are named, and most characters of a fault."""
_SMALL_BYTES = 64 * 1024
"""Bodies of this size on all connections fit into memory together."""
_MAX_REMEMBERED_CHARACTERS = 1024
"""Longest query whose policy is remembered."""
_A_FILE = "upload"
_TENSOR = "application/octet-stream"
ACCEPTED = ("multipart/form-data", _TENSOR, *_FILES)
"""Content types of uploads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A received upload, its policy read, its files not yet looked at."""

    policy: PolicyRequest
    labels: str | None = None
    header_length: int | None = None
    """Header length of a tensor; None if the parts of the staging file are files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request whose body is an upload."""

    headers: Mapping[str, str]
    """Names in lower case."""
    query: Sequence[tuple[str, str]]
    """Policy fields, used by kinds of body that have no place for them; a form may use both."""
    stream: AsyncIterable[bytes]
    """The body."""
    until_gone: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Cancels what runs inside when the client has gone."""

    @property
    def small(self) -> bool:
        """True if the body announces that it is, and so may be held in memory."""
        announced = self.headers.get("content-length", "")
        return announced.isdigit() and int(announced[:19]) <= _SMALL_BYTES


async def receive_upload(incoming: Incoming, staging: StagedUpload, limits: SchedulerSettings) -> Upload:
    """Receive a body.

    Raises:
        UnsupportedMedia: a content type that is not accepted, or a compressed body.
        InvalidInput and its kin: a wrong policy, form or header.
    """
    headers, query, stream = incoming.headers, incoming.query, incoming.stream
    coding = headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise UnsupportedMedia(f"content encoding {coding[:32]!r}: send the body uncompressed")
    content_type = headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        await receive_form(stream, staging, content_type=content_type, max_files=limits.max_images)
        return _read_form(staging, query)
    short = sum(len(name) + len(value) for name, value in query) <= _MAX_REMEMBERED_CHARACTERS
    # Before the body: a misspelt field should not cost a gigabyte.
    policy = (_remembered_policy if short else read_policy)(tuple(query))
    if kind in _FILES or kind.startswith("image/"):
        await receive_body(stream, staging, name=_FILES.get(kind, _A_FILE))
        return Upload(policy=policy)
    if not kind and "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
        raise InvalidInput("the job has no images: send them as the body")
    if kind in (_TENSOR, ""):
        length = parse_header_length(headers.get(BINARY_HEADER.lower()))
        await receive_body(stream, staging, name=_A_FILE if length is None else "tensor")
        if length is not None or is_file(staging.view(staging.parts[0])):
            return Upload(policy=policy, header_length=length)
        if kind:
            raise MalformedMessage(
                f"a body of type {_TENSOR} that does not begin like a picture, .zip, .npy or .npz is a tensor: it needs"
                f" the header {BINARY_HEADER}"
            )
    raise UnsupportedMedia(f"the content type {kind[:64] or '(none)'} is not accepted; known: {', '.join(ACCEPTED)}")


_remembered_policy = lru_cache(64)(read_policy)


def build_input(
    upload: Upload,
    staging: StagedUpload,
    writer: ImageWriter,
    limits: SchedulerSettings,
    fine: Sequence[str],
    stopped: threading.Event,
) -> Generator[bool, None, ImageFacts]:
    """Write all images of an upload to `writer` and return what is known of them; for `Turns`.

    Raises:
        InvalidInput and its kin: with the name of the file that is wrong; what was written is of no use then.
    """
    collector = Collector(writer, limits, fine, stopped, mend=upload.policy.on_bad_input is OnBadInput.ANSWER)
    if upload.header_length is not None:
        yield from collector.add_tensor(staging, staging.parts[0], upload.header_length)
    else:
        for part in staging.parts:
            yield from collector.add_file(staging, part)
    if writer.images == 0:
        raise InvalidInput("no images in the upload")
    _check_damage(collector.damaged, writer.images, upload.policy)
    given = None if upload.labels is None else labels_from_json(upload.labels, fine, images=writer.images)
    unique = collector.unique_names()
    names = [unique.get(image) for image in range(writer.images)]
    return ImageFacts(
        labels=collector.joined_labels(given),
        names=names if collector.names else None,
        resized=collector.resized,
        damaged={
            image: str(exc).removeprefix(f"{collector.names[image]}: ")[:_MOST_SAID]
            for image, exc in collector.damaged.items()
        },
        left_out=dict(collector.left_out),
        mended={image: said[:_MOST_SAID] for image, said in collector.mended.items()},
    )


def _check_damage(damaged: Mapping[int, InvalidInput], images: int, policy: PolicyRequest) -> None:
    """Refuse an upload with pictures that cannot be read, unless its policy accepts them; all are named."""
    if not damaged or (policy.on_bad_input is not OnBadInput.FAIL and len(damaged) < images):
        return
    first = next(iter(damaged.values()))
    if images == 1:
        raise first
    said = "; ".join(str(exc)[:_MOST_SAID] for exc in itertools.islice(damaged.values(), _MOST_NAMED))
    more = f"; and {len(damaged) - _MOST_NAMED} more" if len(damaged) > _MOST_NAMED else ""
    way_out = "" if len(damaged) == images else "; on_bad_input=skip answers the others"
    raise type(first)(f"{len(damaged)} of {images} files cannot be read: {said}{more}{way_out}")


def _read_form(staging: StagedUpload, query: Sequence[tuple[str, str]]) -> Upload:
    # A field that a person leaves empty in a browser's form is sent as well.
    labels = [value for name, value in staging.fields if name == "labels" and value]
    for part in [part for part in staging.parts if part.field != "images"]:
        if part.field != "labels":
            raise InvalidInput(f"unknown file field {part.field[:64]!r}: files go into 'images' (and 'labels')")
        if part.length > MAX_FIELDS_BYTES:
            raise TooLarge(f"labels: {part.length} bytes; {MAX_FIELDS_BYTES} are accepted, more labels go into an .npz")
        labels.append(bytes(staging.view(part)).decode("utf-8", "replace"))
        staging.parts.remove(part)
    if len(labels) > 1:
        raise InvalidInput("the field 'labels' is given twice")
    if any(name == "images" for name, _ in staging.fields):
        raise InvalidInput("the field 'images' must hold files (with a file name)")
    policy = read_policy([*query, *((name, value) for name, value in staging.fields if name != "labels")])
    return Upload(policy=policy, labels=labels[0] if labels else None)
