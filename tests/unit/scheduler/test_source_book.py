"""The list of sources: what old observations and forgotten nodes leave behind."""

from __future__ import annotations

from scheduler.core.observing import StoredBatch
from scheduler.observations.book import SourceBook
from tierkit.types import Health
from tierkit.wire.observations import DeviceStatus, ObservationBatch, Receipt, ReportedSource


def named(node_id: str, *sources: str) -> ObservationBatch:
    status = DeviceStatus(sources=tuple(ReportedSource(name=name, state="starting") for name in sources))
    return ObservationBatch(node_id=node_id, incarnation="1" * 8, spool="a" * 16, device=status)


def test_sources_that_never_sent_anything_go_with_their_node() -> None:
    listed = {"end-0", "end-1"}
    book = SourceBook(
        health_of=lambda node_id: Health.ALIVE if node_id in listed else None,
        fleet_version=lambda: 0,
        elapsed=lambda: 100.0,
    )
    nothing = StoredBatch(receipt=Receipt(stored=0, known=0), updates={}, newest={})
    for node_id in ("end-0", "end-1"):
        book.stored(named(node_id, "gate", "yard"), nothing)
    book.stored(named("end-0", "gate"), nothing)
    assert book.visible(None) == [("end-0", "gate"), ("end-1", "gate"), ("end-1", "yard")]
    listed.remove("end-1")
    book.purged(before=50.0, received=0)
    assert (book.visible(None), set(book.devices)) == ([("end-0", "gate")], {"end-0"})
