"""Units of work, which workers compute under a lease, and the updates that they send.

A work unit is a version of the weights, a range of steps, and the segments of the data set that its worker holds. A
step's batch depends only on the seed, the number of the step and these segments. So a unit can be repeated, by the same
worker or by another one that has the segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Computed", "Flat", "Sends", "UnitLease", "Update", "Verdict", "WorkUnit", "is_finite"]

Flat = NDArray[np.float32]
"""All trained values of a network, or all its buffers, as one vector."""

Sends = Literal["gradient", "change", "portion"]
"""Content of an update: the sum of the gradients of some steps, the weights before these steps less those after
them, or the sum of the gradients of some batches at the same weights."""


def is_finite(values: Flat) -> bool:
    """True if all numbers are finite, and the sum of their squares is, too; no honest update is longer than that."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(values, values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkUnit:
    """Steps to compute from one version of the weights."""

    version: int
    """Version of the weights to start from."""
    first: int
    """Its first step, counted from 0 over the whole run."""
    steps: int
    """Number of steps; one update covers all of them."""
    rate: float | None = None
    """Learning rate at the peak of the network's schedule; the network's own by default."""
    segments: tuple[int, ...] = ()
    """Segments of the data set, in this order, from which batches are drawn; empty for the whole data set."""

    @property
    def span(self) -> range:
        """Its steps."""
        return range(self.first, self.first + self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLease:
    """The right to bring the update of a unit; `training.strategies.leases` says until when."""

    number: int
    worker: str
    unit: WorkUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Result of some steps."""

    values: Flat
    """A gradient or a change, as the strategy asks: `Sends`."""
    buffers: Flat
    """Running statistics after the steps; empty for a network without any."""
    loss: float
    """Mean over the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of a worker for some steps of its lease."""

    lease: int
    worker: str
    steps: range
    computed: Computed


Verdict = Literal["taken", "duplicate", "late", "stale", "refused"]
"""Result of an update. `taken`: it is in the weights. `duplicate`: it was there already. `late`: its lease has expired
or never existed. `stale`: it comes from weights that are too old. `refused`: it is not a vector of finite numbers
(`is_finite`) of the right length, or covers other steps than are due. After `late`, `stale` and `refused` the steps go
to another worker, and the sender asks for a new lease.
"""
