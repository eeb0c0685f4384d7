"""Where a job stands: figures that each result adds to. Pure; built from the results table again after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkit.protocol import CoarseEvent, ErrorEvent, FallbackEvent, FineEvent, TaskEvent
from tierkit.types import Tier

__all__ = ["Progress"]

_RANGES_SHOWN = 20


class Progress:
    """Counts, accuracies and latencies of one job.

    Args:
        labels: true fine class per image, -1 for unknown; None without labels.
        parents: coarse class of each fine class.

    An accuracy is the share of right answers among the answered images with a known class; None when there is none.
    """

    def __init__(self, labels: NDArray[np.int32] | None, parents: NDArray[np.int32]) -> None:
        self._labels = labels
        self._parents = parents
        self.answered_coarse = 0
        self.answered_fine = 0
        self.fallback = 0
        self.failed_images = 0
        self._quarantined: list[tuple[int, int]] = []
        """First image and number of images of each task that is given to no node any more."""
        self._by_node: dict[str, dict[str, Any]] = {}
        self._latencies: dict[str, list[tuple[float, int]]] = {"coarse": [], "fine": []}
        self._right = {"coarse": 0, "fine": 0, "coarse_from_fine": 0}
        self._known = {"coarse": 0, "fine": 0}

    def add(self, event: TaskEvent, *, kind: str, ms: float, first_image: int, images: int) -> None:
        """Count one durable result."""
        if isinstance(event, CoarseEvent):
            self.answered_coarse += images
            self._count(event.node_id, Tier.END, "coarse_images", images)
            self._latencies["coarse"].append((ms, images))
            self._compare("coarse", event.labels, first_image, coarse=True)
        elif isinstance(event, FineEvent):
            self.answered_fine += images
            self._count(event.node_id, event.tier, "fine_images", images)
            self._latencies["fine"].append((ms, images))
            self._compare("fine", event.labels, first_image, coarse=False)
            self._compare("coarse_from_fine", event.coarse_labels, first_image, coarse=True)
        elif kind == "fallback":
            self.fallback += images
        else:
            self.failed_images += images
        if _is_quarantine(event):
            self._quarantined.append((first_image, images))

    def quarantined_ranges(self) -> str:
        """Which images are quarantined, such as "50-99, 200-249"; "" for none."""
        shown = [f"{first}-{first + images - 1}" for first, images in sorted(self._quarantined)]
        more = len(shown) - _RANGES_SHOWN
        return ", ".join(shown[:_RANGES_SHOWN]) + (f" and {more} more" if more > 0 else "")

    def summary(self) -> dict[str, Any]:
        """The figures by their names in the job API."""
        return {
            "answered_coarse": self.answered_coarse,
            "answered_fine": self.answered_fine,
            "fallback": self.fallback,
            "failed_images": self.failed_images,
            "quarantined_images": sum(images for _, images in self._quarantined),
            "coarse_accuracy": _share(self._right["coarse"], self._known["coarse"]),
            "fine_accuracy": _share(self._right["fine"], self._known["fine"]),
            "coarse_from_fine_accuracy": _share(self._right["coarse_from_fine"], self._known["fine"]),
            **_percentiles(self._latencies),
            "by_node": {node: dict(share) for node, share in sorted(self._by_node.items())},
        }

    def _count(self, node_id: str, tier: Tier, what: str, images: int) -> None:
        share = self._by_node.setdefault(node_id, {"tier": str(tier), "coarse_images": 0, "fine_images": 0})
        share[what] += images

    def _compare(self, what: str, answers: tuple[int, ...], first_image: int, *, coarse: bool) -> None:
        if self._labels is None:
            return
        truth = self._labels[first_image : first_image + len(answers)]
        known = truth >= 0
        wanted = self._parents[truth] if coarse else truth
        self._right[what] += int(np.count_nonzero(known & (wanted == np.asarray(answers, np.int32))))
        if what in self._known:
            self._known[what] += int(np.count_nonzero(known))


def _is_quarantine(event: TaskEvent) -> bool:
    match event:
        case FallbackEvent():
            return event.reason == "quarantined"
        case ErrorEvent():
            return event.error.startswith("quarantined:")
    return False


def _share(part: int, whole: int) -> float | None:
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
