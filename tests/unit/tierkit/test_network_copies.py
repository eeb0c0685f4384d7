"""Copies of networks at a node: what it makes of the scheduler's answers, and what it passes on."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tierkit.copies.files import sha256_of
from tierkit.errors import InvalidInput, NotFound, UpstreamUnavailable
from tierkit.inference.copies import NetworkCopies
from tierkit.settings import NodeSettings
from tierkit.testing import wait_for
from tierkit.wire.copies import CopyAnswer, CopyReport

CONTENT = random.Random(0).randbytes(10_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CHUNK = 3_000
PLAN: dict[str, Any] = {
    "bytes": len(CONTENT),
    "chunk_bytes": CHUNK,
    "chunks": tuple(sha256_of(CONTENT[at : at + CHUNK]) for at in range(0, len(CONTENT), CHUNK)),
}


class Node:
    """A node whose scheduler answers as told, and sends the file itself."""

    busy = False

    def __init__(self, cache: Path, content: bytes = CONTENT, **answer: Any) -> None:
        self.reports: list[CopyReport] = []
        self.started_at: list[int] = []
        self.content, self.answer, self.error = content, {"key": "k", "go": True, **PLAN, **answer}, False
        settings = NodeSettings(node_id="n", cache=cache)
        self.copies = NetworkCopies(
            settings,
            "process-of-a-test",
            self._ask,
            lambda: None,  # type: ignore[arg-type, return-value]  # it asks no other node
            lambda: self.busy,
        )

    async def _ask(self, report: bytes) -> bytes:
        self.reports.append(CopyReport.model_validate_json(report))
        if self.error:
            raise UpstreamUnavailable("it is away")
        return CopyAnswer(**self.answer).model_dump_json().encode()

    async def _direct(self, name: str, sha256: str, start: int) -> AsyncIterator[bytes]:
        self.started_at.append(start)
        for at in range(start, len(self.content), 700):
            yield self.content[at : at + 700]

    async def obtain(self) -> Path | None:
        return await self.copies.obtain("net", SHA256, self._direct)


async def test_a_file_comes_from_the_scheduler_where_that_is_the_source(tmp_path: Path) -> None:
    node = Node(tmp_path)
    path = await node.obtain()
    assert path is not None
    assert path.read_bytes() == CONTENT
    assert [report.got for report in node.reports] == [False, False, True]
    assert node.reports[-1].bytes_from_nodes == 0
    # It is passed on from there, and from the cache once it is moved.
    assert await node.copies.read(SHA256, range(5, 10)) == (CONTENT[5:10], len(CONTENT))
    (tmp_path / SHA256).mkdir()
    path.replace(tmp_path / SHA256 / "net.onnx")
    assert await node.copies.read(SHA256, range(5, 10)) == (CONTENT[5:10], len(CONTENT))
    assert await node.obtain() == tmp_path / SHA256 / "net.onnx"
    assert node.reports[-1].ended
    assert node.reports[-1].holds == (SHA256,)


@pytest.mark.parametrize(
    "plan",
    [
        {"chunks": ()},
        {"chunks": PLAN["chunks"][:-1]},
        {"bytes": 0},
        {"chunk_bytes": 0},
        {"chunks": ("0" * 64,) * 4},
    ],
    ids=str,
)
async def test_a_plan_that_is_none_or_wrong_leaves_the_file_to_the_scheduler(
    tmp_path: Path, plan: dict[str, Any]
) -> None:
    assert await Node(tmp_path, **plan).obtain() is None


async def test_a_scheduler_that_sends_too_little_or_knows_of_no_copies_changes_nothing(tmp_path: Path) -> None:
    short = Node(tmp_path / "a", content=CONTENT[:5_000])
    assert await short.obtain() is None
    assert short.reports[-1].ended
    # What came is kept for the next try.
    short.content = CONTENT
    assert await short.obtain() is not None
    assert short.started_at == [0, CHUNK]
    away = Node(tmp_path / "b")
    away.error = True
    assert await away.obtain() is None


async def test_a_node_that_gives_up_says_so(tmp_path: Path) -> None:
    node = Node(tmp_path, go=False)
    waiting = asyncio.create_task(node.obtain())
    await wait_for(lambda: len(node.reports) >= 2, what="its question")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert node.reports[-1].ended


async def test_requests_come_before_pieces(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.obtain()
    took_s = []
    for node.busy in (False, True):
        began = time.monotonic()
        await node.copies.read(SHA256, range(5))
        took_s.append(time.monotonic() - began)
    assert took_s[1] >= 0.05
    assert took_s[0] < took_s[1]


async def test_only_files_of_this_fleet_are_passed_on_and_not_too_much_at_a_time(tmp_path: Path) -> None:
    node = Node(tmp_path, content=CONTENT)
    other = tmp_path / ("f" * 64)
    other.mkdir()
    (other / "secret.onnx").write_bytes(b"of another fleet")
    (tmp_path / "secret").write_bytes(b"x")
    for name in ("f" * 64, "../secret", "", SHA256):
        with pytest.raises(NotFound):
            await node.copies.read(name, None)
    await node.obtain()
    large = tmp_path / SHA256
    large.mkdir()
    (large / "net.onnx").write_bytes(bytes(5 << 20))
    for span in (None, range(5 << 20), range(3, 3)):
        with pytest.raises(InvalidInput):
            await node.copies.read(SHA256, span)
