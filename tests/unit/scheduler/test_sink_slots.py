"""Places for deliveries: each sink owns one, and sinks whose receivers answer get a fair part of the shared ones."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from scheduler.sinks.slots import SinkPlaces, Slots
from tierkit.errors import Rejected
from tierkit.testing import wait_for


class Sink:
    """Holds places until it is told to give them back."""

    def __init__(self, slots: Slots, *, most: int = 1) -> None:
        self.share = SinkPlaces(slots)
        self.share.most = most
        self.held: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, number: int) -> None:
        self.tasks += [asyncio.create_task(self._hold()) for _ in range(number)]

    async def _hold(self) -> None:
        async with self.share.place():
            self.held.append(done := asyncio.Event())
            await done.wait()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_sink_always_gets_a_place_and_then_a_fair_part() -> None:
    slots = Slots(shared=4)
    slow, other, good = (Sink(slots, most=32) for _ in range(3))
    slow.ask(32)
    await wait_for(lambda: len(slow.held) == 5, what="its own place and the shared ones")
    good.ask(32)
    other.ask(32)
    await wait_for(lambda: bool(good.held) and bool(other.held), what="a place of each of the others")
    assert (len(slow.held), len(good.held), len(other.held)) == (5, 1, 1)
    for _ in range(3):
        slow.held.pop(0).set()
    await wait_for(lambda: len(slow.held + good.held + other.held) == 7, what="the places to be used again")
    assert sorted(each.share.used for each in (slow, good, other)) == [2, 2, 3]
    for each in (slow, good, other):
        await each.end()
    assert (slots.free, slots.waiting) == (4, {})


async def test_a_sink_uses_more_places_as_its_receiver_answers() -> None:
    share = SinkPlaces(Slots())
    assert share.most == 1
    for _ in range(40):
        async with share.place():
            pass
    assert share.most == 32
    with pytest.raises(TimeoutError):
        async with share.place():
            raise TimeoutError
    assert share.most == 16
    with pytest.raises(Rejected):
        async with share.place():
            raise Rejected("no")
    assert share.most == 17


@pytest.mark.parametrize("seed", range(20))
async def test_places_are_never_lost_nor_too_many(seed: int) -> None:
    chance, slots, under_way, most = random.Random(seed), Slots(shared=3), Counter[int](), 0
    shares = [SinkPlaces(slots) for _ in range(4)]

    async def deliver(sink: int) -> None:
        nonlocal most
        async with shares[sink].place():
            under_way[sink] += 1
            most = max(most, under_way.total())
            assert under_way[sink] <= 32
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                if chance.random() < 0.2:
                    raise TimeoutError
            finally:
                under_way[sink] -= 1

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(deliver(chance.randrange(4))))
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert 4 < most <= 7
    assert (slots.free, slots.waiting, [each.used for each in shares]) == (3, {}, [0] * 4)
