"""What a job's results say after the faults: pure functions over results and what was seen on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tierkit.client import ImageResult
from tierkit.types import Tier

__all__ = ["Tally", "tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Images of one job."""

    images: int
    lost: int
    """Without any answer, or missing from the results."""
    duplicated: int
    """Answered twice: more than once in the results, or a stage told more than once by the events."""
    wrong: int
    """With another answer than the bare network of the tier gives."""
    fine: int
    fallback: int
    """Whose coarse answer stands, marked as such."""
    unmarked: int
    """Whose coarse answer stands without a word why."""


def tally(
    images: int,
    results: Sequence[ImageResult],
    told: Mapping[tuple[str, int], int],
    coarse: NDArray[Any],
    fine: Mapping[Tier, NDArray[Any]],
) -> Tally:
    """Count.

    Args:
        images: of the job.
        results: all of them, as the job API gave them after the end.
        told: how often the events told of a stage (coarse, or final) of an image.
        coarse, fine: labels that the bare networks give, `[images]`, of each tier.
    """
    listed = Counter(result.index for result in results)
    answered = {result.index for result in results if result.coarse is not None}
    wrong = 0
    for result in results:
        right = result.coarse is None or result.coarse.index == coarse[result.index]
        if result.fine is not None:
            right &= result.fine.index == fine[result.fine.tier][result.index]
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
