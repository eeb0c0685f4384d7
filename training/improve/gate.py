"""The decision if an improved network may become a release, by a comparison with the present one. Pure.

Only pictures count that one of the two networks answers rightly and the other wrongly: `gained` and `lost`. On labelled
pictures the improved network may lose a little more than it gains, since it was trained for other pictures. On the
newest answers from above it has to gain, and by more than chance: the lower bound of Wilson's interval of the share of
gained ones among these pictures lies above a half.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np

from tierkit.tensors import Array

__all__ = [
    "FEW",
    "FEWEST",
    "MOST_LOST",
    "SURE",
    "Comparison",
    "Contradiction",
    "GateVerdict",
    "compared",
    "contradiction",
    "judge",
    "wilson_low",
]

FEWEST = 50
"""Pictures with which a comparison says something."""
MOST_LOST = 0.01
"""Share of labelled pictures by which the improved network may be worse."""
SURE = 0.8
"""Confidence from which an answer of the present network counts as sure."""
FEW = 5
"""Labels of people that settle which of two tiers is right."""
_Z = NormalDist().inv_cdf(0.95)
"""One in twenty networks that are not better passes by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two networks on the same pictures."""

    pictures: int
    old_right: int
    new_right: int
    gained: int
    """Right answers of the improved network where the present one is wrong."""
    lost: int
    """The other way round."""
    finite: bool = True
    """False if the improved network gives a number that is not finite."""

    @property
    def change(self) -> float:
        """Accuracy of the improved network minus the accuracy of the present network."""
        return (self.gained - self.lost) / max(1, self.pictures)

    def figures(self, of: str) -> dict[str, float]:
        """Accuracies and counts by name.

        Args:
            of: begins the names.
        """
        counts = {f"{of}_{name}": float(value) for name, value in asdict(self).items() if name != "finite"}
        total = max(1, self.pictures)
        return {**counts, f"{of}_old": self.old_right / total, f"{of}_new": self.new_right / total}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """The decision on an improvement."""

    passes: bool
    reason: str
    """The figures that decided."""


def compared(old: Array, new: Array, labels: Array) -> Comparison:
    """Compare two networks.

    Args:
        old, new: logits `[n, classes]`.
        labels: int64 `[n]`, the right answers.
    """
    was, is_now = old.argmax(axis=1) == labels, new.argmax(axis=1) == labels
    return Comparison(
        pictures=len(labels),
        old_right=int(was.sum()),
        new_right=int(is_now.sum()),
        gained=int((is_now & ~was).sum()),
        lost=int((was & ~is_now).sum()),
        finite=bool(np.isfinite(new).all()),
    )


def judge(
    validation: Comparison | None, above: Comparison | None, *, named: str = "newest answers from above"
) -> GateVerdict:
    """Decide by what is known; what has too few pictures counts as unknown.

    Args:
        validation: on labelled pictures.
        above: on the newest pictures with answers from above, as if these were right.
        named: names the pictures of `above` in the reason.
    """
    known = [each for each in (validation, above) if each is not None]
    if not all(each.finite for each in known):
        return GateVerdict(passes=False, reason="the improved network gives numbers that are not finite")
    validation, above = (each if each and each.pictures >= FEWEST else None for each in (validation, above))
    if validation is None and above is None:
        most = max((each.pictures for each in known), default=0)
        return GateVerdict(
            passes=False,
            reason=f"{most:,} pictures to compare the networks on, and {FEWEST} are needed: give labelled pictures "
            "with --validation, or let devices send pictures to the scheduler",
        )
    said = []
    if validation is not None:
        said.append(_said("labelled pictures", validation))
        if validation.change < -MOST_LOST:
            return GateVerdict(passes=False, reason=f"it loses too much: {said[-1]}")
    if above is not None:
        said.append(_said(named, above))
        if above.change < 0:
            return GateVerdict(passes=False, reason=f"it is worse: {said[-1]}")
        if wilson_low(above.gained, above.gained + above.lost) <= 0.5:
            return GateVerdict(passes=False, reason=f"it is not better by more than chance: {said[-1]}")
    return GateVerdict(passes=True, reason="; ".join(said))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A class of the present network for which the tier above nearly always says the same other class."""

    said: int
    """Class that the present network is sure of."""
    above: int
    """Class that the tier above gives instead."""
    pictures: int
    """Sure answers of the present network."""
    contradicted: int
    """Number of them for which the tier above says `above`."""


def contradiction(probabilities: Array, labels: Array, by_people: Array) -> Contradiction | None:
    """Find the class in which the tier above contradicts most sure answers of the present network with one other class.
    One of the two is wrong for the whole class. Drift looks different: the network is unsure, and its errors spread.

    Args:
        probabilities: probabilities of the present network, `[n, classes]`.
        labels: int64 `[n]`, from people or from the upper tiers.
        by_people: bool `[n]`. If people say for most of `FEW` or more pictures of a class that the present network is
            wrong, the class is not looked at.

    Returns:
        The class with the largest share, by the lower bound of Wilson's interval; None if it is not above a half.
    """
    said, sure = probabilities.argmax(axis=1), probabilities.max(axis=1) >= SURE
    worst, bound = None, 0.5
    for each in np.unique(said[sure]):
        rows = sure & (said == each)
        people = labels[rows & by_people]
        if len(people) >= FEW and np.mean(people != each) > 0.5:
            continue
        others = np.bincount(labels[rows & ~by_people], minlength=probabilities.shape[1])
        total = int(others.sum())
        others[each] = 0
        above, count = int(others.argmax()), int(others.max())
        if (low := wilson_low(count, total)) > bound:
            worst, bound = Contradiction(said=int(each), above=above, pictures=total, contradicted=count), low
    return worst


def wilson_low(count: int, total: int, z: float = _Z) -> float:
    """Lower bound of Wilson's interval of a share; 0 without samples."""
    if not total:
        return 0.0
    share = count / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, (centre - spread) / (1 + z * z / total))


def _said(what: str, found: Comparison) -> str:
    old, new = (right / max(1, found.pictures) for right in (found.old_right, found.new_right))
    return (
        f"{old:.1%} right before and {new:.1%} now, of {found.pictures:,} {what} ({found.gained:,} gained, "
        f"{found.lost:,} lost)"
    )
