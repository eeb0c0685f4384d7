"""Threads of the sinks: what blocks there blocks nothing else."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from scheduler.sinks.threads import Threads
from tierkit.testing import wait_for


async def test_work_that_never_returns_occupies_one_thread() -> None:
    threads, never, calls = Threads(most=2), threading.Event(), list[int]()

    def work() -> None:
        calls.append(1)
        never.wait()

    waiting = [asyncio.create_task(threads.run("stuck", work)) for _ in range(50)]
    try:
        await wait_for(lambda: bool(calls), what="the work to begin")
        assert await threads.run("other", lambda: 7) == 7
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await threads.run("other", lambda: 8) == 8
        assert calls == [1]
    finally:
        never.set()


async def test_no_more_threads_than_allowed() -> None:
    threads, go, begun, free = Threads(most=3), threading.Event(), list[int](), threading.Semaphore(3)

    def work(number: int) -> int:
        assert free.acquire(blocking=False), "too many threads"
        begun.append(number)
        go.wait()
        free.release()
        return number

    tasks = [asyncio.create_task(threads.run(each, partial(work, each))) for each in range(10)]
    await wait_for(lambda: len(begun) == 3, what="the first threads")
    go.set()
    assert await asyncio.gather(*tasks) == list(range(10))


@pytest.mark.parametrize(("error", "raised"), [(OSError("no"), OSError), (SystemExit(3), RuntimeError)])
async def test_the_caller_gets_the_error(error: BaseException, raised: type[Exception]) -> None:
    def work() -> None:
        raise error

    with pytest.raises(raised, match=r"no|SystemExit: 3"):
        await Threads().run("key", work)


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 64 + ".example"])
async def test_a_name_that_cannot_be_one_has_no_address(host: str) -> None:
    with pytest.raises(OSError, match="is not the name of a machine"):
        await Threads().resolve(host, 80)
