"""The figures of a trial, from the answers to tasks and from observations, and the decision of the guards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scheduler.core.guards import STAGES, Conclusion, ReleaseFigures, Trial, conclude, judge
from scheduler.core.job import AttemptReport
from scheduler.core.release import ReleaseChange, chosen
from scheduler.core.work import AttemptFacts
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, RoutedEvent, TaskEvent, UpstreamAnswer
from tierkit.wire.observations import Observation
from tierkit.wire.releases import GuardName, GuardNow, RolloutState

__all__ = ["TrialRecord"]

_NAMES: tuple[GuardName, ...] = ("agreement", "p99", "errors")


class TrialRecord:
    """Figures and guards of the change under way."""

    def __init__(self) -> None:
        self.guards: tuple[GuardNow, ...] = ()
        self._change: ReleaseChange | None = None
        self._trial = Trial()

    def begin(self, change: ReleaseChange, notes: Mapping[str, Any]) -> None:
        """A trial begins, or is taken up from its notes."""
        self._change, self._trial = change, Trial.from_json(notes.get("trial", {}))
        self._judge()

    def goes_on(self, change: ReleaseChange | None) -> None:
        """The change has another state now; None: it is over."""
        self._change = change

    def notes(self) -> dict[str, Any]:
        """Values of JSON from which the next scheduler continues the trial."""
        guards = [guard.model_dump(mode="json") for guard in self.guards]
        return {"trial": self._trial.as_json(), "guards": guards}

    def conclusion(self, change: ReleaseChange, now: float) -> Conclusion:
        """The decision of the guards."""
        if change.kind != "canary" or change.ready is None:
            return Conclusion("go on", "")
        self._judge()
        if change.state is RolloutState.CANARY:
            return conclude(self.guards, elapsed_s=change.trial_s(now), for_s=change.for_s, extended=change.extended)
        failed = [guard.detail for guard in self.guards if guard.verdict == "fails"]
        return Conclusion("roll back", " ".join(failed)) if failed else Conclusion("go on", "")

    def _judge(self) -> None:
        limits = {} if self._change is None else self._change.guards
        self.guards = tuple(judge(name, limits[name], self._trial) for name in _NAMES if name in limits)

    def _group(self, release: int, node_id: str) -> ReleaseFigures | None:
        """The figures to which an answer counts."""
        change = self._change
        if change is None or change.kind != "canary":
            return None
        if release == change.release:
            return self._trial.new
        if release != change.previous:
            return None
        return self._trial.old_here if chosen(change, node_id) else self._trial.old_elsewhere

    def learns(self, facts: AttemptFacts, event: TaskEvent, coarse: CoarseEvent | None) -> None:
        """A line of an answer has come.

        Args:
            coarse: the coarse answer that its task had.
        """
        if self._change is None or (group := self._group(facts.release, facts.node_id)) is None:
            return
        # Not the time until the answer came: where few devices share the work, a task waits longer for its turn.
        match event:
            case CoarseEvent():
                group.took(STAGES[0], event.compute_ms / (event.batch_images or facts.images))
            case FineEvent():
                _compare(group, coarse, range(facts.images), event.coarse_labels)
                _took(group, event)
            case RoutedEvent():
                for answer in event.answers:
                    _compare(group, coarse, answer.indices, answer.coarse_labels)
                    _took(group, answer)
                if any(loss.reason == "upstream_error" for loss in event.losses):
                    group.attempted(False)
            case FallbackEvent(reason="upstream_error"):
                group.attempted(False)

    def reported(self, facts: AttemptFacts, report: AttemptReport) -> None:
        """An attempt has ended."""
        group = self._group(facts.release, facts.node_id)
        if group is not None and report.outcome in ("ok", "error"):
            group.attempted(report.outcome == "ok")

    def observed(self, node_id: str, new: Iterable[tuple[Observation, bool]]) -> None:
        """Observations were stored; each with whether it amends one that was known."""
        if self._change is None:
            return
        for seen, amends in new:
            if seen.local is None or (group := self._group(seen.release, node_id)) is None:
                continue
            if not amends:
                group.attempted(True)
                if seen.local.ms:
                    group.took(STAGES[0], seen.local.ms)
            if seen.finer is not None:
                group.agrees(int(seen.local.label == seen.finer.coarse_label), 1)


def _compare(group: ReleaseFigures, coarse: CoarseEvent | None, indices: Iterable[int], above: Sequence[int]) -> None:
    """Count the images whose coarse answer equals the coarse answer of the tier above."""
    if coarse is None:
        return
    damaged = {damage.index for damage in coarse.damaged}
    pairs = [
        (coarse.labels[at], label)
        for at, label in zip(indices, above, strict=False)
        if at < len(coarse.labels) and at not in damaged
    ]
    group.agrees(sum(below == label for below, label in pairs), len(pairs))


def _took(group: ReleaseFigures, answer: UpstreamAnswer) -> None:
    if answer.timing is not None and answer.timing.batch_images:
        group.took(STAGES[1], answer.timing.compute_ms / answer.timing.batch_images)
