"""Broken versions of honest messages, drawn from a random source: the same seed gives the same bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

__all__ = ["changed_body", "changed_bytes", "deep_json"]

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_NUMBERS = (b"0", b"-1", b"-0.0", b"1e400", b"NaN", b"-Infinity", b"1" + b"0" * 400, b"2147483648", b"9" * 19)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1e308, 10**30),
    *("", "x", "\u0000", "A" * 70_000, "\ud83d\ude00", "../../etc/passwd", "\r\n"),
    *([], {}, [[]], [None], {"": None}),
)
_DEPTHS = (10, 900, 5_000, 100_000)


def changed_body(body: bytes, chance: Random) -> bytes:
    """A body with one to three changes."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        body = chance.choice(_CHANGES)(body, chance)
    return body


def changed_bytes(content: bytes, chance: Random) -> bytes:
    """Change, remove, repeat or insert a few bytes, or cut off the rest."""
    at, length = chance.randrange(len(content) + 1), chance.choice((1, 1, 2, 4, 64, 1024))
    match chance.randrange(5):
        case 0:
            return content[:at] + chance.randbytes(min(length, len(content) - at)) + content[at + length :]
        case 1:
            return content[:at] + content[at + length :]
        case 2:
            return content[:at] + content[at : at + length] * chance.choice((2, 50)) + content[at + length :]
        case 3:
            return content[:at]
        case _:
            return content[:at] + chance.randbytes(length) + content[at:]


def deep_json(chance: Random) -> str:
    """Lists or objects within each other, up to 100,000 levels."""
    depth = chance.choice(_DEPTHS)
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}")))
    return opening * depth + "0" + closing * depth


def _odd_number(body: bytes, chance: Random) -> bytes:
    """Replace a number in the first 4 KiB by an odd one."""
    found = [match.span() for match in _NUMBER.finditer(body[:4096])]
    if not found:
        return body
    start, end = chance.choice(found)
    return body[:start] + chance.choice(_NUMBERS) + body[end:]


def _odd_json(body: bytes, chance: Random) -> bytes:
    """Replace, rename or nest a value of a JSON body."""
    try:
        content = json.loads(body)
        places = list(_places(content))
    except (ValueError, RecursionError):  # not JSON, or nested by an earlier change
        return body
    if not places:
        return body
    holder, key = chance.choice(places)
    match chance.randrange(3):
        case 0:
            holder[key] = chance.choice(_VALUES)
        case 1 if isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        case _:
            holder[key] = "@deep@"
    return json.dumps(content).replace('"@deep@"', deep_json(chance)).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All lists and objects within a value, with each of their indices and keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _other_body(body: bytes, chance: Random) -> bytes:
    return chance.choice((b"", b"null", deep_json(chance).encode(), chance.randbytes(100)))


_CHANGES: tuple[Callable[[bytes, Random], bytes], ...] = (
    changed_bytes,
    _odd_number,
    _odd_json,
    _odd_json,
    _other_body,
)
