"""Kept pictures on the wire, page by page."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from models.kept.page import MOST_PICTURES, PageEnd, read_page, write_page
from models.kept.store import KeptStore
from tests.unit.models.kept.test_kept import picture
from tierkit.errors import InvalidAnswer

END = PageEnd(after=5, more=True)
LINE = write_page([(5, picture(1), b"x")], END).splitlines()[0]
LAST = b'{"after":5,"more":true}'


def test_a_page_comes_back() -> None:
    sent = [(3, picture(1, taken_at=1.5), b"\x00\xff"), (5, picture(2, person=7), b"")]
    end = PageEnd(after=9, more=False, withheld=2)
    assert read_page(write_page(sent, end), 2) == (sent, end)
    assert read_page(write_page([], PageEnd(after=2, more=False)), 2) == ([], PageEnd(after=2, more=False))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\n",
        LINE + b"\n",
        LINE + b"\n" + LAST,
        LINE[:-20] + b"\n" + LAST + b"\n",
        LAST + b"\n" + LINE + b"\n",
        b"<html>\n",
        b"\xff\xfe\n",
        b"[" * 10_000 + b"\n" + LAST + b"\n",
        LINE.replace(base64.b64encode(b"x"), b"x!==") + b"\n" + LAST + b"\n",
        LINE.replace(b'"source":"door"', b'"source":4') + b"\n" + LAST + b"\n",
        LINE.replace(b'"key":5', b'"key":2') + b"\n" + LAST + b"\n",
        LINE.replace(b'"key":5', b'"key":-1') + b"\n" + LAST + b"\n",
        LINE + b"\n" + LINE + b"\n" + LAST + b"\n",
        LINE + b'\n{"after":4,"more":true}\n',
        LINE + b'\n{"after":5,"more":true,"withheld":1000000}\n',
        LINE + b'\n{"after":1e400,"more":true}\n',
        b'{"after":2,"more":true}\n',
        (LINE + b"\n") * (MOST_PICTURES + 1) + LAST + b"\n",
        b"\n" * 100_000,
    ],
    ids=range(20),
)
def test_what_is_no_page_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidAnswer):
        read_page(body, 2)


@pytest.mark.parametrize(
    ("after", "limit", "most_bytes", "keys", "more"),
    [
        (0, 200, 1 << 20, [1, 2, 3, 4], False),
        (0, 2, 1 << 20, [1, 2], True),
        (0, 200, 25, [1, 2], True),
        (0, 200, 1, [1], True),  # one at least
        (3, 200, 1 << 20, [4], False),
        (4, 200, 1 << 20, [], False),
        (99, 200, 1 << 20, [], False),
    ],
)
def test_a_page_of_the_sample_is_bounded(
    after: int, limit: int, most_bytes: int, keys: list[int], more: bool, tmp_path: Path
) -> None:
    store = KeptStore(tmp_path, 1 << 20)
    for sequence in range(1, 5):
        store.keep(picture(sequence), bytes(10))
    page = store.page(after, limit, most_bytes)
    assert [key for key, _, _ in page.pictures] == keys
    assert (page.after, page.more) == (keys[-1] if keys else after, more)
    assert store.keep(picture(5), b"x")  # nothing is left open
    store.close()
