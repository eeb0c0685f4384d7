"""How late waits end: one of some has to, for others may have the processor at any moment."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from experiments.emulation.waiting import precise_timer, sleep_precisely, wait_until

ON_LOOP_S = 0.0001
"""asyncio's own timers would be 0.3 ms late, for they go by whole milliseconds."""

IN_THREAD_S = 0.00003
"""`time.sleep` has 0.05 ms of slack."""

TRIES = 200


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if request.param else None) as runner:
        yield runner


def test_sleeping_ends_at_its_time_and_never_before() -> None:
    def late_s() -> float:
        until = time.perf_counter() + 0.003
        sleep_precisely(0.003)
        late = time.perf_counter() - until
        assert late >= 0
        return late

    assert any(late_s() < IN_THREAD_S for _ in range(TRIES))


def test_a_sleep_of_nothing_returns() -> None:
    sleep_precisely(0.0)


def test_the_event_loop_waits_until_a_time_and_never_before(runner: asyncio.Runner) -> None:
    async def late_s() -> float:
        when = time.perf_counter() + 0.0037
        await wait_until(when)
        late = time.perf_counter() - when
        assert late >= 0
        return late

    assert any(runner.run(late_s()) < ON_LOOP_S for _ in range(TRIES))


def test_a_time_that_has_passed_lets_others_have_their_turn(runner: asyncio.Runner) -> None:
    async def turns() -> bool:
        had = asyncio.Event()
        asyncio.get_running_loop().call_soon(had.set)
        await wait_until(time.perf_counter() - 1)
        return had.is_set()

    assert runner.run(turns())


def test_many_waits_at_once_all_end_and_none_before_its_time(runner: asyncio.Runner) -> None:
    async def early_s() -> list[float]:
        start = time.perf_counter() + 0.005

        async def wait(number: int) -> float:
            await wait_until(start + number * 0.001)
            return start + number * 0.001 - time.perf_counter()

        return await asyncio.gather(*(wait(number) for number in reversed(range(10))))

    assert max(runner.run(early_s())) <= 0


def test_a_timer_can_be_armed_anew(runner: asyncio.Runner) -> None:
    async def fires() -> int:
        fired = asyncio.Queue[None]()
        with precise_timer(lambda: fired.put_nowait(None)) as timer:
            timer.arm(time.perf_counter() + 60)
            timer.arm(time.perf_counter() + 0.001)
            await asyncio.wait_for(fired.get(), 5)
            timer.arm(time.perf_counter() - 1)
            await asyncio.wait_for(fired.get(), 5)
        return fired.qsize()

    assert runner.run(fires()) == 0
