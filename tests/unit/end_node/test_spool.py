"""The spool: numbers, amendments, delivery, and what is dropped when it is full."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from end_node.spool import Draft, Spool
from tierkit.elapsed import Elapsed, Kept, continued
from tierkit.errors import SetupError, SpoolUnavailable
from tierkit.types import Tier
from tierkit.wire.observations import FinerAnswer, Gap, LocalAnswer, Observation

MIB = 2**20
LOCAL = LocalAnswer(model="end", sha256="0" * 64, label=3, confidence=0.5)
FINER = FinerAnswer(
    node_id="edge-0",
    tier=Tier.EDGE,
    model="edge",
    sha256="1" * 64,
    label=42,
    confidence=0.9,
    coarse_label=3,
    coarse_confidence=0.95,
)


class Device:
    """A machine with a spool, whose time a test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boot, self.uptime = 0, 100.0

    def resume(self, kept: Kept | None) -> Elapsed:
        boot = f"boot-{self.boot}"
        start = continued(kept, boot=boot, since_boot=self.uptime, wall=1e9, same_machine=True)
        return Elapsed(start, boot=boot, clock=lambda: self.uptime)

    def open(self, size_bytes: int = 4 * MIB) -> Spool:
        return Spool.open(self.folder, size_bytes=size_bytes, resume=self.resume)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path / "spool")


@pytest.fixture
def spool(device: Device) -> Any:
    spool = device.open()
    yield spool
    spool.close()


def draft(source: str = "gate", **further: Any) -> Draft:
    return Draft(source=source, **{"local": LOCAL, **further})


def unsure(margin: float = 0.1, picture: bytes = b"p", **further: Any) -> Draft:
    return draft(unsure=True, margin=margin, picture=picture, waits=True, **further)


def numbers(observations: list[Observation]) -> list[tuple[str, int, int]]:
    return [(each.source, each.sequence, each.revision) for each in observations]


def test_numbers_of_a_source_rise_from_one(spool: Spool) -> None:
    added = [spool.add(draft(source)) for source in ("gate", "gate", "yard", "gate")]
    assert numbers(added) == [("gate", 1, 0), ("gate", 2, 0), ("yard", 1, 0), ("gate", 3, 0)]
    assert numbers(spool.undelivered(10)[0]) == numbers(added)


def test_what_is_stored_comes_back_after_a_restart(device: Device) -> None:
    spool = device.open()
    given = draft(age_s=2.0, taken_at=5.0, name="a/b.jpg", unsure=True, picture=b"jpeg", waits=True, mark="m")
    before = spool.add(given)
    spool.close()
    device.uptime += 60
    spool = device.open()
    (held,) = spool.waiting(5)
    assert held.observation.age_s == pytest.approx(62.0)
    assert held.observation == Observation(
        source="gate",
        sequence=1,
        age_s=held.observation.age_s,
        taken_at=5.0,
        name="a/b.jpg",
        local=LOCAL,
        unsure=True,
        waits=True,
    )
    assert before.age_s == pytest.approx(2.0)
    assert (spool.picture(held.key), spool.known("gate", ["m", "n"]), spool.known("yard", ["m"])) == (
        b"jpeg",
        {"m"},
        set(),
    )
    assert spool.add(draft()).sequence == 2
    spool.close()


def test_the_most_unsure_picture_is_the_first(spool: Spool) -> None:
    for margin in (0.3, 0.1, 0.2, 0.1):
        spool.add(unsure(margin))
    assert [held.observation.sequence for held in spool.waiting(3)] == [2, 4, 3]


def test_an_answer_without_a_need_for_its_picture_stores_none(spool: Spool) -> None:
    spool.add(draft(picture=b"picture"))
    found = spool.find("gate", 1)
    assert found is not None
    assert (found.size, spool.picture(found.key)) == (0, None)


@pytest.mark.parametrize(
    ("further", "stays"), [({}, False), ({"keeps": True}, True), ({"to_scheduler": True}, True)], ids=str
)
def test_the_picture_goes_with_the_last_thing_that_needs_it(spool: Spool, further: Any, stays: bool) -> None:
    spool.add(unsure(**further))
    (held,) = spool.waiting(1)
    again = spool.amend(held.key, reason="no upstream node answered", waits=True)
    assert again is not None
    assert (again.revision, again.waits, again.reason) == (1, True, "no upstream node answered")
    assert spool.picture(held.key) == b"p"
    answered = spool.amend(held.key, finer=FINER)
    assert answered is not None
    assert (answered.revision, answered.finer, answered.waits, answered.reason) == (2, FINER, False, "")
    assert (spool.picture(held.key) is not None) == stays
    assert spool.waiting(1) == []
    spool.handed_over(held.key)
    assert (spool.picture(held.key) is not None) == further.get("keeps", False)
    assert spool.owed(1) == []


def test_delivery_acknowledges_what_was_sent(spool: Spool) -> None:
    spool.add(unsure())
    spool.add(unsure(0.2))
    sent, _ = spool.undelivered(10)
    (first, _) = spool.waiting(2)
    spool.amend(first.key, finer=FINER)  # while the batch is on its way
    spool.delivered(sent)
    spool.add(draft())
    assert numbers(spool.undelivered(10)[0]) == [("gate", 3, 0), ("gate", 1, 1)]
    assert numbers(spool.undelivered(1)[0]) == [("gate", 3, 0)]
    spool.delivered(spool.undelivered(10)[0])
    assert spool.undelivered(10) == ([], [])
    spool.delivered(sent)  # an old answer of the scheduler takes nothing back
    assert spool.undelivered(10) == ([], [])


def test_changes_resume(spool: Spool) -> None:
    spool.add(unsure())
    spool.add(draft("yard"))
    seen = spool.changes(0, 10)
    assert [change for change, _ in seen] == [1, 2]
    (held,) = spool.waiting(1)
    spool.amend(held.key, finer=FINER)
    assert [(change, each.source, each.revision) for change, each in spool.changes(2, 10)] == [(3, "gate", 1)]
    assert [change for change, _ in spool.changes(0, 10)] == [2, 3]
    assert (spool.last_change, spool.changes(3, 10)) == (3, [])


def test_undelivered_observations_move_above_the_numbers_of_the_scheduler(device: Device) -> None:
    spool = device.open()
    for _ in range(3):
        spool.add(draft())
    spool.add(draft("yard"))
    spool.delivered(spool.undelivered(1)[0])  # gate 1
    spool.renumber("gate", 100)
    spool.renumber("gate", 50)  # they are above that
    spool.renumber("new", 7)
    spool.add(draft())
    spool.add(draft("new"))
    expected = [("gate", 101, 0), ("gate", 102, 0), ("yard", 1, 0), ("gate", 103, 0), ("new", 8, 0)]
    assert numbers(spool.undelivered(10)[0]) == expected
    spool.close()
    spool = device.open()
    assert numbers(spool.undelivered(10)[0]) == expected
    assert (spool.find("gate", 2), spool.find("gate", 104)) == (None, None)
    assert [spool.find("gate", number) is not None for number in (1, 101, 102, 103)] == [True] * 4
    spool.delivered(spool.undelivered(2)[0])
    spool.renumber("gate", 500)
    assert numbers(spool.undelivered(10)[0]) == [("yard", 1, 0), ("gate", 501, 0), ("new", 8, 0)]
    with pytest.raises(ValueError, match="not possible"):
        spool.renumber("gate", 2**60)
    spool.close()


def test_an_absurd_age_or_text_is_no_obstacle(spool: Spool) -> None:
    spool.add(draft(age_s=-5.0, name="\udcff" + "x" * 900, reason="y" * 900))
    (found,) = spool.undelivered(1)[0]
    assert (found.age_s, len(found.name), len(found.reason)) == (0.0, 500, 500)


def test_documents(device: Device) -> None:
    spool = device.open()
    spool.put("route", {"version": "1"})
    spool.put("sources", [1])
    spool.put("sources", None)
    spool.close()
    spool = device.open()
    assert (spool.get("route"), spool.get("sources"), spool.get("other")) == ({"version": "1"}, None, None)
    spool.close()


def test_bytes_of_the_last_day_are_counted_by_elapsed_time(device: Device) -> None:
    spool = device.open()
    for _ in range(30 * 60):
        spool.spend(7, 3)
        device.uptime += 60
    assert sum(count for _, count in spool.spent()) == pytest.approx(24 * 60 * 10, abs=10)
    assert sum(count for _, count in spool.spent(600)) == pytest.approx(100, abs=10)
    spool.close()
    device.boot, device.uptime = 1, 3600.0  # an hour since the machine started again
    spool = device.open()
    assert sum(count for _, count in spool.spent()) == pytest.approx(23 * 60 * 10, abs=20)
    spool.close()


def test_age_counts_the_time_since_a_new_start_of_the_machine(device: Device) -> None:
    spool = device.open()
    spool.add(draft())
    device.uptime += 50
    spool.spend(0, 0)
    spool.close()
    device.boot, device.uptime = 1, 10.0
    spool = device.open()
    assert spool.undelivered(1)[0][0].age_s == pytest.approx(60.0)
    spool.close()


@pytest.mark.parametrize("by_s", [21 * 86400.0, -21 * 86400.0])
def test_a_clock_that_is_set_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    spool = Spool.open(tmp_path, size_bytes=4 * MIB)
    spool.add(draft())
    spool.spend(100, 20)
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + by_s)
    spool.add(draft())
    spool.close()
    spool = Spool.open(tmp_path, size_bytes=4 * MIB)
    spool.add(draft())
    found = spool.undelivered(10)[0]
    assert [each.sequence for each in found] == [1, 2, 3]
    assert all(0.0 <= each.age_s < 60.0 for each in found)
    assert [count for _, count in spool.spent()] == [120]
    spool.close()


def test_pictures_get_their_time_once_it_is_known(device: Device) -> None:
    spool = device.open()
    spool.add(draft())
    spool.close()
    device.boot, device.uptime = 1, 10.0
    spool = device.open()
    spool.add(draft())
    device.uptime += 5
    spool.add(draft(taken_at=1234.0))
    for _ in range(300):
        spool.add(draft())
    spool.delivered(spool.undelivered(2)[0])
    device.uptime += 10
    labelled = 0
    while done := spool.label(1.7e9):
        labelled += done
    assert labelled == 301
    found = {each.sequence: each for _, each in spool.changes(0, 1000)}
    assert (found[1].taken_at, found[3].taken_at) == (None, 1234.0)  # before the last start; known already
    assert found[2].taken_at == pytest.approx(1.7e9 - 15)
    assert found[4].taken_at == pytest.approx(1.7e9 - 10)
    assert numbers(spool.undelivered(1000)[0])[-1] == ("gate", 2, 1)  # the scheduler hears of it
    spool.close()


def test_a_second_process_is_refused(device: Device, spool: Spool) -> None:
    with pytest.raises(SetupError, match="another process uses the spool in"):
        device.open()


def test_files_are_private(device: Device, spool: Spool) -> None:
    spool.add(unsure())
    assert device.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in device.folder.iterdir()} == {0}


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot use the folder"):
        Spool.open(tmp_path / "file" / "spool", size_bytes=4 * MIB)


def drop(spool: Spool) -> tuple[int, int, int]:
    stats = spool.stats()
    return stats.dropped_sure, stats.dropped_unsure, stats.lost


@pytest.mark.parametrize("size", [0, 3000, 20_000])
def test_what_waits_fills_the_spool_and_what_was_delivered_does_not(size: int, device: Device) -> None:
    spool = device.open()
    while drop(spool) == (0, 0, 0):
        for _ in range(1 if size else 20):
            spool.add(unsure(picture=b"u" * size) if size else draft())
        stats = spool.stats()
    assert 0.8 <= stats.waiting_bytes / stats.room_bytes <= 1.0
    while waiting := spool.waiting(100):
        for each in waiting:
            spool.amend(each.key, finer=FINER, reason="", waits=False, unsure=True)
    while observations := spool.undelivered(500)[0]:
        spool.delivered(observations)
    stats = spool.stats()
    assert stats.waiting_bytes == 0
    assert stats.bytes_used > 0.5 * stats.room_bytes, "the file stays as large as it was"
    spool.close()


def test_order_of_eviction(device: Device) -> None:
    """Delivered answers, pictures with sure answers, pictures with unsure ones, answers: the oldest first."""
    spool = device.open()
    for _ in range(50):
        spool.add(draft("old"))
    spool.delivered(spool.undelivered(50)[0])
    kept, size = 0, 50_000
    while drop(spool) == (0, 0, 0):
        spool.add(draft(picture=b"s" * size, keeps=True))
        spool.add(unsure(picture=b"u" * size))
        kept += 1
    assert spool.find("old", 1) is None  # nothing was lost with it
    assert spool.stats().dropped_unsure == 0
    while drop(spool)[1] == 0:
        spool.add(unsure(picture=b"u" * size))
    assert drop(spool)[0] == kept
    full = [each for each in spool.undelivered(1000)[0] if each.reason]
    assert numbers(full) == [("gate", 2, 1)]  # the oldest unsure one
    assert (full[0].reason, full[0].waits) == ("the spool was full", False)
    waiting = spool.stats().waiting
    spool.add(draft(picture=b"s" * size, keeps=True))  # a sure one displaces no unsure one
    assert (spool.stats().waiting, drop(spool)[0]) == (waiting, kept + 1)
    assert drop(spool)[2] == 0
    while drop(spool)[2] < 100:
        spool.add(draft("text", name="n" * 400))
    stats = spool.stats()
    assert (stats.waiting, stats.owed) == (0, 0)  # no picture is left
    gaps = spool.undelivered(10)[1]
    assert (gaps[0].source, gaps[0].first, sum(gap.last - gap.first + 1 for gap in gaps)) == ("gate", 1, stats.lost)
    spool.delivered([], gaps)
    assert spool.undelivered(10)[1] == []
    spool.close()


def test_a_gap_is_acknowledged_as_far_as_it_was_sent(device: Device) -> None:
    spool = device.open()
    while spool.stats().lost < 5:
        spool.add(draft(name="n" * 400))
    (sent,) = spool.undelivered(1)[1]
    lost = spool.stats().lost
    assert sent == Gap(source="gate", first=1, last=lost)
    while spool.stats().lost < 20:
        spool.add(draft(name="n" * 400))
    spool.delivered([], [sent])
    assert spool.undelivered(1)[1] == [Gap(source="gate", first=lost + 1, last=spool.stats().lost)]
    spool.close()


def test_a_picture_that_does_not_fit_at_all(spool: Spool) -> None:
    added = spool.add(unsure(picture=b"x" * 5 * MIB))
    assert (added.sequence, added.waits, added.reason) == (1, False, "the picture is too large for the spool")
    assert drop(spool) == (0, 1, 0)


def test_marks_fill_no_more_than_half(device: Device) -> None:
    device.open().close()
    with closing(sqlite3.connect(device.folder / "spool.db")) as connection, connection:
        connection.executemany("INSERT INTO marks VALUES (?)", ((number * 7919,) for number in range(50_000)))
    spool = device.open()
    with pytest.raises(SpoolUnavailable, match="no room for the marks of more than 50000 files"):
        spool.add(draft(mark="one more"))
    spool.add(draft())  # other sources continue
    spool.close()


def test_a_smaller_size_is_kept_to(device: Device) -> None:
    spool = device.open(16 * MIB)
    for _ in range(300):
        spool.add(unsure(picture=b"u" * 50_000))
    spool.close()
    spool = device.open(4 * MIB)
    spool.add(unsure())
    assert spool.stats().bytes_used <= 4 * MIB
    assert spool.stats().waiting > 20
    assert spool.stats().lost == 0
    spool.close()
    assert sum(path.stat().st_size for path in device.folder.iterdir()) <= 4 * MIB
