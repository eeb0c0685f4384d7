"""Which images of a task go up a tier: a pure function of the answers below. `node` asks, this decides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.escalation import unsure
from tierkit.inference.model import Array
from tierkit.wire.messages import Stage

__all__ = ["Below", "going_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """What the tier below a stage has to tell."""

    answered: Array
    """Positions in the task, int64 `[a]`, of the images that it answered."""
    probabilities: Array | None
    """`[a, classes]`, of these answers; None where they are not at hand, and so no threshold can be kept to."""
    lost: Array
    """Positions, int64 `[l]`, of those that it should have answered and did not."""

    @classmethod
    def of_all(cls, images: int, probabilities: Array | None) -> Below:
        """The tier that has answered all images."""
        return cls(answered=np.arange(images), probabilities=probabilities, lost=np.arange(0))


def going_up(stage: Stage, below: Below) -> Array:
    """Positions of the images that the stage is asked about, int64 `[m]`, rising; no image stands in it twice."""
    if stage.only is not None:
        return np.array(stage.only, np.int64)
    going = below.answered
    if stage.below is not None and len(going):
        assert below.probabilities is not None, "a threshold needs the answers that it is about"
        going = going[unsure(below.probabilities, stage.below)]
    return np.sort(np.concatenate([going, below.lost])) if stage.spare else going
