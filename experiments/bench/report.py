"""Levels of load as rows for programs, as cells for people, and with warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from experiments.bench.load import Closed, Level
from experiments.bench.summary import PERCENTILES

__all__ = ["as_cells", "as_row", "cautions", "error_text"]

_BUSY_GENERATOR = 0.85

Row = Mapping[str, str | float | int | bool | None]


def as_row(level: Level) -> Row:
    """One level as a flat row; None for a figure that does not exist."""
    facts = asdict(level.summary)
    latency_ms, first_ms, errors = facts.pop("latency_ms"), facts.pop("first_ms"), facts.pop("errors")
    load = level.load
    return {
        **({"concurrency": load.concurrency} if isinstance(load, Closed) else {"request_rate": load.rate_per_s}),
        **{f"{name}_ms": value for name, value in latency_ms.items()},
        **{f"first_{name}_ms": value for name, value in first_ms.items()},
        **facts,
        "errors": error_text(errors),
        "generator_cpu": level.generator_cpu,
        "interrupted": level.interrupted,
    }


def as_cells(rows: Sequence[Row], *, with_goodput: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table for people; columns without content are left out."""
    table = {heading: [form(row.get(name)) for row in rows] for heading, (name, form) in _COLUMNS.items()}
    if not with_goodput:
        del table["in time/s"]
    shown = {heading: cells for heading, cells in table.items() if not set(cells) <= _NOTHING}
    return list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)]


def error_text(errors: Mapping[str, int]) -> str:
    """{"503": 12, "timeout": 1} as "12 x 503, 1 x timeout"."""
    return ", ".join(f"{count} x {name}" for name, count in errors.items())


def cautions(levels: Sequence[Level]) -> Iterable[str]:
    """Reasons to read some of the figures with care, one sentence each."""
    for level in levels:
        summary, label = level.summary, level.load
        if level.interrupted:
            yield f"{label}: interrupted after {summary.window_s:.1f} s"
        if not summary.answered:
            yield f"{label}: no answer within the window: lengthen --measurement-interval, or see the errors"
        if summary.errors:
            yield f"{label}: not answered: {error_text(summary.errors)}"
        if level.generator_cpu > _BUSY_GENERATOR:
            yield (
                f"{label}: the load generator used {100 * level.generator_cpu:.0f} % of its core: "
                "the server may be faster than shown"
            )


def _ms(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _rate(value: Any) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _plainly(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else value or ""


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "clients": ("concurrency", _plainly),
    "requests/s": ("request_rate", _plainly),
    "images/s": ("images_per_s", _rate),
    "in time/s": ("goodput_images_per_s", _rate),
    "first p50": ("first_p50_ms", _ms),
    **{f"p{percent:g}": (f"p{percent:g}_ms", _ms) for percent in PERCENTILES},
    "send": ("send_ms", _ms),
    "fallback": ("fallbacks", _plainly),
    "not answered": ("errors", _plainly),
}
_NOTHING = {"", "-", "0", "0.00"}
