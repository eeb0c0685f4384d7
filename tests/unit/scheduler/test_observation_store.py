"""Rows of observations: what is deleted when its retention is over, and what stays."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from scheduler.store.observations import ObservationStore
from scheduler.store.reading import Reader
from tests.unit.scheduler.test_store import Store, opened
from tierkit.errors import NotFound
from tierkit.wire.observations import Gap, Observation, ObservationBatch, Receipt

OLD, LATER = 1000.0, 2000.0
"""Elapsed times."""


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    async with opened(database_url) as store:
        yield store


def batch(
    first: int, last: int, *, source: str = "gate", revision: int = 0, gap: int | None = None
) -> ObservationBatch:
    seen = [Observation(source=source, sequence=each, age_s=1.0, revision=revision) for each in range(first, last + 1)]
    gaps = () if gap is None else (Gap(source=source, first=gap, last=gap),)
    return ObservationBatch(node_id="end-0", incarnation="1" * 8, spool="a" * 16, observations=tuple(seen), gaps=gaps)


async def numbers(rows: ObservationStore, source: str = "gate") -> list[int]:
    return [each.content.sequence async for page in rows.pages("end-0", source, 0) for each in page]


async def test_what_was_stored_or_amended_lately_stays(store: Store) -> None:
    rows = ObservationStore(Reader(store.engine), store.commit, "d" * 64)
    await rows.add([batch(1, 900, gap=901), batch(1, 900), batch(1, 1, source="yard")], wall=1.8e9, elapsed=OLD)
    await rows.put_picture("end-0", "gate", 5, b"five", elapsed=OLD)
    await rows.add([batch(7, 7, revision=1), batch(902, 903, gap=950)], wall=1.8e9, elapsed=LATER)
    await rows.put_picture("end-0", "gate", 7, b"seven", elapsed=LATER)
    assert await rows.purge(OLD) == 0
    assert len(await numbers(rows)) == 902
    assert await rows.purge(OLD + 1) == 900
    assert await numbers(rows) == [7, 902, 903]
    assert [gap async for gap in rows.gaps("end-0", "gate", 0)] == [(950, 950)]
    assert await rows.picture("end-0", "gate", 7) == b"seven"
    with pytest.raises(NotFound):
        await rows.picture("end-0", "gate", 5)
    # A source without rows is forgotten, and one that sends goes on with its numbers.
    assert [source async for source in rows.sources(None, None)] == [("end-0", "gate")]
    (receipt,) = await rows.add([batch(903, 903)], wall=1.8e9, elapsed=LATER)
    assert receipt == Receipt(stored=0, known=1)
    assert await rows.purge(LATER + 1) == 3
    assert [source async for source in rows.sources(None, None)] == []


async def test_another_store_numbers_on(store: Store) -> None:
    for start in (1, 11):
        rows = ObservationStore(Reader(store.engine), store.commit, "d" * 64)
        await rows.add([batch(start, start + 9)], wall=1.8e9, elapsed=OLD)
    assert await numbers(rows) == list(range(1, 21))
