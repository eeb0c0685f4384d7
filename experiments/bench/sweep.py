"""Several levels of load after one another; being cancelled keeps what is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from experiments.bench.levels import Level, Load, Plan, measure
from experiments.bench.targets import Target

__all__ = ["loop_factory", "sweep"]

Announce = Callable[[Target, Load, int], None]
"""Called before each level, with its number from 0."""


async def sweep(
    target: Awaitable[Target], loads: Sequence[Load], plan: Plan, announce: Announce
) -> tuple[Target, list[Level]]:
    """Measure all levels in order. Being cancelled ends the level under way, which is then marked as interrupted, and
    with it the sweep; being cancelled once more ends it without a result.

    Raises:
        InvalidInput, NotFound, Unavailable, UpstreamError, UpstreamTimeout: what is wrong with the target.
    """
    ready, stop, levels = await target, asyncio.Event(), list[Level]()
    for number, load in enumerate(loads):
        announce(ready, load, number)
        measuring = asyncio.create_task(measure(ready, load, plan, stop))
        try:
            level = await asyncio.shield(measuring)
        except asyncio.CancelledError:
            stop.set()
            level = await measuring
        if level is not None:
            levels.append(level)
        if stop.is_set():
            break
    return ready, levels


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The fastest event loop there is here; None stands for asyncio's own."""
    try:
        import uvloop
    except ImportError:  # it does not exist for every system
        return None
    return uvloop.new_event_loop
