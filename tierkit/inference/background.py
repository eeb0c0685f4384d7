"""Work that gives way to the answers of a node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["in_background"]

_NICE = 10

T = TypeVar("T")


async def in_background(work: Callable[[], T]) -> T:
    """Run a function in a thread of low priority, and return its result. If the caller is cancelled, the thread
    continues and its result is dropped."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | BaseException, *, failed: bool) -> None:
        if done.done():
            return
        if failed:
            assert isinstance(outcome, BaseException)
            done.set_exception(outcome)
        else:
            done.set_result(outcome)  # type: ignore[arg-type]  # the result, where it has not failed

    def run() -> None:
        if hasattr(os, "setpriority"):  # on Linux each thread has its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        outcome: T | BaseException
        try:
            outcome, failed = work(), False
        except BaseException as exc:
            outcome, failed = exc, True
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(lambda: settle(outcome, failed=failed))

    threading.Thread(target=run, name="background", daemon=True).start()
    return await done
