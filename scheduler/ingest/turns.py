"""Fair turns at the decoders: after each picture, or a few small ones, the next upload has its turn.

So a large upload does not delay the others, and memory is bounded by the pictures that are decoded at a time: only one
large picture.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator
from contextlib import nullcontext, suppress
from typing import TypeVar

from tierkit.memory import give_back

__all__ = ["Steps", "Turns", "at_once"]

T = TypeVar("T")
Steps = Generator[bool, None, None]
"""Blocking work on an upload, in steps: each yields whether the next one decodes a large picture."""


class Turns:
    """Hands out the decoders, first come, first served.

    Args:
        decoders: number of decoders.
        turn_s: seconds for which an upload decodes small pictures before the next one's turn.
    """

    def __init__(self, decoders: int, *, turn_s: float = 0.05) -> None:
        self._turn_s = turn_s
        self._decoders = asyncio.Semaphore(decoders)
        self._large = asyncio.Lock()

    async def run(self, steps: Generator[bool, None, T], stopped: threading.Event) -> T:
        """Do all steps, in threads; returns what they return, and raises what they raise.

        Args:
            stopped: set when this is cancelled, to end the step under way, which is waited for.
        """
        large = any_large = False
        results: list[T] = []

        def noted() -> Steps:
            results.append((yield from steps))

        turns = noted()
        try:
            while True:
                # A large picture that waits for another one occupies no decoder.
                async with self._large if large else nullcontext(), self._decoders:
                    turn = asyncio.create_task(asyncio.to_thread(_turn, turns, large, self._turn_s))
                    next_large = await _finished(turn, stopped)
                if next_large is None:
                    return results[0]
                large = next_large
                any_large |= large
        finally:
            turns.close()
            if any_large:
                await asyncio.to_thread(give_back)


def at_once(steps: Generator[bool, None, T]) -> T:
    """Do all steps here and now; returns what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _turn(steps: Steps, large: bool, turn_s: float) -> bool | None:
    """A few steps; returns whether the next one is large, and None at the end."""
    until = time.monotonic() + turn_s
    while (next_large := next(steps, None)) is large and time.monotonic() < until:
        pass
    return next_large


async def _finished(turn: asyncio.Task[T], stopped: threading.Event) -> T:
    try:
        return await asyncio.shield(turn)
    except asyncio.CancelledError:
        stopped.set()
        while not turn.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({turn})
        turn.exception()  # no caller is left to hear of it
        raise
