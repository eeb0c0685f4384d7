"""Progress of a job: figures that each result adds to. Pure; rebuilt from the results table after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.core.escalation import asks, final_answers, without
from scheduler.core.job import Answer
from tierkit.types import Tier
from tierkit.wire.events import (
    CoarseEvent,
    ErrorEvent,
    FallbackEvent,
    FineEvent,
    RoutedEvent,
    Sent,
    StageAnswer,
    TaskEvent,
)

__all__ = ["Progress", "labels_of", "sent_of"]

_RANGES_SHOWN = 20
_MOST_SHOWN = 1000
"""Damaged images that a job lists."""
_TIERS = list(Tier)
_END = _TIERS.index(Tier.END)


def sent_of(event: TaskEvent) -> list[Sent]:
    """The bytes sent to upstream nodes for the answers of an event, by form, as far as devices report them."""
    match event:
        case FineEvent():
            answers: tuple[FineEvent | StageAnswer, ...] = (event,)
        case RoutedEvent():
            answers = event.answers
        case _:
            answers = ()
    return [answer.sent for answer in answers if answer.sent is not None]


def labels_of(event: TaskEvent, readable: NDArray[np.int64]) -> list[tuple[Tier, NDArray[np.int32], bool]]:
    """Labels in an answer: the tier, int32 `[n]`, and True for classes, False for superclasses.

    Args:
        readable: positions in the task of the images that can be read.
    """
    match event:
        case CoarseEvent():
            return [(Tier.END, np.array(event.labels, np.int32)[readable], False)]
        case FineEvent():
            return [(event.tier, np.array(event.labels, np.int32)[readable], True)]
        case RoutedEvent():
            return [(part.tier, np.array(part.labels, np.int32), True) for part in event.answers]
    return []


class Progress:
    """Counts, accuracies and latencies of one job.

    Args:
        labels: true fine class per image, -1 for unknown; None without labels.
        parents: coarse class of each fine class.
        damaged: what is wrong with the images that could not be read when they came.
        mended: number of images that are answered from the part that can be decoded.

    An accuracy is the share of right answers among the answered images with a known class; None when there is none.
    """

    def __init__(
        self,
        labels: NDArray[np.int32] | None,
        parents: NDArray[np.int32],
        damaged: Mapping[int, str] | None = None,
        *,
        mended: int = 0,
    ) -> None:
        self._mended = mended
        self.damaged = dict(damaged or {})
        """Damage of the images that cannot be read, by number; they have no answers."""
        self._labels = labels
        self._parents = parents
        self.answered_coarse = 0
        self.answered_fine = 0
        self.fallback = 0
        self.failed_images = 0
        self.late_images = 0
        """Images that keep the coarse (or lower tier's) answer because the time for a finer one was over."""
        self._quarantined: list[tuple[int, int]] = []
        """First image and number of images of each task that is given to no node any more."""
        self._sent_up: dict[str, int] = {}
        self._final_tier = dict.fromkeys(Tier, 0)
        self._coarse_labels: dict[int, tuple[int, ...]] = {}
        """Coarse answers of tasks without a final answer, by first image."""
        self._by_node: dict[str, dict[str, Any]] = {}
        self._sent: dict[str, dict[str, float]] = {}
        self._theta_cloud = 0.0
        """Sum of the cloud's planned shares of the images whose planned share is known."""
        self._shared = dict.fromkeys(Tier, 0)
        """These images, by the tier that answered."""
        self._latencies: dict[str, list[tuple[float, int]]] = {"coarse": [], "fine": []}
        self._right = {"coarse": 0, "fine": 0, "coarse_from_fine": 0, "final_coarse": 0}
        self._known = {"coarse": 0, "fine": 0, "final_coarse": 0}

    def add(self, answer: Answer) -> None:
        """Count one durable answer."""
        event, first_image = answer.event, answer.first_image
        if isinstance(event, CoarseEvent):
            found = {first_image + item.index: item.reason for item in event.damaged}
            self.damaged = found | self.damaged
        at = self.readable(answer)
        images = len(at)
        if isinstance(event, CoarseEvent):
            self._latencies["coarse"].append((answer.ms, images))
            self._coarse_labels[first_image] = event.labels
            self._count_coarse(event, first_image, at)
            return
        for sent in sent_of(event):
            nothing = {"tasks": 0, "upload_bytes": 0, "relay_tasks": 0, "relay_bytes": 0, "encode_ms": 0.0}
            form = self._sent.setdefault(sent.form, nothing)
            form["tasks"] += 1
            form["relay_tasks"] += sent.relay_bytes > 0
            form["upload_bytes"] += sent.upload_bytes
            form["relay_bytes"] += sent.relay_bytes
            form["encode_ms"] = round(form["encode_ms"] + sent.encode_ms, 3)
        if isinstance(event, FineEvent) and answer.theta_cloud is not None:
            self._theta_cloud += answer.theta_cloud * images
            self._shared[event.tier] += images
        if _is_quarantine(event):
            self._quarantined.append((first_image, answer.images))
        standing = np.array(self._coarse_labels.pop(first_image, ()), np.int32)
        tiers = np.full(answer.images, _END)
        if isinstance(event, FineEvent | RoutedEvent):
            self._add_finer(event, tiers, standing, at, ms=answer.ms, first_image=first_image)
        elif answer.kind == "fallback":
            self.fallback += images
            self.late_images += images * (isinstance(event, FallbackEvent) and event.reason == "deadline")
        else:
            self.failed_images += images
            return
        for tier, of_it in zip(Tier, np.bincount(tiers[at], minlength=len(Tier)).tolist(), strict=True):
            self._final_tier[tier] += of_it
        if len(standing):
            self._compare("final_coarse", standing[at], first_image, at, coarse=True)

    def take_back(self, answer: Answer) -> None:
        """Count a coarse answer no more, which was withdrawn."""
        assert isinstance(answer.event, CoarseEvent)
        at = self.readable(answer)
        self._latencies["coarse"].remove((answer.ms, len(at)))
        del self._coarse_labels[answer.first_image]
        self._count_coarse(answer.event, answer.first_image, at, times=-1)

    def readable(self, answer: Answer) -> NDArray[np.int64]:
        """Positions in the task of the images that can be read."""
        first, at = answer.first_image, np.arange(answer.images)
        if not self.damaged:
            return at
        return at[[first + place not in self.damaged for place in range(answer.images)]]

    def _count_coarse(self, event: CoarseEvent, first_image: int, at: NDArray[np.int64], *, times: int = 1) -> None:
        self.answered_coarse += times * len(at)
        self._count(event.node_id, Tier.END, "coarse_images", times * len(at))
        labels = np.array(event.labels, np.int32)
        self._compare("coarse", labels[at], first_image, at, coarse=True, times=times)

    def _add_finer(
        self,
        event: FineEvent | RoutedEvent,
        tiers: NDArray[np.int64],
        standing: NDArray[np.int32],
        readable: NDArray[np.int64],
        *,
        ms: float,
        first_image: int,
    ) -> None:
        """Count the answers from upstream nodes that stand; notes in `tiers` and `standing` whose they are."""
        answers: list[tuple[FineEvent | StageAnswer, NDArray[np.int64], NDArray[np.int64]]]
        if isinstance(event, FineEvent):
            answers = [(event, readable, readable)]
        else:
            answers = list(final_answers(event))
            lost = [loss for place, loss in without(event).items() if place in readable]
            self.fallback += len(lost)
            self.late_images += sum(loss.reason == "deadline" for loss in lost)
            for tier, sent in asks(event).items():
                self._sent_up[tier] = self._sent_up.get(tier, 0) + sent
        for answer, at, places in answers:
            if len(readable) < len(tiers):
                kept = np.isin(at, readable)
                at, places = at[kept], places[kept]
            self.answered_fine += len(at)
            self._count(answer.node_id, answer.tier, "fine_images", len(at))
            self._latencies["fine"].append((ms, len(at)))
            fine, coarse = np.array(answer.labels, np.int32)[places], np.array(answer.coarse_labels, np.int32)[places]
            self._compare("fine", fine, first_image, at, coarse=False)
            self._compare("coarse_from_fine", coarse, first_image, at, coarse=True)
            tiers[at] = _TIERS.index(answer.tier)
            if len(standing):
                standing[at] = coarse

    def quarantined_ranges(self) -> str:
        """Ranges of quarantined images, such as "50-99, 200-249"; "" for none."""
        shown = [f"{first}-{first + images - 1}" for first, images in sorted(self._quarantined)]
        more = len(shown) - _RANGES_SHOWN
        return ", ".join(shown[:_RANGES_SHOWN]) + (f" and {more} more" if more > 0 else "")

    def summary(self) -> dict[str, Any]:
        """The figures by their names in the job API."""
        shared = sum(self._shared.values())
        return {
            "answered_coarse": self.answered_coarse,
            "answered_fine": self.answered_fine,
            "fallback": self.fallback,
            "failed_images": self.failed_images + len(self.damaged),
            "damaged_images": len(self.damaged),
            "damaged_answered": self._mended,
            "damaged": [
                {"index": image, "reason": self.damaged[image]} for image in sorted(self.damaged)[:_MOST_SHOWN]
            ],
            "quarantined_images": sum(images for _, images in self._quarantined),
            "coarse_accuracy": _share(self._right["coarse"], self._known["coarse"]),
            "fine_accuracy": _share(self._right["fine"], self._known["fine"]),
            "coarse_from_fine_accuracy": _share(self._right["coarse_from_fine"], self._known["fine"]),
            "sent_up": dict(self._sent_up),
            "theta_cloud": _share(round(self._theta_cloud, 6), shared),
            "cloud_share": _share(self._shared[Tier.CLOUD], shared),
            "final_tier": {str(tier): images for tier, images in self._final_tier.items() if images},
            "final_coarse_accuracy": _share(self._right["final_coarse"], self._known["final_coarse"]),
            **_percentiles(self._latencies),
            "sent": {form: dict(figures) for form, figures in sorted(self._sent.items())},
            "by_node": {node: dict(share) for node, share in sorted(self._by_node.items())},
        }

    def _count(self, node_id: str, tier: Tier, what: str, images: int) -> None:
        share = self._by_node.setdefault(node_id, {"tier": str(tier), "coarse_images": 0, "fine_images": 0})
        share[what] += images

    def _compare(
        self,
        what: str,
        answers: NDArray[np.int32],
        first_image: int,
        at: NDArray[np.int64],
        *,
        coarse: bool,
        times: int = 1,
    ) -> None:
        """`at`: positions in the task of the images that the answers are to."""
        if self._labels is None:
            return
        truth = self._labels[first_image + at]
        known = truth >= 0
        wanted = self._parents[truth] if coarse else truth
        self._right[what] += times * int(np.count_nonzero(known & (wanted == answers)))
        if what in self._known:
            self._known[what] += times * int(np.count_nonzero(known))


def _is_quarantine(event: TaskEvent) -> bool:
    match event:
        case FallbackEvent():
            return event.reason == "quarantined"
        case ErrorEvent():
            return event.error.startswith("quarantined:")
    return False


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def _percentiles(latencies: Mapping[str, list[tuple[float, int]]]) -> dict[str, float | None]:
    """Each image counts with the latency of its task: the smallest latency that at least p % of the images kept."""
    figures: dict[str, float | None] = {}
    for stage, samples in latencies.items():
        per_image = np.repeat([ms for ms, _ in samples], [images for _, images in samples])
        for p in (50, 99):
            value = float(np.percentile(per_image, p, method="inverted_cdf")) if per_image.size else None
            figures[f"{stage}_p{p}_ms"] = None if value is None else round(value, 3)
    return figures
