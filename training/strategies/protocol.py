"""What all strategies have in common: they grant units and take updates. No I/O, no clock of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from training.strategies.leases import Leases
from training.units import Flat, Lease, Update, Verdict

__all__ = ["Strategy"]


class Strategy(ABC):
    """The weights of a run, and what becomes of them. Times are seconds on any clock that goes forward.

    Args:
        weights, buffers: to start from; they are copied.
        rate: learning rate of a step.
    """

    def __init__(self, weights: Flat, buffers: Flat, leases: Leases, rate: Callable[[int], float]) -> None:
        self.weights, self.buffers = weights.copy(), buffers.copy()
        """Of the present version; changed in place, so whoever keeps them copies them."""
        self.version = 0
        """How often the weights have changed."""
        self.leases = leases
        self._rate = rate

    @property
    def finished(self) -> bool:
        return self.leases.finished

    def grant(self, worker: str, now: float) -> Lease | None:
        """A unit from the weights as they are now; None where there is nothing to do at present.

        Raises:
            Overloaded: too many units are being computed.
        """
        self.expire(now)
        self.leave(worker)
        lease = self._next(worker, now)
        if lease is not None:
            self._granted(lease)
        return lease

    def expire(self, now: float) -> int:
        """Give back the leases whose time is up; how many there were."""
        expired = self.leases.expired(now)
        for lease in expired:
            self._give_back(lease)
        return len(expired)

    def leave(self, worker: str) -> None:
        """A worker gives back what it has, if it has something."""
        held = self.leases.held_by(worker)
        if held is not None:
            self._give_back(held)

    def take(self, update: Update, now: float) -> Verdict:
        """Bring an update into the weights, once, or say why not."""
        claimed = self.leases.claim(update, now)
        if isinstance(claimed, str):
            return claimed
        verdict = self._verdict(claimed, update)
        if verdict == "taken":
            self._apply(claimed, update)
            if self.leases.advance(claimed, now):
                self._forget(claimed)
        else:
            self._give_back(claimed)
        return verdict

    def _verdict(self, lease: Lease, update: Update) -> Verdict:
        for came, own in ((update.computed.values, self.weights), (update.computed.buffers, self.buffers)):
            # A sum is finite if all its terms are, but for an overflow, which no honest update comes near.
            if came.dtype != own.dtype or came.shape != own.shape or not np.isfinite(came.sum()):
                return "refused"
        return "taken"

    def _give_back(self, lease: Lease) -> None:
        self.leases.give_back(lease)
        self._forget(lease)

    def _next(self, worker: str, now: float) -> Lease | None:
        return self.leases.grant(worker, self.version, now)

    def _granted(self, lease: Lease) -> None:  # noqa: B027  # most keep nothing
        """Keep what the lease's updates will need."""

    def _forget(self, lease: Lease) -> None:  # noqa: B027
        """Drop that again."""

    def state(self) -> tuple[dict[str, Flat], dict[str, Any]]:
        """All that changes: vectors, which are not copied, and the rest as JSON."""
        vectors = {"weights": self.weights, "buffers": self.buffers, **self._vectors()}
        return vectors, {"version": self.version, "leases": self.leases.state(), **self._figures()}

    def restore(self, vectors: Mapping[str, Flat], figures: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, to the bit.

        Raises:
            KeyError, ValueError: it is of another strategy or network.
        """
        self.version = figures["version"]
        self.leases.restore(figures["leases"])
        for name, own in ({"weights": self.weights, "buffers": self.buffers} | self._vectors()).items():
            own[:] = vectors[name]

    @abstractmethod
    def _apply(self, lease: Lease, update: Update) -> None:
        """Change weights, buffers and version."""

    @abstractmethod
    def _vectors(self) -> dict[str, Flat]:
        """What it keeps besides, changed in place."""

    def _figures(self) -> dict[str, Any]:
        return {}
