"""Curves of a run: loss, held-out accuracy, bytes and staleness over updates and seconds, as a bounded list."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from tierkit.atomic import write_atomically
from tierkit.documents import Frozen

__all__ = ["CURVES", "MOST_POINTS", "MeasuredPoint", "draw", "extended", "read_curve", "write_curve"]

CURVES = "curves.json"
MOST_POINTS = 500

_Share = Annotated[float, Field(ge=0, le=1)]


class MeasuredPoint(Frozen):
    """One measurement of a run."""

    seconds: float
    """Since the first unit of work."""
    done: int
    """Steps."""
    updates: int
    loss: float | None
    """Mean of the last 100 updates."""
    accuracy: _Share
    """On the held-out images."""
    bytes_sent: int
    bytes_received: int
    staleness: float
    """Mean over all updates so far."""


_POINTS = TypeAdapter(list[MeasuredPoint])


def extended(curve: Sequence[MeasuredPoint], point: MeasuredPoint) -> list[MeasuredPoint]:
    """Return the curve with one more point. A curve with too many loses every other point, but not its ends."""
    longer = [*curve, point]
    return longer if len(longer) <= MOST_POINTS else [*longer[:-1:2], point]


def read_curve(folder: Path) -> list[MeasuredPoint]:
    """Return the curve that a run folder keeps; an empty one if the file is missing or damaged."""
    try:
        return _POINTS.validate_json((folder / CURVES).read_bytes())[:MOST_POINTS]
    except (OSError, ValidationError):
        return []


def write_curve(folder: Path, curve: Sequence[MeasuredPoint]) -> None:
    """Write `curves.json`.

    Raises:
        SetupError: it could not be written.
    """
    rows = [point.model_dump() for point in curve]
    write_atomically(folder / CURVES, (json.dumps(rows, indent=1) + "\n").encode())


def draw(folder: Path, curve: Sequence[MeasuredPoint], title: str) -> None:
    """Write `curves.png` if matplotlib (extra `plots`) is installed.

    Raises:
        SetupError: it could not be written.
    """
    if not curve or find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.2), layout="constrained")
    figure.suptitle(title)
    panels: tuple[tuple[str, Sequence[float | None]], ...] = (
        ("held-out accuracy", [point.accuracy for point in curve]),
        ("training loss", [point.loss for point in curve]),
        ("MB sent by workers", [point.bytes_sent / 1e6 for point in curve]),
        ("mean staleness", [point.staleness for point in curve]),
    )
    rows: Any = figure.subplots(2, 4)
    for row, (over, along) in zip(
        rows,
        (("updates", [point.updates for point in curve]), ("seconds", [point.seconds for point in curve])),
        strict=True,
    ):
        for axes, (label, values) in zip(row, panels, strict=True):
            axes.plot(along, [float("nan") if value is None else value for value in values], color="tab:blue")
            axes.set(xlabel=over, title=label)
            axes.title.set_fontsize(10)
            axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    write_atomically(folder / "curves.png", picture.getvalue())
