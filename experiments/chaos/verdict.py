"""Check of a job's results after the faults: pure functions over results and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.testbed import bare_labels
from tierkit.client import ImageResult
from tierkit.tensors import Array
from tierkit.types import Tier

__all__ = ["Tally", "Truth", "tally"]


@dataclass(frozen=True, slots=True)
class Truth:
    """Answers of the bare networks to a job's images."""

    coarse: Array
    fine: Mapping[Tier, Array]

    @classmethod
    def of(cls, images: Array) -> Truth:
        return cls(bare_labels(Tier.END, images), {tier: bare_labels(tier, images) for tier in (Tier.EDGE, Tier.CLOUD)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Images of one job."""

    images: int
    lost: int
    """Images without any answer, or missing from the results."""
    duplicated: int
    """Images answered twice: more than once in the results, or with two events for a stage."""
    wrong: int
    """Images with another answer than the bare network of the tier gives."""
    fine: int
    fallback: int
    """Images whose final answer is the coarse one, marked as a fallback."""
    unmarked: int
    """Images whose final answer is the coarse one, without a reason."""


def tally(images: int, results: Sequence[ImageResult], told: Mapping[tuple[str, int], int], truth: Truth) -> Tally:
    """Count the images of a job by the state of their answers.

    Args:
        images: number of images of the job.
        results: all results from the job API after the end.
        told: number of events for each stage (coarse or final) of an image.
    """
    listed = Counter(result.index for result in results)
    answered = {result.index for result in results if result.coarse is not None}
    wrong = 0
    for result in results:
        right = result.coarse is None or result.coarse.index == truth.coarse[result.index]
        if result.fine is not None:
            right &= result.fine.index == truth.fine[result.fine.tier][result.index]
        wrong += not right
    twice = {index for index, count in listed.items() if count > 1}
    twice |= {index for (_, index), count in told.items() if count > 1}
    bare = [result for result in results if result.coarse is not None and result.fine is None]
    return Tally(
        images=images,
        lost=images - len(answered & set(range(images))),
        duplicated=len(twice),
        wrong=wrong,
        fine=sum(result.fine is not None for result in results),
        fallback=sum(result.fallback is not None for result in bare),
        unmarked=sum(result.fallback is None for result in bare),
    )
