"""Whatever is done with a spool: numbers rise, gaps cover what is missing, and the files stay within their bound."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from end_node.spool import Draft
from tests.unit.end_node.test_spool import FINER, LOCAL, MIB, Device
from tierkit.wire.observations import Observation

SIZE = 4 * MIB
SOURCES = st.sampled_from(["gate", "yard"])


class SpoolMachine(RuleBasedStateMachine):
    """A device and a scheduler, which may hear a batch whose receipt is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.device = Device(Path(self.folder.name) / "spool")
        self.spool = self.device.open(SIZE)
        self.added = {"gate": 0, "yard": 0}
        self.stored: dict[tuple[str, int], Observation] = {}
        self.gaps: dict[str, set[int]] = {"gate": set(), "yard": set()}
        self.highest = {"gate": 0, "yard": 0}
        self.skipped: dict[str, set[int]] = {"gate": set(), "yard": set()}
        """Numbers that the scheduler had from an earlier spool."""

    def teardown(self) -> None:
        self.deliver(limit=100_000, lost=False)
        for source, count in self.added.items():
            have = {number for name, number in self.stored if name == source}
            assert not have & self.gaps[source]
            # Each number exactly once: stored, lost in a gap, or of an earlier spool.
            assert len(have | self.gaps[source]) == count
            assert have | self.gaps[source] | self.skipped[source] == set(
                range(1, count + len(self.skipped[source]) + 1)
            )
        self.spool.close()
        self.folder.cleanup()

    @rule(
        source=SOURCES,
        count=st.integers(1, 60),
        size=st.sampled_from([0, 100, 20_000, 150_000, 300_000]),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
        margin=st.floats(0, 1),
    )
    def add(self, source: str, count: int, size: int, flags: tuple[bool, ...], margin: float) -> None:
        unsure, waits, keeps, to_scheduler = flags
        for _ in range(count):
            added = self.spool.add(
                Draft(
                    source=source,
                    name="n" * 300,
                    local=LOCAL,
                    unsure=unsure,
                    margin=margin,
                    picture=b"x" * size,
                    waits=waits,
                    keeps=keeps,
                    to_scheduler=to_scheduler,
                )
            )
            self.added[source] += 1
            assert added.sequence == self.added[source] + len(self.skipped[source])
            assert (added.revision, added.waits) == (0, added.waits and waits)

    @rule(limit=st.integers(1, 5), better=st.booleans())
    def amend(self, limit: int, better: bool) -> None:
        for held in self.spool.waiting(limit):
            assert self.spool.picture(held.key) == b"x" * held.size
            after = self.spool.amend(held.key, finer=FINER if better else None, reason="" if better else "why")
            # To make room, the picture may have been dropped before, which is an amendment too.
            assert after is None or after.revision in (held.observation.revision + 1, held.observation.revision + 2)

    @rule(limit=st.integers(1, 5))
    def hand_over(self, limit: int) -> None:
        owed = self.spool.owed(limit)
        assert [held.margin for held in owed] == sorted(held.margin for held in owed)
        for held in owed:
            self.spool.handed_over(held.key)

    @rule(limit=st.integers(1, 1000), lost=st.booleans())
    def deliver(self, limit: int, lost: bool) -> None:
        observations, gaps = self.spool.undelivered(limit)
        for each in observations:
            place = (each.source, each.sequence)
            before = self.stored.get(place)
            if before is None:
                assert each.sequence > max((n for s, n in self.stored if s == each.source), default=0)
            else:
                assert each.revision >= before.revision
            self.stored[place] = each
            self.highest[each.source] = max(self.highest[each.source], each.sequence)
        for gap in gaps:
            self.gaps[gap.source] |= set(range(gap.first, gap.last + 1))
            self.highest[gap.source] = max(self.highest[gap.source], gap.last)
        if not lost:
            self.spool.delivered(observations, gaps)

    @precondition(lambda self: not any(self.stored) and not any(self.gaps.values()))
    @rule(source=SOURCES, above=st.integers(1, 50))
    def renumber(self, source: str, above: int) -> None:
        if above > len(self.skipped[source]):
            self.spool.renumber(source, above)
            self.skipped[source] = set(range(1, above + 1))

    @rule(reboot=st.booleans(), passed=st.floats(0, 1000))
    def restart(self, reboot: bool, passed: float) -> None:
        self.spool.close()
        self.device.uptime += passed
        if reboot:
            self.device.boot += 1
            self.device.uptime = passed
        before = self.spool.id
        self.spool = self.device.open(SIZE)
        assert self.spool.id == before

    @rule()
    def label(self) -> None:
        while self.spool.label(1.7e9):
            pass

    @invariant()
    def files_stay_within_the_bound(self) -> None:
        assert sum(path.stat().st_size for path in self.device.folder.iterdir()) <= SIZE

    @invariant()
    def changes_rise(self) -> None:
        changes = [change for change, _ in self.spool.changes(0, 100)]
        assert changes == sorted(set(changes))
        assert not changes or changes[-1] <= self.spool.last_change


TestSpoolMachine = SpoolMachine.TestCase
TestSpoolMachine.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
