"""Metrics of observations, of each source and of each device."""

from dataclasses import dataclass, field

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from scheduler.metrics import SourceCollector, count_batch
from tierkit.wire.observations import DeviceStatus, ReportedSource


@dataclass
class Entry:
    heard_elapsed: float | None = None


@dataclass
class Book:
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    devices: dict[str, DeviceStatus] = field(default_factory=dict)

    def elapsed(self) -> float:
        return 1000.0


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def shown(book: Book, monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    monkeypatch.setattr("time.time", lambda: 50_000.0)
    registry = CollectorRegistry()
    collector = SourceCollector()
    collector.show(book)
    registry.register(collector)
    return registry


def of(name: str) -> dict[str, str]:
    return {"node_id": "pi-1", "source": name}


def test_a_source_has_the_time_at_which_it_was_heard(book: Book, shown: CollectorRegistry) -> None:
    book.entries = {("pi-1", "gate"): Entry(heard_elapsed=900.0), ("pi-1", "door"): Entry()}
    assert shown.get_sample_value("terrace_source_heard_timestamp_seconds", of("gate")) == 49_900.0
    assert shown.get_sample_value("terrace_source_heard_timestamp_seconds", of("door")) is None


@pytest.mark.parametrize(
    ("state", "value"), [("running", 1), ("starting", 0), ("waiting", 0), ("paused", None), ("finished", None)]
)
def test_a_source_runs_by_the_word_of_its_device(
    state: str, value: float | None, book: Book, shown: CollectorRegistry
) -> None:
    book.entries = {("pi-1", "gate"): Entry()}
    book.devices = {"pi-1": DeviceStatus(sources=(ReportedSource(name="gate", state=state),))}
    assert shown.get_sample_value("terrace_source_running", of("gate")) == value


def test_a_source_whose_device_has_said_nothing_does_not_run(book: Book, shown: CollectorRegistry) -> None:
    book.entries = {("pi-1", "gate"): Entry(heard_elapsed=1.0)}
    assert shown.get_sample_value("terrace_source_running", of("gate")) == 0


def test_a_device_has_its_spool(book: Book, shown: CollectorRegistry) -> None:
    book.devices = {"pi-1": DeviceStatus(spool_bytes=7, spool_size_bytes=100, lost_answers=3)}
    values = [
        shown.get_sample_value(f"terrace_device_{name}", {"node_id": "pi-1"})
        for name in ("spool_bytes", "spool_size_bytes", "lost_answers")
    ]
    assert values == [7, 100, 3]


def test_a_bounded_number_of_sources_has_series(book: Book, shown: CollectorRegistry) -> None:
    book.entries = {("pi-1", f"gate-{number:05}"): Entry(heard_elapsed=1.0) for number in range(2500)}
    samples = [sample for family in shown.collect() for sample in family.samples]
    assert sum(sample.name == "terrace_source_heard_timestamp_seconds" for sample in samples) == 2000
    assert shown.get_sample_value("terrace_sources_unlisted") == 500


def test_a_standby_shows_no_source(shown: CollectorRegistry) -> None:
    collector = SourceCollector()
    assert [sample for family in collector.collect() for sample in family.samples] == []


def test_a_batch_is_counted_by_kind_and_age() -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    names = [
        ("terrace_observations_total", {"kind": "new"}),
        ("terrace_observations_total", {"kind": "amended"}),
        ("terrace_observations_total", {"kind": "known"}),
        ("terrace_observation_batches_total", {}),
        ("terrace_observation_age_seconds_sum", {}),
        ("terrace_observation_age_seconds_bucket", {"le": "1.0"}),
    ]
    before = [value(name, **labels) for name, labels in names]
    count_batch([0.5, 99.5], amended=3, known=4)
    assert [value(name, **labels) - was for (name, labels), was in zip(names, before, strict=True)] == [
        2,
        3,
        4,
        1,
        100,
        1,
    ]
