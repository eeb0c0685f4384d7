"""One copy of a file: fetched in chunks from the named source, and each chunk is checked as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from tierkit.copies.store import Store
from tierkit.errors import (
    InvalidAnswer,
    NotFound,
    SetupError,
    TerraceError,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)

__all__ = ["Outcome", "copied", "while_wanted"]

log = logging.getLogger(__name__)

_TOLD_S = 2.0
"""Seconds between two reports to the host while a copy is under way."""
_AT_ONCE = 2
"""Chunks that are requested at a time: while one is on its way, the source prepares the next."""
_CHUNK_S = 60.0
"""Budget of one chunk over a slow link."""
_STALLED_S = 20.0
"""Silence after which a source is given up."""
_AGAIN_S = 0.2

Outcome = Literal["whole", "wrong", "lacks", "gone", "full", "ended"]

Chunk = Callable[[str, range, float], Awaitable[bytes]]
"""Fetches these bytes of the file with this sha256 from the source, within a budget in seconds."""


async def while_wanted(copying: Awaitable[Outcome], wanted: Callable[[], Awaitable[bool]]) -> Outcome:
    """The outcome of a copy, which ends as well once the host no longer wants it.

    Args:
        wanted: asks the host, every two seconds.
    """
    task = asyncio.ensure_future(copying)
    try:
        while True:
            await asyncio.wait({task}, timeout=_TOLD_S)
            if task.done():
                return await task
            if not await wanted():
                return "ended"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, TerraceError):
            await task


async def copied(store: Store, file: int, chunk: Chunk, *, source: str | None) -> Outcome:
    """Fetch the chunks that the store lacks.

    Args:
        source: URL of the worker that sends them; None for the host, which is believed.

    Raises:
        InvalidAnswer: the host itself sends wrong bytes.
        NotFound: the host lacks the file.
        SetupError: of this machine's disk.
    """
    missing, came_at = iter(store.lacks(file)), time.monotonic()

    async def some() -> None:
        nonlocal came_at
        for number in missing:
            while not await _one(store, file, number, chunk, came_at):
                pass
            came_at = time.monotonic()

    try:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(some())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    except InvalidAnswer as error:
        if source is None:
            raise
        log.warning("%s has sent a wrong chunk: %s", source, error)
        return "wrong"
    except NotFound:
        if source is None:
            raise
        log.warning("%s lacks the file that it should have", source)
        return "lacks"
    except TerraceError as error:
        fleeting = isinstance(error, Unavailable | UpstreamTimeout | UpstreamError)
        if isinstance(error, SetupError) or (source is None and not fleeting):
            raise
        log.warning("%s sends nothing: %s", source or "the host", error)
        return "gone"
    return "whole"


async def _one(store: Store, file: int, number: int, chunk: Chunk, came_at: float) -> bool:
    """Fetch a chunk and keep it. False if its source does not have it yet."""
    parts = store.files[file]
    left_s = came_at + _STALLED_S - time.monotonic()
    try:
        content = await chunk(parts.sha256, parts.chunk(number), max(_AGAIN_S, min(_CHUNK_S, left_s)))
    except UpstreamUnavailable:
        raise
    except Unavailable:  # its own copy is under way
        if time.monotonic() - came_at > _STALLED_S:
            raise
        await asyncio.sleep(_AGAIN_S)
        return False
    await store.put(file, number, content)
    return True
