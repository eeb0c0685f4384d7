"""What becomes of an honest request: pure functions of a template and a random source, so that a seed repeats a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any

from experiments.fuzz.corpus import Template

__all__ = ["Delivery", "Mutant", "changed_body", "changed_bytes", "make"]

_HUGE_JSON = 1 / 5000
"""Share of the requests with megabytes of JSON: one takes as long to send as hundreds of others."""

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_NUMBERS = (
    b"0",
    b"-1",
    b"-0.0",
    b"1e400",
    b"NaN",
    b"-Infinity",
    b"1" + b"0" * 400,
    b"2147483648",
    b"9" * 19,
    b"1e-320",
)
_TEXTS = (
    "",
    "\x00",
    "\r\n",
    "A" * 300,
    "A" * 70_000,
    "\ud83d\ude00",
    "../../etc/passwd",
    "%00",
    "%ff",
    "'\"<>",
    "-1",
    "٣",
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1e308,
    10**30,
    "",
    "x",
    "\u0000",
    [],
    {},
    [[]],
    [None],
    {"": None},
)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 40, "")
_HEADERS = (
    ("Content-Type", f"multipart/form-data; boundary={'b' * 300}"),
    ("Content-Type", "multipart/form-data"),
    ("Content-Type", "application/json; charset=utf-7"),
    ("Content-Encoding", "gzip"),
    ("Content-Encoding", "zstd"),
    ("Transfer-Encoding", "chunked"),
    ("Expect", "100-continue"),
    ("Upgrade", "websocket"),
    ("Connection", "close, upgrade"),
    ("Range", "bytes=9-1,-"),
    ("Range", "bytes=0-0,1-1,2-2,-1"),
    ("If-None-Match", '"' * 50),
    ("Last-Event-ID", "9" * 18),
    ("Authorization", "Bearer \xff"),
    ("Idempotency-Key", "k" * 5000),
    ("Inference-Header-Content-Length", "-1"),
    ("Inference-Header-Content-Length", "99999999999"),
    ("Terrace-Budget-Ms", "0"),
    ("Terrace-Escalation", "[" * 900),
    ("Host", "["),
    ("X-Request-Id", "i" * 300),
)
_DEPTHS = (10, 900, 5_000, 100_000)


class Delivery(StrEnum):
    """How a request is sent."""

    WHOLE = "whole"
    PIECES = "pieces"
    TWICE = "twice"
    """Two at once, the second before the first is answered."""
    HALF = "half"
    """The first half, and then nothing."""
    RESET = "reset"
    """Whole, and the connection is reset before the answer."""


_DELIVERIES = (
    *(Delivery.WHOLE,) * 90,
    *(Delivery.PIECES,) * 3,
    *(Delivery.TWICE,) * 2,
    *(Delivery.HALF,) * 2,
    *(Delivery.RESET,) * 3,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One request as bytes."""

    service: str
    method: str
    """As the client reads the answer: that to HEAD has no body."""
    content: bytes
    delivery: Delivery


def make(templates: list[Template], seed: int, number: int) -> Mutant:
    """The `number`-th request of a run: one of the templates, changed in up to three ways."""
    chance = Random(f"{seed}/{number}")
    template = chance.choice(templates)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        template = chance.choice(_CHANGES)(template, chance)
    if chance.random() < _HUGE_JSON:
        template = replace(template, body=b"[" + b"[]," * chance.choice((100_000, 3_000_000)) + b"[]]")
    headers = dict(template.headers)  # a header that was changed into another one counts once
    length = str(len(template.body) + (chance.choice((-3, 5, 10**6, 10**20)) if chance.random() < 0.02 else 0))
    lines = [
        f"{template.method} {template.path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in {"Host": "127.0.0.1", **headers}.items()),
        *([f"Content-Length: {length}"] if template.body or chance.random() < 0.1 else []),
    ]
    content = "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + template.body
    if chance.random() < 0.03:
        content = changed_bytes(content, chance)
    return Mutant(
        service=template.service, method=template.method, content=content, delivery=chance.choice(_DELIVERIES)
    )


def _change_body_bytes(template: Template, chance: Random) -> Template:
    return replace(template, body=changed_bytes(template.body, chance)) if template.body else template


def changed_bytes(content: bytes, chance: Random) -> bytes:
    """A few bytes changed, taken out, repeated, or all after a place cut off."""
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


def changed_body(body: bytes, chance: Random) -> bytes:
    """A body, changed in up to three ways."""
    template = Template(service="", method="", path="", headers=(), body=body)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        template = chance.choice(_BODY_CHANGES)(template, chance)
    return template.body


def _change_number(template: Template, chance: Random) -> Template:
    """A number of the body, where it is text or has a text in front, becomes an odd one."""
    found = [match.span() for match in _NUMBER.finditer(template.body[:4096])]
    if not found:
        return template
    start, end = chance.choice(found)
    return replace(template, body=template.body[:start] + chance.choice(_NUMBERS) + template.body[end:])


def _change_json(template: Template, chance: Random) -> Template:
    """A value of a JSON body becomes another one, is taken out, or stands deep inside of lists and objects."""
    try:
        content = json.loads(template.body)
        places = list(_places(content))
    except (ValueError, RecursionError):  # no JSON, or one that an earlier change has nested
        return template
    if not places:
        return template
    holder, key = chance.choice(places)
    match chance.randrange(4):
        case 0:
            holder[key] = chance.choice(_VALUES)
        case 1:
            holder[key] = chance.choice(_TEXTS)
        case 2 if isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        case _:
            holder[key] = "@deep@"
    body = json.dumps(content).replace('"@deep@"', _deep(chance))
    return replace(template, body=body.encode())


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list and object inside of a value, with each of its indices and keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _deep(chance: Random) -> str:
    depth = chance.choice(_DEPTHS)
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}")))
    return opening * depth + "0" + closing * depth


def _change_body(template: Template, chance: Random) -> Template:
    """Another body altogether."""
    return replace(template, body=chance.choice((b"", b"null", _deep(chance).encode(), chance.randbytes(100))))


def _change_path(template: Template, chance: Random) -> Template:
    path, _, query = template.path.partition("?")
    text = chance.choice(_TEXTS).replace("\r\n", "%0d%0a")
    match chance.randrange(4):
        case 0:
            parts = path.split("/")
            parts[chance.randrange(len(parts))] = text
            path = "/".join(parts)
        case 1:
            query = "&".join(filter(None, (query, f"{chance.choice(('limit', 'tasks', 'scheme', 'x'))}={text}")))
        case 2:
            odd = chance.choice(_NUMBERS).decode()
            query = re.sub(r"\d+", odd, query, count=1)
        case _:
            path += chance.choice(("/", "//", "/..", "%2f", ";a=b"))
    return replace(template, path=f"{path}?{query}" if query else path)


def _change_header(template: Template, chance: Random) -> Template:
    headers = list(template.headers)
    if headers and chance.random() < 0.5:
        at = chance.randrange(len(headers))
        name, value = headers[at]
        match chance.randrange(3):
            case 0:
                del headers[at]
            case 1:
                headers[at] = name, chance.choice(_TEXTS).replace("\r\n", " ")
            case _:
                headers[at] = name, changed_bytes(value.encode("utf-8", "replace"), chance).decode("latin-1")
    else:
        headers.append(chance.choice(_HEADERS))
    return replace(template, headers=tuple(headers))


def _change_method(template: Template, chance: Random) -> Template:
    return replace(template, method=chance.choice(_METHODS))


_BODY_CHANGES = (_change_body_bytes, _change_number, _change_json, _change_json, _change_body)

_CHANGES: tuple[Callable[[Template, Random], Template], ...] = (
    *(_change_body_bytes,) * 4,
    *(_change_number,) * 2,
    *(_change_json,) * 3,
    *(_change_header,) * 2,
    _change_path,
    _change_body,
    _change_method,
)
"""Those that reach deepest more often."""
