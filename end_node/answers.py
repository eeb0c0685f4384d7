"""Answers from class probabilities: labels, confidences, superclasses. Pure: arrays in, events out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from models.escalation import unsure
from models.hierarchy import Hierarchy
from tierkit.errors import UpstreamError
from tierkit.inference.model import Model
from tierkit.inference.runner import RunResult
from tierkit.tensors import Array
from tierkit.wire.events import (
    CoarseEvent,
    Damage,
    FallbackEvent,
    FineEvent,
    RoutedEvent,
    Sent,
    StageAnswer,
    StageLoss,
    UpperTiming,
    WrongAnswer,
)
from tierkit.wire.messages import Upstream
from tierkit.wire.oip import InferResponse, Timing

__all__ = [
    "NoNumbers",
    "UpperAnswer",
    "check_probabilities",
    "coarse_event",
    "fine_event",
    "finer_in_place",
    "in_place",
    "nothing_to_answer",
    "stage_answer",
]

P = TypeVar("P", StageAnswer, StageLoss)
T = TypeVar("T")

_MOST_SAID = 200
"""Characters of what is wrong with an image."""

_SUM_TOLERANCE = 1e-3
"""A float32 softmax over 100 classes is within 1e-5 of 1; half precision would be within 1e-3."""


def coarse_event(
    task_id: str, node_id: str, model: Model, probabilities: Array, cost: RunResult, *, below: float | None = None
) -> CoarseEvent:
    """The first line of an answer, from the probabilities of the superclasses, `[n, C]`.

    Args:
        below: the threshold by which its images go up; None for none.

    Raises:
        NoNumbers: the network gave NaN or infinity.
    """
    labels, confidences = _best(probabilities)
    if not 0 <= sum(confidences) < math.inf:
        raise NoNumbers(f"the model '{model.name}' gave probabilities that are not finite numbers")
    return CoarseEvent(
        task_id=task_id,
        node_id=node_id,
        model=model.name,
        sha256=model.sha256,
        labels=labels,
        confidences=confidences,
        queue_ms=cost.queue_s * 1000,
        compute_ms=cost.compute_s * 1000,
        batch_images=cost.batch_images,
        unsure=None if below is None else tuple(np.flatnonzero(unsure(probabilities, below)).tolist()),
    )


def nothing_to_answer(task_id: str, node_id: str, model: Model) -> CoarseEvent:
    """The first line where no image can be read; `in_place` makes it one for all images."""
    return CoarseEvent(
        task_id=task_id,
        node_id=node_id,
        model=model.name,
        sha256=model.sha256,
        labels=(),
        confidences=(),
        queue_ms=0.0,
        compute_ms=0.0,
    )


def in_place(event: CoarseEvent, positions: Sequence[int], damaged: Mapping[int, str]) -> CoarseEvent:
    """The answers of the readable images at their positions in the task, with what is wrong with the others.

    Args:
        positions: of the readable images, rising.
        damaged: why not, by the positions of the others.
    """
    images = len(positions) + len(damaged)
    return replace(
        event,
        labels=_spread(event.labels, positions, images, 0),
        confidences=_spread(event.confidences, positions, images, 0.0),
        unsure=None if event.unsure is None else tuple(positions[index] for index in event.unsure),
        damaged=tuple(Damage(index=index, reason=reason[:_MOST_SAID]) for index, reason in damaged.items()),
    )


def finer_in_place(
    event: FineEvent | RoutedEvent | FallbackEvent, positions: Sequence[int], images: int
) -> FineEvent | RoutedEvent | FallbackEvent:
    """The same for what follows the coarse answer."""
    match event:
        case FineEvent():
            return replace(
                event,
                labels=_spread(event.labels, positions, images, 0),
                confidences=_spread(event.confidences, positions, images, 0.0),
                coarse_labels=_spread(event.coarse_labels, positions, images, 0),
                coarse_confidences=_spread(event.coarse_confidences, positions, images, 0.0),
            )
        case RoutedEvent():
            return replace(
                event,
                answers=tuple(_at(answer, positions) for answer in event.answers),
                losses=tuple(_at(loss, positions) for loss in event.losses),
            )
    return event


def _at(part: P, positions: Sequence[int]) -> P:
    return replace(part, indices=tuple(positions[index] for index in part.indices))


def _spread(values: Sequence[T], positions: Sequence[int], images: int, blank: T) -> tuple[T, ...]:
    spread = [blank] * images
    for position, value in zip(positions, values, strict=True):
        spread[position] = value
    return tuple(spread)


class NoNumbers(RuntimeError):
    """A network gave NaN or infinity: nothing of its answer can be used."""


class UpperAnswer(Struct, frozen=True, kw_only=True):
    """Answer of one upstream node."""

    upstream: Upstream
    probabilities: Array
    """Probabilities of the classes, `[n, F]`."""
    round_trip_s: float
    sha256: str = ""
    """Version of the network, as the upstream node names it."""
    timing: Timing | None = None
    sent: Sent | None = None
    wrong: tuple[WrongAnswer, ...] = ()
    """Wrong answers of the nodes that were asked before it."""


def fine_event(task_id: str, answer: UpperAnswer, hierarchy: Hierarchy) -> FineEvent:
    """Return the finer answer of a whole task. Its superclass is the one with the largest sum of its classes'
    probabilities, which need not be the superclass of the best class."""
    return FineEvent(task_id=task_id, **_finer(answer, hierarchy))


def stage_answer(indices: Array, answer: UpperAnswer, hierarchy: Hierarchy) -> StageAnswer:
    """Return the finer answer of one stage out of several, about the images of a task at `indices`, int64 `[n]`."""
    return StageAnswer(indices=tuple(indices.tolist()), **_finer(answer, hierarchy))


def _finer(answer: UpperAnswer, hierarchy: Hierarchy) -> dict[str, Any]:
    timing = answer.timing
    labels, confidences = _best(answer.probabilities)
    coarse_labels, coarse_confidences = _best(hierarchy.coarse_probabilities(answer.probabilities))
    return {
        "node_id": answer.upstream.node_id,
        "tier": answer.upstream.tier,
        "model": answer.upstream.model,
        "sha256": answer.sha256,
        "round_trip_ms": answer.round_trip_s * 1000,
        "timing": timing
        and UpperTiming(
            queue_ms=timing.queue_s * 1000, compute_ms=timing.compute_s * 1000, batch_images=timing.batch_images
        ),
        "sent": answer.sent,
        "wrong": answer.wrong,
        "labels": labels,
        "confidences": confidences,
        "coarse_labels": coarse_labels,
        "coarse_confidences": coarse_confidences,
    }


def check_probabilities(response: InferResponse, *, images: int, classes: int) -> Array:
    """Return the output `probabilities` of an upstream node's answer, float32 `[images, classes]`.

    An answer of another model, of another batch or of a broken network must not pass for a result.

    Raises:
        UpstreamError: it is missing, or is not a list of probability distributions of this shape.
    """
    probabilities = response.output("probabilities")
    if probabilities is None:
        raise UpstreamError("the answer has no output 'probabilities'")
    if probabilities.shape != (images, classes) or probabilities.dtype.kind != "f":
        raise UpstreamError(
            f"the answer has 'probabilities' {probabilities.dtype} {list(probabilities.shape)} "
            f"where [{images}, {classes}] were asked for"
        )
    with np.errstate(all="ignore"):  # of what is no probability
        sums = probabilities.sum(axis=1)
    # NaN fails each comparison, so it is refused as well.
    if not (probabilities.min() >= 0 and sums.min() >= 1 - _SUM_TOLERANCE and sums.max() <= 1 + _SUM_TOLERANCE):
        raise UpstreamError("the answer's 'probabilities' are invalid: they must be positive and add up to 1")
    return np.asarray(probabilities, dtype=np.float32)


def _best(probabilities: Array) -> tuple[tuple[int, ...], tuple[float, ...]]:
    # A float32 sum may exceed 1 in its last digit.
    confidences = np.minimum(probabilities.max(axis=1), 1.0)
    return tuple(probabilities.argmax(axis=1).tolist()), tuple(confidences.tolist())
