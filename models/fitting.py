"""The network of a tier that a machine can carry. Pure: memory and speed are passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from models.manifest import ModelEntry
from tierkit.types import Tier

__all__ = [
    "WITHIN_MS",
    "Capacity",
    "Outcome",
    "Suitability",
    "judge",
    "last_resort",
    "left_out",
    "needs_bytes",
    "to_measure",
]

WITHIN_MS: dict[Tier, float | None] = {Tier.END: 100.0, Tier.EDGE: 100.0, Tier.CLOUD: None}
"""Milliseconds per image within which a tier answers by default. After a tenth of a second, a person notices a wait; in
the cloud, accuracy counts most (section 3.2 of the paper)."""

_RUNTIME_BYTES = 30_000_000
_COPIES = 4
"""The bundled networks, at peaks of 0.9, 21.5 and 3.0 MB, took 23, 88 and 41 MB once they were loaded and had answered
50 images (ONNX Runtime 1.32). The runtime holds the file while it packs the weights."""
_IMAGES = 50
"""A node computes the images of a task at once, and the intermediate values of each live at the same time."""

Outcome = Literal["chosen", "fits", "too large", "too slow", "left out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Memory and time that a machine has for one network."""

    free_bytes: int | None
    """None if the system does not report it: then any network fits."""
    within_ms: float | None
    """Milliseconds per image; None for any speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suitability:
    """A network, and whether it suits a machine."""

    name: str
    tier: str
    outcome: Outcome
    reason: str
    needs_bytes: int
    ms_per_image: float | None
    """None if it was not measured."""


def needs_bytes(entry: ModelEntry) -> int:
    """Memory that a node takes for a network, estimated: a fixed part, four times its weights, and the intermediate
    values of 50 images, by the peak of its graph. If that is unknown, only the file counts."""
    peak = entry.size_bytes if entry.costs is None else entry.costs.peak_bytes
    intermediate = max(0, peak - entry.size_bytes)
    return _RUNTIME_BYTES + _COPIES * (peak - intermediate) + _IMAGES * intermediate


def judge(candidates: Sequence[ModelEntry], capacity: Capacity, ms_per_image: Mapping[str, float]) -> list[Suitability]:
    """Judge the networks of a tier, and choose the best of those that a machine can carry.

    The paper (section 3.2) chooses by memory, computing power and delay, and then by performance. So a network must fit
    the memory and answer in time; of those that do, the most accurate is chosen. If an accuracy is unknown, most
    parameters decide. Of equals, the first is chosen.

    Args:
        candidates: Networks of one tier.
        ms_per_image: Measured milliseconds per image by name. A network without them counts as quick enough.
    """
    quality, best_is = _quality(candidates)
    bounded = {entry.name: _bound(entry, capacity, ms_per_image.get(entry.name)) for entry in candidates}
    suitable = [entry for entry in candidates if bounded[entry.name][0] == "fits"]
    best = max(suitable, key=lambda entry: quality[entry.name], default=None)

    def judged(entry: ModelEntry) -> Suitability:
        outcome, reason = bounded[entry.name]
        if entry is best:
            outcome, reason = "chosen", best_is if len(suitable) > 1 else "no other one fits"
        return Suitability(
            name=entry.name,
            tier=entry.tier,
            outcome=outcome,
            reason=reason,
            needs_bytes=needs_bytes(entry),
            ms_per_image=ms_per_image.get(entry.name),
        )

    return [judged(entry) for entry in candidates]


def to_measure(
    candidates: Sequence[ModelEntry], capacity: Capacity, ms_per_image: Mapping[str, float]
) -> ModelEntry | None:
    """The network whose speed decides next; None if the choice is certain."""
    judged = judge(candidates, capacity, ms_per_image)
    suitable = [each for each in judged if each.outcome in ("chosen", "fits")]
    if capacity.within_ms is None or len(suitable) < 2:
        return None
    unknown = {each.name for each in suitable if each.outcome == "chosen" and each.ms_per_image is None}
    return next((entry for entry in candidates if entry.name in unknown), None)


def _bound(entry: ModelEntry, capacity: Capacity, ms: float | None) -> tuple[Outcome, str]:
    needed = needs_bytes(entry)
    if capacity.free_bytes is not None and needed > capacity.free_bytes:
        return "too large", f"needs {_mb(needed)} MB of memory, {_mb(capacity.free_bytes)} MB are free"
    if capacity.within_ms is not None and ms is not None and ms > capacity.within_ms:
        return "too slow", f"takes {ms:.3g} ms per image, more than {capacity.within_ms:g} ms"
    return "fits", "the chosen one is better"


def _quality(candidates: Sequence[ModelEntry]) -> tuple[dict[str, float], str]:
    """A figure by which the networks compare, more is better, and its name."""
    coarse = len({entry.target for entry in candidates}) > 1  # accuracies of other classes do not compare
    accuracies = {entry.name: entry.coarse_accuracy if coarse else entry.accuracy for entry in candidates}
    known = {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
    if len(known) == len(accuracies):
        return known, "the most accurate one that fits"
    return {entry.name: float(entry.parameters) for entry in candidates}, "the largest one that fits"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f}"


def left_out(entries: Sequence[ModelEntry], candidates: Sequence[ModelEntry]) -> list[Suitability]:
    """The networks of a tier that are not among the candidates; see `Manifest.candidates`."""
    names, gpu = {entry.name for entry in candidates}, candidates[0].gpu
    return [
        Suitability(
            name=entry.name,
            tier=entry.tier,
            outcome="left out",
            reason=f"for nodes with{'' if entry.gpu else 'out'} a GPU"
            if entry.gpu != gpu
            else f"the thresholds of escalation are tuned for {candidates[0].name}",
            needs_bytes=needs_bytes(entry),
            ms_per_image=None,
        )
        for entry in entries
        if entry.tier == candidates[0].tier and entry.name not in names
    ]


def last_resort(judged: Sequence[Suitability]) -> Suitability:
    """The network to take if none suits: the quickest one that fits the memory, or else the one with the least need."""
    fitting = [each for each in judged if each.outcome != "too large"]
    if fitting:
        return min(fitting, key=lambda each: each.ms_per_image or 0.0)
    return min(judged, key=lambda each: each.needs_bytes)
