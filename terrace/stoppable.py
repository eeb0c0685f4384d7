"""Runs a coroutine that Ctrl-C, SIGTERM or a closed terminal ends in good order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["run_stoppable"]

T = TypeVar("T")


class _Threads(ThreadPoolExecutor):
    """Nobody waits for what a thread still computes when the command has ended."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def run_stoppable(
    main: Callable[[], Coroutine[Any, Any, T]], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T | None:
    """What `main` returns, or None when a signal ended it. A second signal cancels its clean-up, too."""

    async def supervised() -> T | None:
        task = asyncio.create_task(main(), name="main")
        loop = asyncio.get_running_loop()
        loop.set_default_executor(_Threads())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(supervised())
