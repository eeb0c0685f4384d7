"""Escalation, a cascade of networks: which images of a job go up a tier, and by which thresholds. Pure.

A job with `escalate` other than `always` gets its gates at submission, from the tuned thresholds next to the weights,
and keeps them. Gates form a chain of tiers; each has the threshold below which an answer is unsure. The end
devices route image by image (`end_node.escalation`); the scheduler tells them the stages and checks what comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from models.escalation import Gate, OperatingPoint, Tuning
from scheduler.core.device import Node
from tierkit.errors import InvalidInput, NotFound, TerraceError
from tierkit.types import Escalate, Scheme, Tier
from tierkit.wire.events import RoutedEvent, StageAnswer, StageLoss
from tierkit.wire.messages import Stage

__all__ = ["JobGate", "asks", "check_routed", "choose_gates", "final_answers", "stages_of", "upstreams_of", "without"]

_DIRECT = {Scheme.END: (), Scheme.END_EDGE: (Tier.EDGE,), Scheme.END_CLOUD: (Tier.CLOUD,)}
_BOTH = (Tier.EDGE, Tier.CLOUD)


class JobGate(BaseModel):
    """A step up of a job, as it was chosen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lower: Tier
    upper: Tier
    below: float | None
    """Images go up whose margin is smaller; None: all."""
    lower_sha256: str | None = None
    """The weights that the threshold was tuned for; None if there is none."""
    upper_sha256: str | None = None
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Held-out images that went up,"""
    accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    """and how often the answers were right then."""


def choose_gates(
    escalate: Escalate,
    scheme: Scheme,
    tuning: Tuning | TerraceError,
    *,
    lowest: Literal["edge", "end"],
    accuracy: float | None,
    budget: float | None,
) -> tuple[JobGate, ...]:
    """The steps up of a job; none with `always`.

    Args:
        tuning: the tuned thresholds, or why there are none.
        lowest: the lowest tier whose answer may stand.
        accuracy, budget: the job's own aim; None for the tuned one.

    Raises:
        InvalidInput: the scheme has no tier to go up to, an aim is given that this way of escalating does not have, or
            cannot be reached, or nothing was tuned.
    """
    for name, value, owner in (("escalate_accuracy", accuracy, "threshold"), ("escalate_budget", budget, "budget")):
        if value is not None and escalate != owner:
            raise InvalidInput(f"{name} goes with escalate={owner}, not with escalate={escalate}")
    if escalate is Escalate.ALWAYS:
        if lowest != "edge":
            raise InvalidInput(
                "escalate_from goes with escalate=threshold or escalate=budget: always sends up all images"
            )
        return ()
    chain = (Tier.END, *_DIRECT.get(scheme, _BOTH))
    if len(chain) < 2:
        raise InvalidInput(f"scheme {scheme} sends nothing up: escalate={escalate} needs another scheme")
    if lowest == "edge" and len(chain) < 3:
        raise InvalidInput(
            f"with scheme {scheme} no image goes from the edge to the cloud: choose scheme mapping or adaptive, or "
            "escalate_from=end, with which a sure coarse answer stands"
        )
    if isinstance(tuning, TerraceError):
        raise InvalidInput(
            f"escalate={escalate} needs tuned thresholds, and this scheduler has none ({tuning}); submit with "
            "escalate=always, or have them tuned and start the scheduler again"
        )
    gates: list[JobGate] = []
    for lower, upper in pairwise(chain):
        if lower is Tier.END and lowest == "edge":
            gates.append(JobGate(lower=lower, upper=upper, below=None))
            continue
        try:
            gate = tuning.gate(lower, upper)
        except NotFound as exc:
            raise InvalidInput(
                f"scheme {scheme} with escalate={escalate}: {exc}; choose a scheme of these tiers, or have the others "
                "tuned with 'terrace models tune-escalation'"
            ) from exc
        gates.append(_settled(gate, _aimed(gate, escalate, tuning, accuracy, budget)))
    return tuple(gates)


def _aimed(
    gate: Gate, escalate: Escalate, tuning: Tuning, accuracy: float | None, budget: float | None
) -> OperatingPoint:
    if escalate is Escalate.THRESHOLD:
        return gate.for_accuracy(tuning.relative_accuracy if accuracy is None else accuracy)
    return gate.for_budget(tuning.budget if budget is None else budget)


def _settled(gate: Gate, point: OperatingPoint) -> JobGate:
    return JobGate(
        lower=gate.lower.tier,
        upper=gate.upper.tier,
        below=point.below,
        lower_sha256=gate.lower.sha256,
        upper_sha256=gate.upper.sha256,
        share=point.share,
        accuracy=point.accuracy,
    )


def stages_of(gates: Sequence[JobGate], escalate: Escalate, end_sha256: str) -> tuple[Stage, ...]:
    """The steps up for an end device.

    Args:
        end_sha256: of the weights that the device answers with. A threshold for others is not used: it sends up all.

    With a budget, images that the edge failed to answer do not go to the cloud, because that would break the budget
    just when many are lost.
    """
    return tuple(
        Stage(
            tier=gate.upper,
            below=None if gate.lower is Tier.END and gate.lower_sha256 != end_sha256 else gate.below,
            spare=escalate is not Escalate.BUDGET,
        )
        for gate in gates
    )


def upstreams_of(gates: Sequence[JobGate], route: Sequence[Node], turn: int) -> tuple[Node, ...]:
    """The nodes of a route for each step up, tier after tier; those with other weights than tuned are left out.

    A device whose route begins at another tier takes the nodes of the lower one in turn, so that they share the load.
    """
    nodes: list[Node] = []
    for gate in gates:
        known = {sha for other in gates for tier, sha in _weights(other) if tier is gate.upper and sha is not None}
        own = [node for node in route if node.tier is gate.upper and (not known or node.sha256 in known)]
        if own and route[0].tier is not gate.upper and gate.upper is Tier.EDGE:
            own = own[turn % len(own) :] + own[: turn % len(own)]
        nodes += own
    return tuple(nodes)


def _weights(gate: JobGate) -> tuple[tuple[Tier, str | None], ...]:
    return (gate.lower, gate.lower_sha256), (gate.upper, gate.upper_sha256)


def asks(event: RoutedEvent) -> dict[Tier, int]:
    """The number of images sent to each tier."""
    sent = {answer.tier: len(answer.indices) for answer in event.answers}
    return {**sent, **{loss.tier: len(loss.indices) for loss in event.losses if loss.tried}}


def final_answers(event: RoutedEvent) -> Iterator[tuple[StageAnswer, NDArray[np.int64], NDArray[np.int64]]]:
    """The answers of upstream nodes that stand, node by node: the positions of their images in the task and in the
    node's own answer, int64 `[m]`."""
    above: set[int] = set()
    for answer in reversed(event.answers):
        kept = [(index, place) for place, index in enumerate(answer.indices) if index not in above]
        above |= set(answer.indices)
        if kept:
            at, places = np.array(kept, np.int64).T
            yield answer, at, places


def without(event: RoutedEvent) -> dict[int, StageLoss]:
    """Images that lack the answer of a tier that they should have gone up to, and have none from above it."""
    lost: dict[int, StageLoss] = {index: loss for loss in event.losses for index in loss.indices}
    for answer in event.answers:
        for index in answer.indices:
            if index in lost and _rank(answer.tier) > _rank(lost[index].tier):
                del lost[index]
    return lost


def check_routed(
    event: RoutedEvent,
    stages: Sequence[Stage],
    images: int,
    unsure: Sequence[int] | None = None,
    damaged: Collection[int] = (),
) -> str | None:
    """The first contradiction between the images that a device reports as sent and the gates; None without one.

    Whether the answers themselves are sound (node, labels) is not looked at.

    Args:
        unsure: images that its coarse answer marked unsure by the first stage's threshold; None if it said
            nothing of that.
        damaged: the images that it cannot read; they go nowhere.
    """
    entries: list[StageAnswer | StageLoss] = [*event.answers, *event.losses]
    by_tier = {entry.tier: entry for entry in entries}
    if len(by_tier) < len(entries) or not set(by_tier) <= {stage.tier for stage in stages}:
        return "answers of a tier that was not asked, or twice of one"
    if [answer.tier for answer in event.answers] != sorted((a.tier for a in event.answers), key=_rank):
        return "answers that do not rise tier by tier"
    sure, spare = set(range(images)).difference(damaged), set[int]()
    for stage in stages:
        entry = by_tier.get(stage.tier)
        indices = list(entry.indices) if entry is not None else []
        going = set(indices)
        if indices != sorted(going):
            return "positions of images that do not rise"
        must = (spare if stage.spare else set()) | (sure if stage.below is None else set())
        may = sure | (spare if stage.spare else set())
        known = unsure if stage is stages[0] and stage.below is not None else stage.only
        if known is not None:
            must = may = set(known)
        if not must <= going <= may:
            return f"images at the {stage.tier} that should not be there, or not all that should"
        sure, spare = (set(), going) if isinstance(entry, StageLoss) else (going, set())
    return None


def _rank(tier: Tier) -> int:
    return list(Tier).index(tier)
