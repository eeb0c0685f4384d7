"""Places for deliveries: each sink owns one, and gets a fair part of the shared ones."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from scheduler.sinks.slots import Slots
from tierkit.testing import wait_for


class Sink:
    """Takes places until it is told to give them back."""

    def __init__(self, slots: Slots, name: str) -> None:
        self.name = name
        self._slots = slots
        self.held: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, number: int) -> None:
        self.tasks += [asyncio.create_task(self._hold()) for _ in range(number)]

    async def _hold(self) -> None:
        async with self._slots.place(self.name):
            self.held.append(done := asyncio.Event())
            await done.wait()

    async def give_back(self) -> None:
        before = len(self.held)
        self.held.pop(0).set()
        assert len(self.held) < before
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_sink_always_gets_a_place_and_then_a_fair_part() -> None:
    slots = Slots(shared=4)
    silent, other, good = (Sink(slots, name) for name in ("silent", "other", "good"))
    silent.ask(32)
    await wait_for(lambda: len(silent.held) == 5, what="its own place and the shared ones")
    good.ask(32)
    other.ask(32)
    await wait_for(lambda: bool(good.held) and bool(other.held), what="a place of each of the others")
    assert (len(silent.held), len(good.held), len(other.held)) == (5, 1, 1)
    for _ in range(3):
        await silent.give_back()
    assert sorted(len(each.held) for each in (silent, good, other)) == [2, 2, 3]
    for each in (silent, good, other):
        await each.end()
    assert (slots._free, slots._used, slots._waiting) == (4, Counter(), {})


@pytest.mark.parametrize("seed", range(20))
async def test_places_are_never_lost_nor_too_many(seed: int) -> None:
    chance, slots, under_way, most = random.Random(seed), Slots(shared=3), Counter[str](), 0

    async def deliver(sink: str) -> None:
        nonlocal most
        async with slots.place(sink):
            under_way[sink] += 1
            most = max(most, under_way.total())
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                under_way[sink] -= 1

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(deliver(f"sink-{chance.randrange(4)}")))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert 4 < most <= 7
    async with AsyncExitStack() as stack:  # all places are free
        for number in range(4):
            await stack.enter_async_context(slots.place("one" if number else "two"))
    assert (slots._free, slots._used, slots._waiting) == (3, Counter(), {})
