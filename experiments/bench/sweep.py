"""Several levels of load after one another, in an event loop of their own; Ctrl-C keeps what is there."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence

from experiments.bench.levels import Level, Load, Plan, measure
from experiments.bench.targets import Target

__all__ = ["loop_factory", "run_sweep"]

Announce = Callable[[Target, Load, int], None]
"""Called before each level, with its number from 0."""


def run_sweep(
    make_target: Callable[[], Awaitable[Target]], loads: Sequence[Load], plan: Plan, announce: Announce
) -> tuple[Target, list[Level]]:
    """Measure all levels in order.

    The first Ctrl-C ends the level under way and with it the sweep, and what was measured is returned, the last level
    marked as interrupted; a second one raises KeyboardInterrupt.

    Raises:
        InvalidInput, NotFound, Unavailable, UpstreamError, UpstreamTimeout: what `make_target` found wrong.
    """

    async def run() -> tuple[Target, list[Level]]:
        target = await make_target()
        stop = asyncio.Event()
        _stop_on_interrupt(stop)
        levels: list[Level] = []
        for number, load in enumerate(loads):
            announce(target, load, number)
            level = await measure(target, load, plan, stop)
            if level is not None:
                levels.append(level)
            if stop.is_set():
                break
        return target, levels

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run())


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The fastest event loop there is here; None stands for asyncio's own."""
    try:
        import uvloop
    except ImportError:  # it does not exist for every system
        return None
    return uvloop.new_event_loop


def _stop_on_interrupt(stop: asyncio.Event) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()

    def first_time() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, first_time)
