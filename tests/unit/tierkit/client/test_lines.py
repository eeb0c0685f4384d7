"""Lines and server-sent events come out whole, however the network cut them."""

import itertools
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, strategies as st

from tierkit.client.lines import ServerSentEvent, iter_lines, iter_server_sent_events
from tierkit.errors import UpstreamError


async def each(items: Sequence[bytes]) -> AsyncIterator[bytes]:
    for item in items:
        yield item


@given(
    lines=st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line and not line.endswith(b"\r"))),
    cuts=st.lists(st.integers(0, 60)),
    ending=st.sampled_from([b"\n", b"\r\n"]),
)
async def test_lines_do_not_depend_on_how_they_arrive(lines: list[bytes], cuts: list[int], ending: bytes) -> None:
    text = b"".join(line + ending for line in lines)
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    chunks = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    assert [line async for line in iter_lines(each(chunks))] == lines


async def test_only_the_newline_ends_a_line() -> None:
    text = '{"name": "a\u2028b\x0bc\x85"}\n'.encode()
    assert [line async for line in iter_lines(each([text]))] == [text.strip(b"\n")]


async def test_an_unfinished_line_is_dropped() -> None:
    assert [line async for line in iter_lines(each([b"whole\nhal"]))] == [b"whole"]


async def test_an_endless_line_is_refused() -> None:
    with pytest.raises(UpstreamError, match="more than 100 bytes"):
        assert [line async for line in iter_lines(each([b"x" * 64, b"x" * 64]), max_line_bytes=100)]


async def events(*lines: bytes) -> list[ServerSentEvent]:
    return [event async for event in iter_server_sent_events(each(lines))]


async def test_events_carry_kind_data_and_the_newest_id() -> None:
    assert await events(b"id: 7", b"event: coarse", b"data: {}", b"", b"data: a", b"data:b", b"") == [
        ServerSentEvent(kind="coarse", data=b"{}", id="7"),
        ServerSentEvent(kind="message", data=b"a\nb", id="7"),
    ]


async def test_comments_and_unfinished_events_yield_nothing() -> None:
    assert await events(b": keep-alive", b"", b"event: fine", b"data: {}") == []
