"""Files that are read again when they change: tokens and certificates are exchanged while services run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from tierkit.errors import SetupError

__all__ = ["follow_files", "signature"]

log = logging.getLogger(__name__)

_PERIOD_S = 1.0


def signature(paths: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """What changes when a file is written, replaced, or given other permissions; () for one that is not there."""
    found: list[tuple[int, ...]] = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError:
            found.append(())
        else:
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_mode))
    return tuple(found)


async def follow_files(
    paths: Sequence[Path], seen: tuple[tuple[int, ...], ...], read: Callable[[], None], *, what: str
) -> None:
    """Call `read`, in a thread, whenever one of the files has changed, until cancelled. What it cannot use leaves
    everything as it was, and is told once.

    Args:
        seen: their signature when they were last read.
        what: names them in the log.
    """
    while True:
        await asyncio.sleep(_PERIOD_S)
        now = await asyncio.to_thread(signature, paths)
        if now == seen:
            continue
        seen = now
        try:
            await asyncio.to_thread(read)
        except SetupError as exc:
            log.error("the %s stay as they were: %s", what, exc)
        else:
            log.info("the %s were read again", what)
