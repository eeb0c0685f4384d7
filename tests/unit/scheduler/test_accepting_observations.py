"""Batches that wait for one transaction: senders that give up, and databases that refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from models.hierarchy import bundled_hierarchy
from scheduler.core.observing import StoredBatch
from scheduler.observations.book import SourceBook
from scheduler.observations.service import Observations
from tierkit.errors import InvalidInput, Unavailable
from tierkit.wire.observations import Observation, ObservationBatch, Receipt


class FakeStore:
    """Keeps batches as long as its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.groups: list[list[str]] = []
        self.errors: list[Exception] = []

    async def add(
        self, batches: Sequence[ObservationBatch], *, wall: float, elapsed: float, sites: Mapping[str, str]
    ) -> list[StoredBatch | InvalidInput]:
        self.groups.append([batch.node_id for batch in batches])
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop()
        refused = InvalidInput("too many sources")
        stored = StoredBatch(receipt=Receipt(stored=1, known=0), updates={}, newest={})
        return [refused if batch.node_id == "bad" else stored for batch in batches]

    reads: Any = None

    async def last_received(self) -> int:
        return 0


def batch(node_id: str) -> ObservationBatch:
    seen = Observation(source="gate", sequence=1, age_s=1.0)
    return ObservationBatch(node_id=node_id, incarnation="1" * 8, spool="a" * 16, observations=(seen,))


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


async def sending(store: FakeStore, *node_ids: str) -> list[asyncio.Task[Receipt]]:
    """Tasks that have begun, in this order."""
    book = SourceBook(health_of=lambda node_id: None, fleet_version=lambda: 0, elapsed=lambda: 0.0)
    service = Observations(
        _any(store),
        book,
        bundled_hierarchy(),
        handle=lambda what: None,
        max_pixels=1,
    )
    tasks = [asyncio.create_task(service.accept(batch(node_id))) for node_id in node_ids]
    await asyncio.sleep(0)
    return tasks


def _any(store: FakeStore) -> Any:
    return store


async def test_batches_that_wait_share_the_next_transaction(store: FakeStore) -> None:
    tasks = await sending(store, "a", "b", "bad", "c")
    store.gate.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert store.groups == [["a"], ["b", "bad", "c"]]
    assert [type(each) for each in found] == [Receipt, Receipt, InvalidInput, Receipt]


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_a_sender_that_gives_up_takes_no_other_with_it(store: FakeStore, gone: int) -> None:
    tasks = await sending(store, "a", "b", "c", "d")
    tasks[gone].cancel()
    await asyncio.gather(tasks[gone], return_exceptions=True)
    store.gate.set()
    others = [task for task in tasks if task is not tasks[gone]]
    assert await asyncio.gather(*others) == [Receipt(stored=1, known=0)] * 3


async def test_a_refusal_of_the_database_is_for_one_sender_and_the_others_try_again(store: FakeStore) -> None:
    store.errors.append(Unavailable("the disk is full"))
    tasks = await sending(store, "a", "b", "c")
    store.gate.set()
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, Unavailable)
    assert others == [Receipt(stored=1, known=0)] * 2
