"""Rows of observations: what is deleted when its retention is over, what stays, and what a search finds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from scheduler.core.observing import StoredBatch, StoredObservation
from scheduler.core.seeking import SoughtClass, SoughtObservations
from scheduler.store import observation_reads
from scheduler.store.observation_reads import ObservationReads
from scheduler.store.observations import ObservationStore
from scheduler.store.reading import Reader
from tests.unit.scheduler.test_store import Store, opened
from tierkit.errors import NotFound
from tierkit.types import Tier
from tierkit.wire.observations import FinerAnswer, Gap, LocalAnswer, Observation, ObservationBatch, Receipt
from tierkit.wire.sources import SourceRights

OLD, LATER = 1000.0, 2000.0
"""Elapsed times."""
MANY = 10**6


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


async def numbers(reads: ObservationReads, source: str = "gate") -> list[int]:
    pages = reads.of_source("end-0", source, 0, SoughtObservations())
    return [each.content.sequence async for page in pages for each in page]


async def sources(reads: ObservationReads) -> list[tuple[str, str]]:
    return [(each.node_id, each.source) async for part in reads.sources() for each in part]


async def test_what_was_stored_or_amended_lately_stays(store: Store) -> None:
    rows, reads = opened_rows(store)
    await rows.add([batch(1, 900, gap=901), batch(1, 900), batch(1, 1, source="yard")], wall=1.8e9, elapsed=OLD)
    await rows.put_picture("end-0", "gate", 5, b"five", elapsed=OLD)
    await rows.add([batch(7, 7, revision=1), batch(902, 903, gap=950)], wall=1.8e9, elapsed=LATER)
    await rows.put_picture("end-0", "gate", 7, b"seven", elapsed=LATER)
    assert await rows.purge(OLD, MANY) == (903, 0)
    assert len(await numbers(reads)) == 902
    left, deleted = await rows.purge(OLD + 1, MANY)
    assert (left, deleted > 0) == (3, True)
    assert await numbers(reads) == [7, 902, 903]
    assert [gap async for gap in reads.gaps("end-0", "gate", 0)] == [(950, 950)]
    assert await reads.picture("end-0", "gate", 7) == b"seven"
    with pytest.raises(NotFound):
        await reads.picture("end-0", "gate", 5)
    # A source without rows is forgotten, and one that sends goes on with its numbers.
    assert await sources(reads) == [("end-0", "gate")]
    assert await receipts(rows, batch(903, 903), elapsed=LATER) == [Receipt(stored=0, known=1)]
    assert (await rows.purge(LATER + 1, MANY))[0] == 0
    assert await sources(reads) == []


async def test_the_latest_observations_stay_and_no_number_comes_twice(store: Store) -> None:
    rows, reads = opened_rows(store)
    await rows.add([batch(1, 1200)], wall=1.8e9, elapsed=OLD)
    await rows.add([batch(3, 3, revision=1)], wall=1.8e9, elapsed=OLD)
    highest = await rows.last_received()
    left, deleted = await rows.purge(0.0, 100)
    assert (left, await numbers(reads)) == (100, [3, *range(1102, 1201)])
    assert 0 < deleted < highest
    assert (await rows.purge(0.0, 1))[0] == 1
    assert await numbers(reads) == [3], "it was amended last"
    assert (await rows.purge(LATER, 1))[0] == 0
    after, _ = opened_rows(store)
    await after.add([batch(1300, 1300)], wall=1.8e9, elapsed=LATER)
    assert await after.last_received() > highest


async def test_another_store_numbers_on(store: Store) -> None:
    for start in (1, 11):
        rows, reads = opened_rows(store)
        await rows.add([batch(start, start + 9)], wall=1.8e9, elapsed=OLD)
    assert await numbers(reads) == list(range(1, 21))


async def found(reads: ObservationReads, limit: int, **sought: Any) -> list[tuple[str, int]]:
    """Source and number of all that a search finds, page by page."""
    names, before = [], None
    while True:
        page, before = await reads.page(SoughtObservations(**sought), limit, before)
        assert len(page) <= limit
        names += [(each.content.source, each.content.sequence) for each in page]
        if before is None:
            return names


async def test_a_search_finds_each_once_with_the_newest_first(store: Store) -> None:
    rows, reads = opened_rows(store)
    # Six pictures of each of four sources, several taken at the same moment.
    for place, source in enumerate(("gate", "yard", "hall", "roof")):
        seen = [
            Observation(
                source=source,
                sequence=number,
                revision=int(number == 6),
                age_s=100.0 - (number + place) // 2 * 10,
                local=LocalAnswer(model="m", sha256="0" * 64, label=number % 3, confidence=number / 10),
                finer=finer(number) if number == 2 else None,
            )
            for number in range(1, 7)
        ]
        group = ObservationBatch(node_id="end-0", incarnation="1" * 8, spool="a" * 16, observations=tuple(seen))
        await rows.add([group], wall=1.8e9, elapsed=OLD)
    everything = [each async for part in all_rows(reads) for each in part]
    assert len(everything) == 24

    def expected(chosen: Any) -> list[tuple[str, int]]:
        ordered = sorted(
            filter(chosen, everything),
            key=lambda each: (each.taken_at, each.content.sequence, each.node_id, each.content.source),
            reverse=True,
        )
        return [(each.content.source, each.content.sequence) for each in ordered]

    middle = sorted(each.taken_at for each in everything)[12]
    animals = (SoughtClass(hierarchy="d" * 64, coarse=1),)
    elsewhere = (SoughtClass(hierarchy="e" * 64, coarse=1),)
    seventh = (SoughtClass(hierarchy="d" * 64, fine=7),)
    for limit in (1, 4, 5, 100):
        assert await found(reads, limit) == expected(lambda each: True)
        assert await found(reads, limit, source="yard") == expected(lambda each: each.content.source == "yard")
        own = {"node_id": "end-0", "source": "roof"}
        assert await found(reads, limit, **own) == expected(lambda each: each.content.source == "roof")
        assert await found(reads, limit, since=middle) == expected(lambda each: each.taken_at >= middle)
        assert await found(reads, limit, amended=True) == expected(lambda each: each.content.sequence == 6)
        assert await found(reads, limit, below=0.3) == expected(lambda each: each.content.sequence == 1)
        assert await found(reads, limit, classes=animals, **own) == expected(
            lambda each: each.content.source == "roof" and each.content.sequence in (1, 2, 4)
        ), "number 2 has a finer answer, whose superclass this is"
        assert await found(reads, limit, classes=seventh) == expected(lambda each: each.content.sequence == 2)
        assert await found(reads, limit, classes=(*seventh, *animals), below=0.2) == expected(
            lambda each: each.content.sequence == 1
        )
        assert await found(reads, limit, classes=elsewhere) == []
        assert await found(reads, limit, reader="anna") == []
    await rows.set_rights("end-0", "hall", SourceRights(owner="berta", readers=("anna",)))
    assert await found(reads, 4, reader="anna") == expected(lambda each: each.content.source == "hall")
    assert await reads.rights() == [("end-0", "hall", "anna", False), ("end-0", "hall", "berta", True)]
    halls = SoughtObservations(node_id="end-0", source="hall", reader="berta")

    async def seen_by_berta() -> list[int]:
        exported = [len(part) async for part in reads.of_source("end-0", "hall", 0, halls)]
        page, _ = await reads.page(halls, 10, None)
        return [len(page), sum(exported), len(await reads.received(0, 2**53, halls))]

    assert await seen_by_berta() == [6, 6, 6]
    await rows.set_rights("end-0", "hall", SourceRights())
    assert await found(reads, 4, reader="berta") == []
    assert await seen_by_berta() == [0, 0, 0], "streams ask with each query"


async def test_a_rare_one_is_found_although_a_search_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation_reads, "_WINDOW", 10)
    rows, reads = opened_rows(store)
    await rows.add([batch(1, 95), batch(3, 3, revision=1), batch(93, 93, revision=1)], wall=1.8e9, elapsed=OLD)
    page, before = await reads.page(SoughtObservations(amended=True, source="gate"), 5, None)
    assert ([each.content.sequence for each in page], before is None) == ([93], False)
    assert await found(reads, 5, amended=True, source="gate") == [("gate", 93), ("gate", 3)]
    page, before = await reads.page(SoughtObservations(amended=True), 5, before)
    assert (page, before is None) == ([], False)


def all_rows(reads: ObservationReads) -> Any:
    return _each(reads, ("gate", "yard", "hall", "roof"))


async def _each(reads: ObservationReads, names: Sequence[str]) -> AsyncIterator[list[StoredObservation]]:
    for name in names:
        async for page in reads.of_source("end-0", name, 0, SoughtObservations()):
            yield page


def finer(label: int) -> FinerAnswer:
    return FinerAnswer(
        node_id="cloud-0",
        tier=Tier.CLOUD,
        model="large",
        sha256="2" * 64,
        label=label + 5,
        confidence=0.9,
        coarse_label=1,
        coarse_confidence=0.9,
    )


def opened_rows(store: Store) -> tuple[ObservationStore, ObservationReads]:
    rows = ObservationStore(Reader(store.engine), store.commit, "d" * 64)
    return rows, rows.reads


async def receipts(rows: ObservationStore, *batches: ObservationBatch, elapsed: float) -> list[Receipt]:
    outcomes = await rows.add(batches, wall=1.8e9, elapsed=elapsed)
    return [each.receipt for each in outcomes if isinstance(each, StoredBatch)]
