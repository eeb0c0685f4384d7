"""Cost of decoding a HEIC file, from its own description.

A picture in it may be composed of other pictures, at several levels, and each of them may be used thousands of times.
Its decoder goes through all of them, even where they do not show, and cannot be stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["decoded_pixels"]

_MAX_META_BYTES = 1024**2
_MOST_OUTER_BOXES = 100
_MAX_DEPTH = 4

Content = bytes | memoryview


def decoded_pixels(data: bytes | memoryview) -> int:
    """Pixels of all parts that the decoder goes through for the main picture and its transparency.

    Raises:
        ValueError: the description is damaged, has more than 1 MiB, or its parts are nested too deeply.
    """
    meta = bytes(_only(_boxes(data, _MOST_OUTER_BOXES), b"meta"))
    parts = list(_boxes(meta[4:]))
    main = _only(parts, b"pitm")
    primary = _number(main, 4, 2 if _number(main, 0, 1) == 0 else 4)
    references = list(_references(_only(parts, b"iref", needed=False)))
    sources: dict[int, list[int]] = {}
    for kind, item, targets in references:
        if kind == b"dimg":
            sources.setdefault(item, []).extend(targets)
    pixels = _pixels(_only(parts, b"iprp"))
    known: dict[int, int] = {}

    def cost(item: int, depth: int) -> int:
        if item not in known:
            if depth > _MAX_DEPTH:
                raise ValueError("pictures of pictures of pictures")
            if item not in sources and item not in pixels:
                raise ValueError("a part without a size")
            known[item] = sum(cost(source, depth + 1) for source in sources[item]) if item in sources else pixels[item]
        return known[item]

    transparency = [item for kind, item, targets in references if kind == b"auxl" and primary in targets]
    return sum(cost(item, 0) for item in (primary, *transparency))


def _only(boxes: Iterable[tuple[bytes, Content]], kind: bytes, *, needed: bool = True) -> Content:
    """The content of the box of a kind. Of two, the decoder might take the other one."""
    found = [body for name, body in boxes if name == kind]
    if len(found) > 1 or (needed and not found):
        raise ValueError(f"{len(found)} boxes {kind.decode()}")
    return found[0] if found else b""


def _boxes(data: Content, most: int = _MAX_META_BYTES) -> Iterator[tuple[bytes, Content]]:
    """Kinds and contents of the boxes in a file or a box, `most` at most."""
    at = 0
    for _ in range(most):
        if at + 8 > len(data):
            return
        length, head = _number(data, at, 4), 8
        if length == 1:
            length, head = _number(data, at + 8, 8), 16
        elif length == 0:
            length = len(data) - at
        if length < head or at + length > len(data):
            raise ValueError("a box is cut off")
        kind = bytes(data[at + 4 : at + 8])
        if kind == b"meta" and length > _MAX_META_BYTES:
            raise ValueError("its description is too long")
        yield kind, data[at + head : at + length]
        at += length
    if at < len(data):
        raise ValueError("too many boxes")


def _references(box: Content) -> Iterator[tuple[bytes, int, list[int]]]:
    """Kind, item, and the items that it refers to."""
    if box:
        width = 2 if box[0] == 0 else 4
        for kind, body in _boxes(box[4:]):
            targets = range(width + 2, len(body) - width + 1, width)
            yield kind, _number(body, 0, width), [_number(body, at, width) for at in targets]


def _pixels(box: Content) -> dict[int, int]:
    """Map each item to the largest pixel count among its properties."""
    parts = list(_boxes(box))
    sizes = [
        _number(body, 4, 4) * _number(body, 8, 4) if kind == b"ispe" else 0
        for kind, body in _boxes(_only(parts, b"ipco"))
    ]
    found: dict[int, int] = {}
    owners = _only(parts, b"ipma")
    width, step, at = (2 if _number(owners, 0, 1) == 0 else 4), 1 + (_number(owners, 3, 1) & 1), 8
    for _ in range(_number(owners, 4, 4)):
        item, count = _number(owners, at, width), _number(owners, at + width, 1)
        at += width + 1
        for place in range(at, at + count * step, step):
            index = _number(owners, place, step) & (0x7F if step == 1 else 0x7FFF)
            if 0 < index <= len(sizes) and sizes[index - 1]:
                found[item] = max(found.get(item, 0), sizes[index - 1])
        at += count * step
    return found


def _number(data: Content, at: int, width: int) -> int:
    if at + width > len(data):
        raise ValueError("cut off")
    return int.from_bytes(data[at : at + width])
