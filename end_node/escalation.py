"""Choice of the images of a task that go up after its coarse answer, tier by tier. Pure: `node` asks, this decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.escalation import unsure
from tierkit.errors import InvalidInput
from tierkit.inference.upstreams import read_header
from tierkit.tensors import Array
from tierkit.types import Tier
from tierkit.wire.messages import ESCALATION, ESCALATION_HEADER, UPSTREAM_HEADER, Stage, Upstream

__all__ = ["Below", "going_up", "read_stages"]


def read_stages(header: str | None, upstreams: Sequence[Upstream], *, coarse_known: bool) -> tuple[Stage, ...]:
    """Return the tiers to which the unsure images of a task go, one after the other; none if all images go up together.

    Args:
        header: value of `ESCALATION_HEADER`.
        upstreams: upstream nodes in the same request.
        coarse_known: True if the sender knows the coarse answer, so that it is not computed.

    Raises:
        InvalidInput: the header cannot be read; the tiers do not rise from the edge on; or there is no upstream node,
            or one of another tier. Also if a list of images is anywhere but in the first stage with a known coarse
            answer, or if the first stage has a threshold although the coarse answer is known.
    """
    if header is None:
        return ()
    stages = read_header(ESCALATION, ESCALATION_HEADER, header)
    tiers = [stage.tier for stage in stages]
    if tiers not in ([Tier.EDGE], [Tier.CLOUD], [Tier.EDGE, Tier.CLOUD]):
        given = ", ".join(tiers) or "nothing"
        raise InvalidInput(f"{ESCALATION_HEADER} goes from edge to cloud, or has one of the two; it has {given}")
    named = {upstream.tier for upstream in upstreams}
    if not named or not named <= set(tiers):
        raise InvalidInput(
            f"{UPSTREAM_HEADER} has nodes of {', '.join(sorted(named)) or 'no tier'}, {ESCALATION_HEADER} asks about "
            f"{', '.join(tiers)}: name at least one node, and none of another tier"
        )
    if coarse_known and stages[0].below is not None:
        raise InvalidInput(
            f"the threshold of the first tier in {ESCALATION_HEADER} is about the coarse answer: ask for both stages"
        )
    for number, stage in enumerate(stages):
        if stage.only is not None and (number or not coarse_known or list(stage.only) != sorted(set(stage.only))):
            raise InvalidInput(
                f"'only' in {ESCALATION_HEADER} names the images, in rising order, that the first tier is asked about "
                "when the coarse answer is known; it has no other place"
            )
    return stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """Answers of the tier below a stage."""

    answered: Array
    """Positions in the task, int64 `[a]`, of the images that it answered."""
    probabilities: Array | None
    """`[a, classes]`, of these answers; None if they are not at hand, and so no threshold can be kept to."""
    lost: Array
    """Positions, int64 `[l]`, of those that it should have answered and did not."""

    @classmethod
    def of_all(cls, images: int, probabilities: Array | None) -> Below:
        """The tier that has answered all images."""
        return cls(answered=np.arange(images), probabilities=probabilities, lost=np.arange(0))


def going_up(stage: Stage, below: Below) -> Array:
    """Return the positions of the images that go up to the stage, int64 `[m]`, rising and without repetition."""
    if stage.only is not None:
        return np.array(stage.only, np.int64)
    going = below.answered
    if stage.below is not None and len(going):
        assert below.probabilities is not None, "a threshold needs the answers that it is about"
        going = going[unsure(below.probabilities, stage.below)]
    return np.sort(np.concatenate([going, below.lost])) if stage.spare else going
