"""Tournament of lineages (LTFB; Jacobs et al. 2017): each trains apart at its own learning rate, and pairs of them meet
on held-out images. The winner's weights and rate continue on both sides.

A host keeps the lineages here. A lease belongs to a lineage, which any worker may continue. The host measures the
lineages itself, because it does not believe its workers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tierkit.errors import InvalidInput
from training.strategies.config import TournamentConfig
from training.strategies.leases import Leases
from training.strategies.pool import Pooled
from training.strategies.protocol import Schedule, Strategy
from training.units import Flat, UnitLease, Update, Verdict, is_finite

__all__ = ["Score", "Tournament", "opponents", "rate_after", "rates_of", "wins"]

Score = tuple[float, float]
"""Accuracy of a lineage on the held-out images, and its loss there."""

_MOST_BYTES = 2 << 30
_WIDTH = 10.0
"""The grid goes from the network's rate divided by this to the rate times this; of an even number of lineages, none has
the last."""


def rates_of(config: TournamentConfig, peak_rate: float, lineages: int) -> list[float]:
    """Highest learning rate of each lineage at the start.

    Args:
        peak_rate: the network's.
    """
    if config.rates:
        return [config.rates[number % len(config.rates)] for number in range(lineages)]
    half = max(1, lineages // 2)
    return [peak_rate * _WIDTH ** (number / half - 1) for number in range(lineages)]


def opponents(lineages: int, meeting: int, seed: int) -> list[int]:
    """The opponent of each lineage in a meeting, drawn from the seed; its own number for one without an opponent.

    Args:
        meeting: its number, counted from 0.
    """
    order = list(range(lineages))
    random.Random(f"{seed} {meeting}").shuffle(order)
    found = list(range(lineages))
    for one, other in zip(order[::2], order[1::2], strict=False):
        found[one], found[other] = other, one
    return found


def wins(own: Score, other: Score, *, first: bool) -> bool:
    """True if a lineage beats its opponent: more images right, or the smaller loss.

    Args:
        first: True if it wins if both are the same.
    """
    (right, loss), (their_right, their_loss) = own, other
    if right != their_right:
        return right > their_right
    if loss == their_loss or (loss != loss and their_loss != their_loss):
        return first
    return loss < their_loss or their_loss != their_loss


def rate_after(config: TournamentConfig, winner: float, *, lineage: int, meeting: int, seed: int) -> float:
    """Rate of the loser after a meeting: the winner's, changed up or down.

    Args:
        lineage: the loser.
    """
    up = random.Random(f"{seed} {meeting} {lineage}").random() < 0.5
    return winner * (1 + config.variation if up else 1 - config.variation)


class Tournament(Strategy):
    """The lineages of a run at its host. `weights` belong to the best one when it was measured last.

    A lineage continues when it has met its opponent. The host asks `to_measure`, measures, and calls `met`.

    Args:
        lineages: one for each worker that is expected.

    Raises:
        InvalidInput: there are too few, or they do not fit in memory.
    """

    def __init__(
        self, config: TournamentConfig, start: tuple[Flat, Flat], leases: Leases, learner: Schedule, lineages: int
    ) -> None:
        if lineages < 2:
            raise InvalidInput("a tournament needs at least 2 workers: give more, or another strategy")
        if (total := 4 * lineages * sum(map(len, start))) > _MOST_BYTES:
            raise InvalidInput(
                f"{lineages:,} lineages of this network take {total / 2**30:.1f} GiB, more than the "
                f"{_MOST_BYTES >> 30} that are kept: give fewer workers"
            )
        super().__init__(config, start, leases, together=lineages)
        self.config, self._seed = config, learner.config.seed
        self._all = np.tile(self.weights, (lineages, 1)), np.tile(self.buffers, (lineages, 1))
        self.rates = rates_of(config, learner.config.peak_rate, lineages)
        self._versions = [0] * lineages
        """Version at the last change of each lineage's weights."""
        self._units, self._meetings = [0] * lineages, [0] * lineages
        """Updates and meetings of each lineage. One with more updates than meetings waits for its opponent."""
        self._leased: dict[int, int] = {}
        """Lineage by the number of a lease."""
        self._scores: list[Score | None] = [None] * lineages
        self._ranked = False
        self._best_rate = learner.config.peak_rate

    @property
    def finished(self) -> bool:
        """True when all steps are in, and the best lineage is known."""
        return self._ranked

    def start_of(self, lease: UnitLease) -> tuple[Flat, Flat]:
        lineage = self._leased[lease.number]
        return self._all[0][lineage], self._all[1][lineage]

    def lineage(self, number: int) -> tuple[Flat, Flat]:
        """Copies of the weights and buffers of a lineage."""
        return self._all[0][number].copy(), self._all[1][number].copy()

    def to_measure(self) -> tuple[int, ...]:
        """Lineages to measure now: two that are to meet, or all at the end of the run; none if it is not yet time."""
        if self.leases.finished:
            return () if self._ranked else tuple(range(len(self.rates)))
        for number, (units, meetings) in enumerate(zip(self._units, self._meetings, strict=True)):
            if units > meetings:
                opponent = opponents(len(self.rates), meetings, self._seed)[number]
                if number <= opponent and self._units[opponent] > self._meetings[opponent] == meetings:
                    return (number,) if opponent == number else (number, opponent)
        return ()

    def met(self, lineages: Sequence[int], scores: Sequence[Score]) -> None:
        """Take the scores of the lineages that `to_measure` has named."""
        if tuple(lineages) != self.to_measure():
            return
        for number, score in zip(lineages, scores, strict=True):
            self._scores[number] = score[0], score[1]
        if self.leases.finished:
            self._ranked = True
        else:
            if len(lineages) == 2:
                self._meet(*lineages)
            for number in lineages:
                self._meetings[number] += 1
        measured = {number: score for number, score in enumerate(self._scores) if score is not None}
        best = lineages[0]
        for number, score in measured.items():
            if wins(score, measured[best], first=number < best):
                best = number
        if best in lineages:
            self._best_rate = self.rates[best]
            self.weights[:], self.buffers[:] = self._all[0][best], self._all[1][best]
        self.version += 1

    def _meet(self, one: int, other: int) -> None:
        first, second = self._scores[one], self._scores[other]
        assert first is not None
        assert second is not None
        won, lost = (one, other) if wins(first, second, first=True) else (other, one)
        for each in self._all:
            each[lost] = each[won]
        self._versions[lost], self._scores[lost] = self._versions[won], self._scores[won]
        self.rates[lost] = rate_after(
            self.config, self.rates[won], lineage=lost, meeting=self._meetings[lost], seed=self._seed
        )

    def results(self) -> dict[str, float]:
        return {"rate": self._best_rate}

    def _next(self, worker: str, now: float) -> UnitLease | None:
        lineage = self._free()
        if lineage is None:
            if not (overdue := self.leases.overdue(now)):
                return None
            self._give_back(overdue[0], overdue_at=now)
            lineage = self._free()
        if lineage is None:
            return None
        lease = self.leases.grant(worker, self._versions[lineage], now, rate=self.rates[lineage])
        if lease is not None:
            self._leased[lease.number] = lineage
        return lease

    def _free(self) -> int | None:
        """The lineage that is most behind, of those that no worker has and that wait for no meeting."""
        held = set(self._leased.values())
        free = [
            number for number, units in enumerate(self._units) if number not in held and units == self._meetings[number]
        ]
        return min(free, key=self._units.__getitem__, default=None)

    def _verdict(self, lease: UnitLease, update: Update) -> Verdict:
        for came, own in ((update.computed.values, self.weights), (update.computed.buffers, self.buffers)):
            if came.dtype != own.dtype or came.shape != own.shape:
                return "refused"
        return "taken"

    def _apply(self, lease: UnitLease, update: Update) -> None:
        lineage = self._leased.pop(lease.number)
        values, buffers = update.computed.values, update.computed.buffers
        self.version += 1
        self._units[lineage] += 1
        # A rate that is too high gives numbers that are not finite. Then the lineage stays behind, and loses.
        if is_finite(values) and is_finite(buffers):
            self._all[0][lineage] -= values
            self._all[1][lineage] = buffers
            self._versions[lineage] = self.version

    def _give_back(self, lease: UnitLease, overdue_at: float | None = None) -> None:
        self._leased.pop(lease.number, None)
        super()._give_back(lease, overdue_at)

    def _apply_centre(self, values: Flat, buffers: Flat, of: Sequence[Pooled], weights: Sequence[float]) -> None:
        raise AssertionError("no updates are judged together")

    def _vectors(self) -> dict[str, Flat]:
        return {"lineages": self._all[0], "lineages' buffers": self._all[1]}

    def _figures(self) -> dict[str, Any]:
        return {
            "rates": self.rates,
            "versions": self._versions,
            "units": self._units,
            "meetings": self._meetings,
            "leased": {str(number): lineage for number, lineage in self._leased.items()},
            "measured": self._scores,
            "ranked": self._ranked,
            "best_rate": self._best_rate,
        }

    def restore(self, vectors: Mapping[str, Flat], figures: Mapping[str, Any]) -> None:
        super().restore(vectors, figures)
        self.rates, self._versions = list(figures["rates"]), list(figures["versions"])
        self._units, self._meetings = list(figures["units"]), list(figures["meetings"])
        self._leased = {int(number): lineage for number, lineage in figures["leased"].items()}
        self._scores = [None if each is None else (each[0], each[1]) for each in figures["measured"]]
        self._ranked, self._best_rate = figures["ranked"], figures["best_rate"]
