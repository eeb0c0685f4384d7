"""docs/explanation/architecture.md has the table of phases and events, as `step` gives it.

`python -m tests.unit.scheduler.test_state_table` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from scheduler.core import events
from scheduler.core.events import Failure, FailureKind
from scheduler.core.fleet import Ledger
from scheduler.core.step import State, may_move, step
from scheduler.core.work import JobFacts, TaskFacts
from scheduler.settings import SchedulerSettings
from tests.unit.scheduler.test_devices import COARSE, POLICY, TIMES, attempt_on, registration
from tierkit.types import Recovery, Tier
from tierkit.wire.events import FallbackEvent, FineEvent, TaskEvent

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "architecture.md"
BEGIN, END = "<!-- phases and events: begin -->\n\n", "\n<!-- phases and events: end -->\n"

DEADLINE = 1.0
"""Before a node would be late with its heartbeat."""

FINE = FineEvent(
    task_id="j-0",
    node_id="edge-0",
    tier=Tier.EDGE,
    model="m",
    labels=(0,),
    confidences=(0.5,),
    coarse_labels=(0,),
    coarse_confidences=(0.5,),
    round_trip_ms=1,
)
NO_FINE = FallbackEvent(task_id="j-0", reason="upstream_unavailable", detail="refused", tried=("edge-0",))


class Case:
    """One attempt of a task, on `end-0` with the upstream node `edge-0`."""

    def __init__(self, *lines: TaskEvent, recovery: Recovery = Recovery.MONITOR) -> None:
        self.state = State(limits=SchedulerSettings().task_limits, ledger=Ledger(TIMES))
        job = JobFacts(job_id="j", policy=POLICY.model_copy(update={"recovery": recovery}), deadline=DEADLINE)
        facts = replace(attempt_on("end-0", "edge-0", now=0.0), deadline=DEADLINE)
        self.take(events.Registered(registration("end-0")))
        self.take(events.Registered(registration("edge-0", tier=Tier.EDGE)))
        self.take(events.JobAdded(job, [TaskFacts(index=0, first_image=0, images=50)]))
        self.take(events.AttemptBegun(facts))
        self.id, self.attempt = facts.id, self.state.ledger.assigned.attempts[facts.id]
        for line in lines:
            self.take(events.LineCame(self.id, line, ""))

    def take(self, what: events.What, now: float = 0.0) -> list[events.Effect]:
        return step(self.state, events.Event(what, now, 0.5))

    def cell(self, what: events.What | None, now: float) -> str:
        """The next phase, the effects, and "again" if the task waits to be sent once more."""
        if what is None:
            return ""  # it does not happen in this phase
        before = self.attempt.phase
        effects = [_named(effect) for effect in self.take(what, now)]
        phase = [] if self.attempt.phase is before else [f"**{self.attempt.phase}**"]
        again = ["again"] if self.attempt.task in self.attempt.job.delayed else []
        return "; ".join([*phase, *([", ".join(effects)] if effects else []), *again])


def _named(effect: events.Effect) -> str:
    return f"Report {effect.report.outcome}" if isinstance(effect, events.Report) else type(effect).__name__


def _ended(kind: FailureKind, case: Case) -> events.What:
    return events.Ended(case.id, Failure(kind, "a reason"))


PHASES: dict[str, Callable[[], Case]] = {
    "acknowledging": lambda: Case(recovery=Recovery.REASSIGN),
    "coarse": lambda: Case(),
    "fine": lambda: Case(COARSE),
    "answered, but the upstream node failed": lambda: Case(COARSE, NO_FINE),
    "answered in full": lambda: Case(COARSE, FINE),
}

EVENTS: dict[str, tuple[Callable[[Case], events.What | None], float]] = {
    "`Acknowledged`": (lambda case: events.Acknowledged(case.id), 0.0),
    "`LineCame`: the coarse answer": (lambda case: events.LineCame(case.id, COARSE, ""), 0.0),
    "`LineCame`: the fine answer": (lambda case: events.LineCame(case.id, FINE, ""), 0.0),
    "`LineCame`: the upstream node failed": (lambda case: events.LineCame(case.id, NO_FINE, ""), 0.0),
    "`Ended` without a failure": (lambda case: events.Ended(case.id), 0.0),
    **{f"`Ended`: {kind}": (partial(_ended, kind), 0.0) for kind in FailureKind},
    "`TimeUp` before the deadline": (lambda case: events.TimeUp(case.id), DEADLINE / 2),
    "`TimeUp` at the deadline": (lambda case: events.TimeUp(case.id), DEADLINE),
    "`Move`": (lambda case: events.Move(case.id, "it is slow") if may_move(case.attempt) else None, 0.0),
    "`TookLeave`: the end device": (lambda _: events.TookLeave("end-0", "first-one"), 0.0),
    "`TookLeave`: the upstream node": (lambda _: events.TookLeave("edge-0", "first-one"), 0.0),
    "`JobDue` at its deadline": (lambda _: events.JobDue("j", has_upstream=True), DEADLINE),
    "`JobStopped`": (lambda _: events.JobStopped("j", "cancelled", "by the user"), 0.0),
}


def table() -> str:
    """The rows for the page: a column for each phase."""
    rows = [["event", *PHASES], ["---"] * (1 + len(PHASES))]
    for name, (what, now) in EVENTS.items():
        cases = [begin() for begin in PHASES.values()]
        rows.append([name, *(case.cell(what(case), now) for case in cases)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page() -> str:
    """The page with the table as it is now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


def test_the_page_has_the_table_that_step_gives() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run python -m tests.unit.scheduler.test_state_table"


def test_an_attempt_that_is_over_changes_nothing() -> None:
    for name, (what, now) in EVENTS.items():
        case = Case(COARSE, FINE)
        case.take(events.Ended(case.id))
        late = what(case)
        if late is not None:
            assert {type(effect) for effect in case.take(late, now)} <= {events.NodeChanged, events.JobEnds}, name


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
