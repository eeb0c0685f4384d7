"""Observations that are in the database before a scheduler starts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.observations.devices import SOURCE
from models.manifest import load_manifest
from scheduler.store.commit import GroupCommit
from scheduler.store.database import last_seq, open_database
from scheduler.store.elapsed import kept_elapsed
from scheduler.store.lease import Lease
from scheduler.store.observations import ObservationStore
from scheduler.store.reading import Reader
from tierkit.types import Tier
from tierkit.wire.observations import FinerAnswer, LocalAnswer, Observation, ObservationBatch

__all__ = ["ABSENT", "COMMON", "RARE", "STORED_SOURCES", "StoredRows", "fill", "stored_name"]

COMMON, RARE, ABSENT = 0, 1, 2
"""Superclasses: of half of all observations, of a few, and of none."""
_RARE_ROWS = 10
STORED_SOURCES = 100
_STEP = 50_000
_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """Rows to store: observations of 100 sources, taken evenly over a day."""

    rows: int
    doomed: int = 0
    """The first of them are older."""
    doomed_age_s: float = 0.0


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[tuple[ObservationStore, float]]:
    """The rows of observations in a database, and elapsed time now."""
    engine = await open_database(url)
    lease = Lease(engine, url="http://127.0.0.1:9", lease_s=60.0, alone=True)
    await lease.acquire()
    commit = GroupCommit(engine, lease, next_seq=await last_seq(engine) + 1)
    writer = asyncio.create_task(commit.run())
    try:
        elapsed = await kept_elapsed(engine, commit)
        yield ObservationStore(Reader(engine), commit, load_manifest().hierarchy.digest), elapsed.now()
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        await engine.dispose()


def stored_name(place: int) -> str:
    """Node id of a source with stored observations."""
    return f"stored-{place:03}"


async def fill(url: str, wanted: StoredRows) -> float:
    """Store rows, through the code that stores batches; returns the monotonic time at which they count as stored."""
    chance, wall = random.Random(1), time.time()
    end, cloud = (load_manifest().default_for(tier) for tier in (Tier.END, Tier.CLOUD))
    parent = load_manifest().hierarchy.parent
    others = [fine for fine, coarse in enumerate(parent) if coarse > ABSENT]
    common = [fine for fine, coarse in enumerate(parent) if coarse == COMMON]
    rare = [fine for fine, coarse in enumerate(parent) if coarse == RARE]
    every = max(1, wanted.rows // _RARE_ROWS)

    def seen(number: int) -> Observation:
        """One observation; a fifth of them have an answer of the cloud."""
        fine = rare[0] if number % every == every // 2 else chance.choice(common if number % 2 else others)
        coarse, confidence = parent[fine], chance.random()
        age_s = _DAY_S * (1 - number / wanted.rows)
        finer = None
        if number % 5 == 0:
            finer = FinerAnswer(
                node_id="cloud-1",
                tier=Tier.CLOUD,
                model=cloud.name,
                sha256=cloud.sha256,
                label=fine,
                confidence=confidence,
                coarse_label=coarse,
                coarse_confidence=confidence,
            )
        return Observation(
            source=SOURCE,
            sequence=number // STORED_SOURCES + 1,
            revision=0 if finer is None else 1,
            age_s=age_s,
            taken_at=wall - age_s,
            local=LocalAnswer(model=end.name, sha256=end.sha256, label=coarse, confidence=confidence),
            finer=finer,
            unsure=finer is not None,
        )

    async with _opened(url) as (store, now):
        stored_at = time.monotonic()
        step = min(_STEP, wanted.doomed or _STEP)
        for first in range(0, wanted.rows, step):
            numbers = range(first, min(wanted.rows, first + step))
            elapsed = now - (wanted.doomed_age_s if first < wanted.doomed else 0.0)
            batches = [
                ObservationBatch(
                    node_id=stored_name(place),
                    incarnation="0" * 16,
                    spool=f"{place:016x}",
                    observations=tuple(seen(number) for number in numbers if number % STORED_SOURCES == place),
                )
                for place in range(STORED_SOURCES)
            ]
            for start in range(0, STORED_SOURCES, 10):
                await store.add(batches[start : start + 10], wall=wall, elapsed=elapsed)
    return stored_at
