"""Requests of a rank to the others. A rank's program yields them, and its runner answers: `group` with real
processes, `lockstep` on virtual time. No I/O.

All ranks yield the same kinds of requests in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from models.data import ImageSet
from training.units import Flat

__all__ = ["Broadcast", "Done", "Gather", "Mean", "Program", "Request", "Seat", "Swap"]


@dataclass(frozen=True, slots=True)
class Done:
    """A step is done. The runner may report it, keep a checkpoint, or end the run. Answered by an empty
    vector."""

    step: int
    """Step that was done, counted from 0."""
    loss: float
    kept: Mapping[str, float] = field(default_factory=dict)
    """Figures that the program needs to continue after this step, in addition to its learner."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Request for an all-reduce. The answer is the mean of the ranks' vectors."""

    values: Flat


@dataclass(frozen=True, slots=True)
class Swap:
    """Send a vector to one rank and get the vector of another one, which is the answer. A rank may be its own partner:
    then it gets what it has sent."""

    values: Flat
    to: int
    source: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Request for an all-gather of vectors of the same length. The answer is all of them, joined in the order of the
    ranks.
    """

    values: Flat


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Answered by the vector of one rank. The others give vectors of the same length, whose content does not count."""

    values: Flat
    source: int


Request = Done | Mean | Swap | Gather | Broadcast


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Place of a rank in a run."""

    rank: int
    ranks: int
    test: ImageSet
    """Test images, because only the program of some rules can measure accuracies."""
    start: int = 0
    """Step to continue with."""
    kept: Mapping[str, float] = field(default_factory=dict)
    """The last `Done.kept` before that step."""


Program = Generator[Request, Flat, dict[str, float]]
"""The work of one rank to the end of the run. Its learner then holds the result, the same at all ranks unless the rule
says otherwise. It returns figures of the rule, by their names in the result; an `accuracy` among them replaces the
accuracy of the learner's weights.
"""
