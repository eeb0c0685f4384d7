"""Observations as people see them: with the names of classes. Pure.

An observation is a plain dict with the fields of `tierkit.wire.sources.SeenPicture`: a source has up to millions.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from models.hierarchy import Hierarchy
from scheduler.core.observing import StoredObservation
from tierkit.types import Tier

__all__ = ["gap_line", "observation_line"]


def observation_line(node_id: str, stored: StoredObservation, classes: Hierarchy) -> dict[str, Any]:
    """An observation.

    Args:
        classes: that its labels number.
    """
    seen = stored.content
    coarse: dict[str, Any] | None = None
    fine: dict[str, Any] | None = None
    if (local := seen.local) is not None:
        coarse = {"index": local.label, "label": _name(classes.coarse, local.label), "node": node_id}
        coarse |= {"confidence": local.confidence, "model": local.model, "sha256": local.sha256}
    if (finer := seen.finer) is not None:
        fine = msgspec.to_builtins(finer)
        fine |= {"index": fine.pop("label"), "label": _name(classes.fine, finer.label), "node": fine.pop("node_id")}
        fine |= {"coarse_index": finer.coarse_label, "coarse_label": _name(classes.coarse, finer.coarse_label)}
        fine["sent"] = fine.get("sent")
    answer = fine or coarse or {}
    return {
        "node": node_id,
        "source": seen.source,
        "sequence": seen.sequence,
        "revision": seen.revision,
        "taken_at": datetime.fromtimestamp(stored.taken_at, UTC).isoformat(timespec="milliseconds"),
        "name": seen.name or None,
        "label": answer.get("label"),
        "confidence": answer.get("confidence"),
        "answered_by": None if not answer else Tier.END if finer is None else finer.tier,
        "coarse": coarse,
        "fine": fine,
        "unsure": seen.unsure,
        "waits": seen.waits,
        "reason": seen.reason,
        "picture": stored.has_picture,
    }


def gap_line(node_id: str, source: str, first: int, last: int) -> dict[str, Any]:
    """Numbers of a source whose observations are lost."""
    return {"gap": {"node": node_id, "source": source, "first": first, "last": last}}


def _name(names: tuple[str, ...], label: int) -> str:
    # The class of another model set, whose names are not known here.
    return names[label] if label < len(names) else str(label)
