"""Decisions on what can be learned from observations: which labels help, and how far the tiers agree. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tierkit.wire.observations import Observation

__all__ = [
    "MOST_AUDITED",
    "MOST_IMPROVEMENTS",
    "MOST_SOURCES",
    "Agreement",
    "Audits",
    "SoughtPictures",
    "Which",
    "agrees",
    "usefulness",
]

Which = Literal["disagree", "labelled", "answered"]

MOST_AUDITED = 1000
"""Audited pictures of a source that count, the latest."""
MOST_IMPROVEMENTS = 100
"""Improvements that are kept, the newest."""
MOST_SOURCES = 1000
"""Sources whose audited pictures count, those heard of last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoughtPictures:
    """A search among the pictures that the scheduler has. None in a field means all."""

    which: Which
    node_id: str | None = None
    source: str | None = None
    site: str | None = None
    least: float = 0.0
    """The least confidence of the answer from above, if `answered` pictures are sought."""
    reader: str | None = None
    """Only sources that this user may see."""


def usefulness(seen: Observation) -> float | None:
    """Rate a label for this picture; None if its answers raise no question.

    From 1 to 2 if the answers name different superclasses: most for two that are both sure. From 0 to 1 if they agree
    and the device was unsure: most where the answer from above is sure.
    """
    local, finer = seen.local, seen.finer
    if local is None or finer is None:
        return None
    if local.label != finer.coarse_label:
        return 1.0 + finer.coarse_confidence * local.confidence
    return finer.coarse_confidence * (1.0 - local.confidence) if seen.unsure else None


def agrees(seen: Observation) -> bool | None:
    """Return True if both answers to an audited picture name the same superclass; None for other pictures."""
    if not seen.audit or seen.local is None or seen.finer is None:
        return None
    return seen.local.label == seen.finer.coarse_label


class Agreement(NamedTuple):
    """A number of audited pictures, and the number of them with two equal answers."""

    audited: int = 0
    agreed: int = 0

    @property
    def share(self) -> float | None:
        """None without any."""
        return self.agreed / self.audited if self.audited else None

    def plus(self, other: Agreement) -> Agreement:
        """Both together."""
        return Agreement(self.audited + other.audited, self.agreed + other.agreed)


class Audits:
    """The latest audited pictures of each source. An amended answer replaces the one before."""

    def __init__(self) -> None:
        self._by_source: OrderedDict[tuple[str, str], OrderedDict[int, bool]] = OrderedDict()

    def note(self, node_id: str, source: str, sequence: int, agreed: bool) -> None:
        """Count a picture."""
        key = (node_id, source)
        pictures = self._by_source.setdefault(key, OrderedDict())
        self._by_source.move_to_end(key)
        pictures[sequence] = agreed
        if len(pictures) > MOST_AUDITED:
            del pictures[min(pictures)]
        if len(self._by_source) > MOST_SOURCES:
            self._by_source.popitem(last=False)

    def by_source(self) -> dict[tuple[str, str], Agreement]:
        """The agreement by node and source."""
        return {key: Agreement(len(each), sum(each.values())) for key, each in self._by_source.items()}
