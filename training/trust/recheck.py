"""Rechecks: the host computes some updates again, to see whether their worker has computed them. Pure except for the
random choice.

A unit is chosen at random when it is granted, and no worker can know the choice. The weights that it starts from are
kept until its update has come. The number of such units is bounded. A worker's description of its machine proves
nothing, so each run
chooses the tolerance: none if all machines are of one kind, else some, since other processors round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from training.masking import Masking, masked
from training.payloads import Format, format_of_weights, rounded
from training.trust.config import TrustConfig
from training.units import Computed, Flat, Sends, UnitLease, Update, is_finite

__all__ = ["MOST_KEPT", "Recheck", "Rechecks", "Steps", "is_same", "is_sound"]

MOST_KEPT = 8
"""Most units that wait for their update or to be computed again. Then no more units are chosen."""


class Steps(Protocol):
    """Interface of the learner that computes units again; see `training.learner.FlatLearner`."""

    moments: Any
    """Optimiser state that the computing worker has kept from its steps."""

    def load(self, weights: Flat, buffers: Flat) -> None: ...

    def weights(self) -> Flat: ...

    def compute(self, steps: range, sends: Sends, rate: float | None = None) -> Computed: ...


@dataclass(slots=True, kw_only=True)
class Recheck:
    """A unit, and its update."""

    lease: UnitLease
    weights: Flat
    buffers: Flat
    update: Update | None = None
    """Update of the unit, once it has come."""


class Rechecks:
    """The units that were chosen.

    Args:
        chance: gives numbers from 0 to below 1 that no worker can foretell.
    """

    def __init__(self, config: TrustConfig | None, chance: Callable[[], float]) -> None:
        self._share, self._tolerance = (0.0, 0.0) if config is None else (config.recheck, config.tolerance)
        self._chance = chance
        self._chosen: dict[int, Recheck] = {}
        """Chosen units by lease."""

    def granted(self, lease: UnitLease, start: Callable[[], tuple[Flat, Flat]], out: Container[UnitLease]) -> None:
        """A unit was granted: choose it, or do not. Units whose lease has gone are forgotten.

        Args:
            start: gives copies of the present weights and buffers.
            out: the leases that are out.
        """
        self._chosen = {
            number: each for number, each in self._chosen.items() if each.update is not None or each.lease in out
        }
        if len(self._chosen) < MOST_KEPT and self._chance() < self._share:
            weights, buffers = start()
            self._chosen[lease.number] = Recheck(lease=lease, weights=weights, buffers=buffers)

    def taken(self, update: Update) -> Recheck | None:
        """The unit that an update is of, if it is the one to be computed again. `done` forgets it."""
        chosen = self._chosen.get(update.lease)
        if chosen is None or chosen.update is not None:
            return None
        chosen.update = update
        return chosen

    def is_right(
        self, chosen: Recheck, learner: Steps, sends: Sends, wire: Format, masking: Masking | None = None
    ) -> bool:
        """Compute a unit again; whether its update is what its steps give. Changes nothing here."""
        assert chosen.update is not None
        unit = chosen.lease.unit
        learner.load(rounded(chosen.weights, format_of_weights(wire)), chosen.buffers)
        # With noise there are no rechecks, so none is drawn.
        own = masked(learner.compute(unit.span, sends, unit.rate), masking, np.random.default_rng(0))
        own = replace(own, values=rounded(own.values, wire))
        return is_same(chosen.update.computed, own, tolerance=self._tolerance)

    def done(self, chosen: Recheck) -> None:
        """Remove a unit that was computed again."""
        self._chosen.pop(chosen.lease.number, None)


def is_same(came: Computed, own: Computed, *, tolerance: float) -> bool:
    """True if an update is the result of its steps: its values and its buffers may differ by this share of their
    length. With 0 every bit must be equal, except the sign of a zero.
    """
    return _near(came.values, own.values, tolerance) and _near(came.buffers, own.buffers, tolerance)


def is_sound(learner: Steps, start: tuple[Flat, Flat], steps: range, sends: Sends, rate: float | None) -> bool:
    """True if weights and buffers give finite numbers. If they do not, workers whose updates are refused one after the
    other are not at fault."""
    learner.moments = None
    learner.load(*start)
    found = learner.compute(steps, sends, rate)
    return is_finite(found.values) and is_finite(found.buffers)


def _near(came: Flat, own: Flat, tolerance: float) -> bool:
    if tolerance == 0:
        return bool(np.array_equal(came, own))
    wanted = own.astype(np.float64)
    return bool(np.linalg.norm(came - wanted) <= tolerance * np.linalg.norm(wanted))
