"""Work that can be stopped: coroutines in good order, computations at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from terrace.console import screen
from tierkit.atomic import finish_writing

__all__ = ["interruptible", "run_stoppable", "terminable"]

T = TypeVar("T")


class _Threads(ThreadPoolExecutor):
    """Thread pool whose threads do not delay the end of the command."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def run_stoppable(
    main: Callable[[], Coroutine[Any, Any, T]], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T | None:
    """Run `main` with graceful shutdown; return its result, or None if a signal stopped it.

    A second signal also cancels the clean-up.
    """

    async def supervised() -> T | None:
        task = asyncio.create_task(main(), name="main")
        loop = asyncio.get_running_loop()
        loop.set_default_executor(_Threads())
        if threading.current_thread() is threading.main_thread():  # no other gets signals
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(supervised())


def interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Run a command that computes in a thread, so that Ctrl-C stops it at once.

    Ctrl-C waits for a file that is being written, but not for the thread, which ends with the process.
    """

    @functools.wraps(command)
    def in_thread(**given: Any) -> None:
        try:
            _Threads(1).submit(command, **given).result()
        except KeyboardInterrupt:
            screen(stderr=True).show_cursor()  # a progress bar has hidden it
            finish_writing()
            raise

    return in_thread


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP do in this block what Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # no other gets signals
        yield
        return
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: lambda number, frame: signal.raise_signal(signal.SIGINT),
        signal.SIGHUP: lambda number, frame: signal.raise_signal(signal.SIGINT),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
