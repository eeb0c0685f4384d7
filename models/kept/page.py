"""A page of kept pictures on the wire: a line of JSON for each picture, its file in base64, and a last line."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from models.kept.sample import KeptPicture
from tierkit.errors import InvalidAnswer

__all__ = ["KEPT_PICTURES", "MOST_PAGE_BYTES", "MOST_PICTURES", "PageEnd", "SentPicture", "read_page", "write_page"]

KEPT_PICTURES = "/v1/kept/pictures"
"""Route of an end node that gives them."""
MOST_PICTURES = 200
"""Bound on the pictures of a page."""
MOST_PAGE_BYTES = 32 << 20
"""Most bytes of a page on the network. A device fills it up to 4 MiB of files, or with one larger file."""
_MOST_SAID = 300

SentPicture = tuple[int, KeptPicture, bytes]
"""Key in the sample of the device, picture, and file."""

_Key = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageEnd:
    """The last line of a page. A page without it was cut off."""

    after: _Key
    """Key to ask for the next page with."""
    more: bool
    """True if there is a next page."""
    withheld: Annotated[int, Field(ge=0, le=MOST_PICTURES, strict=True)] = 0
    """Pictures between that may not go to the reader."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    key: _Key
    picture: KeptPicture
    content: str

    __pydantic_config__ = ConfigDict(extra="forbid")


_line: TypeAdapter[_Line] = TypeAdapter(_Line)
_end: TypeAdapter[PageEnd] = TypeAdapter(PageEnd)


def write_page(pictures: Iterable[SentPicture], end: PageEnd) -> bytes:
    """A page; `read_page` reads it."""
    lines = [
        b'{"key":%d,"picture":%b,"content":"%b"}' % (key, picture.as_json(), base64.b64encode(content))
        for key, picture, content in pictures
    ]
    return b"\n".join([*lines, _end.dump_json(end), b""])


def read_page(body: bytes, after: int) -> tuple[list[SentPicture], PageEnd]:
    """The pictures of a page, and its end. The pictures themselves are not checked.

    Args:
        body: no more than `MOST_PAGE_BYTES`.
        after: the key that the page was asked for with.

    Raises:
        InvalidAnswer: it is cut off, it has another form, or it does not continue after that key.
    """
    if not body.endswith(b"\n"):
        raise InvalidAnswer("the page of kept pictures is cut off")
    if body.count(b"\n") > MOST_PICTURES + 1:
        raise InvalidAnswer(f"the page has more than {MOST_PICTURES} kept pictures")
    lines = body[:-1].split(b"\n")
    found: list[SentPicture] = []
    try:
        end = _end.validate_json(lines[-1])
        for each in map(_line.validate_json, lines[:-1]):
            found.append((each.key, each.picture, base64.b64decode(each.content, validate=True)))
    except ValidationError as error:
        said = error.errors(include_url=False)[0]["msg"][:_MOST_SAID]
        raise InvalidAnswer(f"a line of the page describes no kept picture: {said}") from error
    except (binascii.Error, ValueError) as error:
        raise InvalidAnswer("the file of a kept picture is not in base64") from error
    keys = [after, *(key for key, _, _ in found)]
    rising = all(first < second for first, second in pairwise(keys))
    if not rising or end.after < keys[-1] or (end.more and end.after == after):
        raise InvalidAnswer("the page does not continue where the last one ended")
    return found, end
