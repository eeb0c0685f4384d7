"""asyncio on virtual time."""

import asyncio
import time
import weakref

import pytest

from tierkit.virtual_time import VirtualLoop


def loop() -> VirtualLoop:
    return VirtualLoop()  # type: ignore[abstract]


def test_the_clock_jumps_from_one_moment_to_the_next() -> None:
    clock, seen = loop(), []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, clock.time()))

    async def main() -> str:
        async with asyncio.TaskGroup() as group:
            for seconds in (3600.0, 1.0, 60.0):
                group.create_task(wait(seconds))
        return "done"

    began = time.monotonic()
    assert clock.run(main()) == "done"
    assert seen == [(1.0, 1.0), (60.0, 60.0), (3600.0, 3600.0)]
    assert time.monotonic() - began < 5


def test_what_is_due_comes_in_the_order_of_time_and_then_of_asking() -> None:
    clock, seen = loop(), []

    def note(name: str, then: float | None = None) -> None:
        seen.append((name, clock.time()))
        if then is not None:
            clock.at(then, note, f"{name}, then")

    async def main() -> None:
        # Also what is asked for while the clock stands there, even for a time that is over.
        for name, when, then in (
            ("d", 1.0005, 1.0006),
            ("a", 1.0001, 1.0002),
            ("e", 1.0005, 0.5),
            ("f", 1.0012, None),
            ("b", 1.0001, 1.0001),
        ):
            clock.at(when, note, name, then)
        await clock.until(2.0)

    clock.run(main())
    assert [name for name, _ in seen] == ["a", "b", "b, then", "a, then", "d", "e", "e, then", "d, then", "f"]
    assert [when for _, when in seen] == sorted(when for _, when in seen)


def test_timeouts_and_cancelled_timers() -> None:
    clock = loop()

    def fail() -> None:
        raise AssertionError("it was cancelled")

    async def main() -> float:
        timers = []
        for _ in range(20_000):  # enough to be cleared away
            timer = clock.call_later(1000, fail)
            timers.append(weakref.ref(timer))
            timer.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await clock.create_future()
        del timer
        assert sum(each() is not None for each in timers) < 12_000
        return clock.time()

    assert clock.run(main()) == 2.5


def test_what_nobody_awaits_and_fails_ends_the_run() -> None:
    clock = loop()

    def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        clock.call_later(1.0, fail)
        await asyncio.sleep(2.0)

    with pytest.raises(ZeroDivisionError):
        clock.run(main())


def test_a_run_that_can_never_end_says_so() -> None:
    clock = loop()

    async def main() -> None:
        await clock.create_future()

    with pytest.raises(RuntimeError, match="no timer is left"):
        clock.run(main())
