"""Pool of updates that are judged together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierkit.errors import InvalidInput
from training.trust.config import FEWEST, MOST, TrustConfig
from training.units import Flat, UnitLease, Update

__all__ = ["Pool", "Pooled"]

_MOST_BYTES = 2 << 30
"""Most bytes of all waiting updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """An update, and what is needed of its lease."""

    worker: str
    version: int
    """Version of the weights that it comes from."""
    first: int
    """Its first step."""
    steps: int
    values: Flat
    buffers: Flat


class Pool:
    """Some updates of different workers, as far as there are some.

    A worker that answers at once must not fill it: while others compute, each has a turn, and one that has had it
    waits.

    Raises:
        InvalidInput: the size, or the numbers of all these updates, are out of bounds.
    """

    def __init__(self, config: TrustConfig, size: int, numbers: int) -> None:
        if not FEWEST <= size <= MOST:
            raise InvalidInput(
                f"{size} updates cannot be judged together, only {FEWEST} to {MOST}: give the strategy another number "
                "of workers for a round, or of updates in [trust]"
            )
        if (total := 4 * size * numbers) > _MOST_BYTES:
            raise InvalidInput(
                f"{size} updates of this network take {total / 2**30:.1f} GiB, more than the {_MOST_BYTES >> 30} that "
                "are kept: judge fewer together"
            )
        self.size = size
        self.quorum = min(size, max(FEWEST, 2 * int(config.cheaters * size) + 1))
        """Workers of whom most are honest, if no more cheat than the configuration says."""
        self._waiting: list[Pooled] = []
        self._turn = 1

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def workers(self) -> Counter[str]:
        """Number of waiting updates of each worker."""
        return Counter(each.worker for each in self._waiting)

    def may_add(self, worker: str, others_compute: bool) -> bool:
        """True if it is this worker's turn. When all have had theirs, the next one begins."""
        if self.workers[worker] < self._turn:
            return True
        if others_compute:
            return False
        self._turn += 1
        return True

    def add(self, lease: UnitLease, update: Update) -> None:
        """One more."""
        self._waiting.append(
            Pooled(
                worker=update.worker,
                version=lease.unit.version,
                first=update.steps.start,
                steps=len(update.steps),
                values=update.computed.values,
                buffers=update.computed.buffers,
            )
        )

    def is_whole(self, others_compute: bool) -> bool:
        """True if it is time to judge them: all are there, or enough are there and no other worker computes one."""
        return len(self) >= self.size or (not others_compute and len(self.workers) >= self.quorum)

    def empty(self) -> list[Pooled]:
        """Return all of them, and start over."""
        taken, self._waiting, self._turn = self._waiting, [], 1
        return taken

    def vectors(self) -> dict[str, Flat]:
        """Vectors of the state."""
        return {
            f"waiting {number} {name}": getattr(each, name)
            for number, each in enumerate(self._waiting)
            for name in ("values", "buffers")
        }

    def figures(self) -> dict[str, Any]:
        """The rest of the state, as JSON."""
        return {
            "turn": self._turn,
            "waiting": [[each.worker, each.version, each.first, each.steps] for each in self._waiting],
        }

    def restore(self, vectors: Mapping[str, Flat], figures: Mapping[str, Any]) -> None:
        """Continue from this state."""
        self._turn = figures["turn"]
        self._waiting = [
            Pooled(
                worker=worker,
                version=version,
                first=first,
                steps=steps,
                values=vectors[f"waiting {number} values"].copy(),
                buffers=vectors[f"waiting {number} buffers"].copy(),
            )
            for number, (worker, version, first, steps) in enumerate(figures["waiting"])
        ]
