"""Files of networks that a node gets from other nodes, and passes on, as the scheduler says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import ValidationError
from starlette.requests import Request
from starlette.routing import Route

from tierkit.copies.copier import Outcome, copied, while_wanted
from tierkit.copies.files import FileParts
from tierkit.copies.serving import KEY_HEADER, bounded, knows, piece_route
from tierkit.copies.store import Store
from tierkit.errors import Forbidden, InvalidAnswer, NotFound, TerraceError
from tierkit.http.client import ask, calling, read_at_most
from tierkit.http.errors import error_of
from tierkit.settings import NodeSettings
from tierkit.wire.copies import CopyAnswer, CopyReport

__all__ = ["COPIES_PATH", "NetworkCopies"]

log = logging.getLogger(__name__)

COPIES_PATH = "/v1/copies"
_MOST_HELD = 64
"""Files that the node passes on, the newest."""
_MOST_CHUNK_BYTES = 4 << 20
_MOST_FAILURES = 3
"""Copies of a file that may fail, before it is fetched as if there were no other nodes."""
_PATIENCE_S = 600.0
"""Seconds for which a node waits for its turn, while it serves its old networks."""
_AGAIN_S = 1.0
_FAREWELL_S = 2.0
_GIVES_WAY_S = 0.05
"""Pause before a piece is sent by a node that answers requests."""
_SENT_AT_ONCE = 2
"""Pieces that are read for other nodes at a time."""
_REASON_BYTES = 4096

Direct = Callable[[str, str, int], AsyncIterator[bytes]]
"""`direct(name, sha256, start)` yields the bytes of a file from the scheduler, from `start` on."""


class NetworkCopies:
    """The copies of one node.

    Args:
        settings: its networks are below `cache`: CACHE/SHA256/FILE.
        incarnation: of its process.
        ask: sends a report to the scheduler, and returns the answer.
        http: its client.
        busy: True while it answers requests, which come before pieces of files.
    """

    def __init__(
        self,
        settings: NodeSettings,
        incarnation: str,
        ask: Callable[[bytes], Awaitable[bytes]],
        http: Callable[[], aiohttp.ClientSession],
        busy: Callable[[], bool],
    ) -> None:
        self._cache, self._folder = settings.cache, settings.cache / "partial" / settings.node_id
        self._incarnation, self._ask, self._http, self._busy = incarnation, ask, http, busy
        self._key = ""
        self._store: Store | None = None
        """Holds the file that came last."""
        self._own: dict[str, None] = {}
        """Files of this fleet, by sha256. The cache may hold files of other fleets as well."""
        self._turn = asyncio.Lock()
        self._sending = asyncio.Semaphore(_SENT_AT_ONCE)

    # --- what it gets ---

    async def obtain(self, name: str, sha256: str, direct: Direct) -> Path | None:
        """The path of a file, which may be moved from there; None if the scheduler knows of no copies, or none came
        about: then the file is to be fetched from the scheduler.

        Args:
            direct: fetches it from the scheduler, where that is whom to copy from.
        """
        async with self._turn:
            self._own[sha256] = self._own.pop(sha256, None)
            while len(self._own) > _MOST_HELD:
                del self._own[next(iter(self._own))]
            try:
                return await self._obtained(name, sha256, direct)
            except TerraceError as exc:
                log.info("the weights of %s come from the scheduler: %s", name, exc)
                return None

    async def _obtained(self, name: str, sha256: str, direct: Direct) -> Path | None:
        """The path of the whole file; None if no copy came about."""
        tell = partial(self._tell, name, sha256)
        answer = await tell(plan=True)
        parts = FileParts(sha256=sha256, bytes=answer.bytes, chunk_bytes=answer.chunk_bytes, chunks=answer.chunks)
        if not parts.chunks or len(parts.chunks) != -(-parts.bytes // max(1, parts.chunk_bytes)):
            raise InvalidAnswer("the scheduler describes no chunks of the file")
        store = self._store = await asyncio.to_thread(self._opened, parts)
        whole, failures, from_nodes, until, news = False, 0, 0, time.monotonic() + _PATIENCE_S, dict[str, Any]()
        try:
            while failures < _MOST_FAILURES and time.monotonic() < until:
                if (found := await asyncio.to_thread(self._cached, sha256)) is not None:
                    return found  # another node of this machine has fetched it
                asked = time.monotonic()
                answer, news = await tell(waits=not news, **news), {}
                if not answer.go:
                    await asyncio.sleep(max(0.0, asked + _AGAIN_S - time.monotonic()) + random.random())
                    continue
                began, before = time.monotonic(), store.lacks(0)
                outcome = await self._copied(store, name, answer, tell, direct)
                came = sum(len(parts.chunk(number)) for number in set(before).difference(store.lacks(0)))
                from_nodes += came if answer.source is not None else 0
                if outcome == "whole":
                    whole = True
                    rate = came / max(1e-6, time.monotonic() - began)
                    with contextlib.suppress(TerraceError):
                        await tell(got=True, bytes_per_s=min(1e12, rate), bytes_from_nodes=from_nodes)
                    log.info("copied weights", extra={"model": name, "bytes_from_nodes": from_nodes})
                    return store.path(0)
                if outcome != "ended":
                    failures += 1
                    news = {"failed": outcome, "failed_source": answer.source}
            return None
        finally:
            if not whole:
                await self._given_up(tell)

    async def _given_up(self, tell: Callable[..., Awaitable[CopyAnswer]]) -> None:
        with contextlib.suppress(TerraceError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await tell(ended=True, waits=False)

    def _opened(self, parts: FileParts) -> Store:
        """A store for a file. What is left of others is removed."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if not path.name.startswith(parts.sha256):
                    path.unlink()
        store = Store(self._folder, [parts], what="the weights that are fetched")
        store.begin(0)
        return store

    async def _copied(
        self, store: Store, name: str, answer: CopyAnswer, tell: Callable[..., Awaitable[CopyAnswer]], direct: Direct
    ) -> Outcome:
        async def wanted() -> bool:
            try:
                now = await tell(waits=False)
            except TerraceError:
                return True  # of a scheduler that is away nothing is heard: the source may still be there
            return (now.go, now.source) == (True, answer.source)

        async def chunk(sha256: str, span: range, budget_s: float) -> bytes:
            assert answer.source is not None
            return await self._chunk(answer.source, answer.key, sha256, span, budget_s)

        if answer.source is None:
            return await while_wanted(_streamed(store, partial(direct, name)), wanted)
        return await while_wanted(copied(store, 0, chunk, source=answer.source), wanted)

    async def _chunk(self, source: str, key: str, sha256: str, span: range, budget_s: float) -> bytes:
        """A piece of a file from another node."""
        headers = {"Range": f"bytes={span.start}-{span.stop - 1}", KEY_HEADER: key}
        who = f"the node at {source}"
        async with (
            calling(who, budget_s=budget_s),
            ask(self._http(), "GET", f"{source}{COPIES_PATH}/{sha256}", headers=headers) as answer,
        ):
            said = await read_at_most(answer, max(len(span) + 1, _REASON_BYTES))
        if answer.status != 206 and answer.status >= 300:
            raise error_of(who, answer.status, said, answer.headers.get("Retry-After"))
        if answer.status != 206 or len(said) != len(span):
            raise InvalidAnswer(f"{who} has sent {len(said):,} bytes of a file, asked for {len(span):,}")
        return said

    async def _tell(self, name: str, sha256: str, **news: Any) -> CopyAnswer:
        holds = await asyncio.to_thread(self._held)
        report = CopyReport(incarnation=self._incarnation, name=name, sha256=sha256, holds=holds, **news)
        try:
            answer = CopyAnswer.model_validate_json(await self._ask(report.model_dump_json().encode()))
        except ValidationError as exc:
            raise InvalidAnswer("the scheduler says nothing of whom to copy a network from") from exc
        self._key = answer.key
        return answer

    # --- what it passes on ---

    def route(self) -> Route:
        """`GET /v1/copies/{sha256}`. Nodes must show the key that they got from the scheduler."""

        async def may_copy(request: Request) -> None:
            if not knows(request, self._key):
                raise Forbidden("only nodes that the scheduler sends here get networks from this one")

        return piece_route(COPIES_PATH, self.read, may_copy)

    async def read(self, sha256: str, span: range | None) -> tuple[bytes, int]:
        """Some bytes of a file that is here, or is on its way here; and its length.

        Raises:
            InvalidInput: too many bytes, or none of these.
            NotFound: it is not here.
            Unavailable: the bytes have not come for long.
        """
        if sha256 not in self._own:
            raise NotFound("this node has no such file")
        if self._busy():
            await asyncio.sleep(_GIVES_WAY_S)
        with contextlib.suppress(NotFound):  # it may have been moved to the cache meanwhile
            return await self._read_whole(sha256, span)
        with contextlib.suppress(NotFound):
            if self._store is not None:
                return await self._store.read(sha256, span)
        return await self._read_whole(sha256, span)

    async def _read_whole(self, sha256: str, span: range | None) -> tuple[bytes, int]:
        async with self._sending:
            path = await asyncio.to_thread(self._cached, sha256)
            if path is None:
                raise NotFound("this node has no such file")
            return await asyncio.to_thread(_read, path, span)

    def _cached(self, sha256: str) -> Path | None:
        with contextlib.suppress(OSError):
            return next((path for path in (self._cache / sha256).iterdir() if path.is_file()), None)
        return None

    def _held(self) -> tuple[str, ...]:
        return tuple(sha256 for sha256 in tuple(self._own) if self._cached(sha256) is not None)


async def _streamed(store: Store, direct: Callable[[str, int], AsyncIterator[bytes]]) -> Outcome:
    """Fetch what the store lacks from the scheduler, with one request.

    Raises:
        InvalidAnswer: the scheduler sends wrong bytes.
        TerraceError: it sends none.
    """
    parts, missing = store.files[0], store.lacks(0)
    if not missing:
        return "whole"
    number, ahead = missing[0], bytearray()
    blocks = direct(parts.sha256, parts.chunk(number).start)
    async with contextlib.aclosing(blocks):  # type: ignore[type-var]  # they are generators
        async for block in blocks:
            ahead += block
            while number < len(parts.chunks) and len(ahead) >= len(parts.chunk(number)):
                size = len(parts.chunk(number))
                if number in missing:
                    await store.put(0, number, bytes(ahead[:size]))
                del ahead[:size]
                number += 1
    if store.lacks(0):
        raise InvalidAnswer("the scheduler has sent too few bytes of a network")
    return "whole"


def _read(path: Path, span: range | None) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            wanted = bounded(span, size=size, chunk_bytes=_MOST_CHUNK_BYTES)
            return os.pread(file.fileno(), len(wanted), wanted.start), size
    except OSError as exc:
        raise NotFound("this node has no such file") from exc
