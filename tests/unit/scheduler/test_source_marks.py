"""Marks of sources: another value after each change that a sink shows, and the same one otherwise."""

from __future__ import annotations

from typing import Any

from models.hierarchy import bundled_hierarchy
from scheduler.core.observing import StoredBatch, StoredObservation
from scheduler.observations.book import SourceBook
from tierkit.types import Health
from tierkit.wire.observations import (
    DeviceStatus,
    LocalAnswer,
    Observation,
    ObservationBatch,
    Receipt,
    ReportedSource,
)

KEY = ("pi", "gate")


class Book:
    """A book with one source, and the health and the site of its node."""

    def __init__(self) -> None:
        self.health: Health | None = Health.ALIVE
        self.site: str | None = None
        self.book = SourceBook(
            health_of=lambda _: self.health,
            site_of=lambda _: self.site,
            fleet_version=lambda: 0,
            elapsed=lambda: 1.0,
        )
        self.book.hierarchies = {"d": bundled_hierarchy()}

    def says(self, state: str) -> None:
        status = DeviceStatus(sources=(ReportedSource(name="gate", state=state),))
        batch = ObservationBatch(node_id="pi", incarnation="1" * 8, spool="a" * 16, device=status)
        self.book.stored(batch, StoredBatch(receipt=Receipt(stored=0, known=0), updates={}, newest={}))

    def sees(self, sequence: int, received: int) -> None:
        answer = LocalAnswer(model="small", sha256="0" * 64, label=1, confidence=0.5)
        content = Observation(source="gate", sequence=sequence, age_s=0.0, local=answer)
        stored = StoredObservation(
            node_id="pi", received=received, taken_at=0.0, hierarchy="d", has_picture=False, content=content
        )
        batch = ObservationBatch(node_id="pi", incarnation="1" * 8, spool="a" * 16)
        updates: dict[str, Any] = {"gate": None}
        receipt = Receipt(stored=1, known=0)
        self.book.stored(batch, StoredBatch(receipt=receipt, updates=updates, newest={"gate": stored}))


def test_each_change_gives_another_mark() -> None:
    known = Book()
    assert known.book.marks() == {}
    marks = []

    def note() -> None:
        marks.append(known.book.marks()[KEY])
        assert known.book.marks()[KEY] == marks[-1]

    known.says("starting")
    note()
    known.says("running")
    note()
    known.sees(1, received=5)
    note()
    known.sees(2, received=6)
    note()
    known.sees(2, received=7)  # amended
    note()
    known.book.has_picture(*KEY, 2)
    note()
    known.health = Health.DEAD
    note()
    known.site = "farm"
    note()
    assert len(set(marks)) == len(marks)
    known.sees(1, received=8)  # an older one is amended
    assert known.book.marks()[KEY] == marks[-1]
    known.says("running")
    assert known.book.marks()[KEY] == marks[-1]


def test_a_source_as_it_is_now_has_the_fields_of_its_observation() -> None:
    known = Book()
    known.says("running")
    assert known.book.now(*KEY)["last"] is None
    known.sees(3, received=5)
    now = known.book.now(*KEY)
    assert (now["node"], now["source"], now["state"], now["health"]) == (*KEY, "running", Health.ALIVE)
    assert now["last"]["sequence"] == 3
    assert now["last"]["label"] == bundled_hierarchy().coarse[1]
    assert known.book.now("pi", "door")["last"] is None
