"""What was measured, as rows, CSV, JSON values and warnings. Units are the suffixes of the columns' names."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.bench.levels import Closed, Level, Open
from experiments.bench.server_stats import ServerTimes
from experiments.bench.summary import PERCENTILES, SLICES
from experiments.bench.targets import Target
from experiments.record import host_facts
from tierkit.errors import InvalidInput

__all__ = ["as_cells", "as_row", "cautions", "check_folder", "document", "write_csv"]

_BUSY_GENERATOR = 0.85
_UNSTEADY = 0.25
_CHANCE = 4.0
"""So many standard errors are no chance any more."""

Row = Mapping[str, str | float | int | bool | None]


def as_row(level: Level, *, streams: bool = False) -> Row:
    """One level as a flat row; None where a figure does not exist.

    `send_ms`, `network_ms`, `queue_ms` and the three `compute_*_ms` are means that add up to `mean_ms`: the wait in
    the load generator, everything between it and the model's queue, and what the server says of itself.
    """
    facts = asdict(level.summary)
    latency_ms, first_ms, errors = facts.pop("latency_ms"), facts.pop("first_ms"), facts.pop("errors")
    server = asdict(level.server) if level.server else {field.name: None for field in fields(ServerTimes)}
    return {
        "concurrency" if isinstance(level.load, Closed) else "request_rate": level.load.number,
        **{f"{name}_ms": value for name, value in latency_ms.items()},
        **({f"first_{name}_ms": value for name, value in first_ms.items()} if streams else {}),
        **facts,
        "network_ms": _network_ms(level),
        **server,
        "compute_ms": level.server.total_ms - level.server.queue_ms if level.server else None,
        "errors": error_text(errors),
        "generator_cpu": level.generator_cpu,
        "interrupted": level.interrupted,
    }


def as_cells(rows: Sequence[Row], *, with_goodput: bool = False) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table for people, from those of `as_row`: columns that hold nothing are left out."""
    table = {heading: [form(row.get(name)) for row in rows] for heading, (name, form) in _COLUMNS.items()}
    if not with_goodput:
        del table["in time/s"]
    shown = {heading: cells for heading, cells in table.items() if not set(cells) <= _NOTHING}
    return list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)]


def error_text(errors: Mapping[str, int]) -> str:
    """{"503": 12, "timeout": 1} as "12 x 503, 1 x timeout"."""
    return ", ".join(f"{count} x {name}" for name, count in errors.items())


def check_folder(path: Path) -> None:
    """Find out before the measurement whether a file can be there after it.

    Raises:
        InvalidInput: there is no such folder.
    """
    if not path.parent.is_dir():
        raise InvalidInput(f"cannot write {path}: there is no folder {path.parent}")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows that all have the same columns.

    Raises:
        InvalidInput: the file cannot be written.
    """
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    except OSError as exc:
        raise InvalidInput(f"cannot write {path}: {exc.strerror}") from exc


def document(target: Target, levels: Sequence[Level]) -> dict[str, Any]:
    """All of it for programs, with the machine that the load came from."""
    return {
        "target": target.name,
        "images_per_request": target.images,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_generator": host_facts(),
        "levels": [as_row(level, streams=target.streams) for level in levels],
        "cautions": list(cautions(levels)),
    }


def cautions(levels: Sequence[Level]) -> Iterable[str]:
    """Why some of the figures should be read with care; one sentence each."""
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
        if summary.unsteady is not None and summary.unsteady > max(_UNSTEADY, _CHANCE * _standard_error(level)):
            yield (
                f"{label}: the throughput of a fifth of the window was {100 * summary.unsteady:.0f} % off the rest: "
                "lengthen --measurement-interval, or see what else runs"
            )


def _standard_error(level: Level) -> float:
    """Of the answers in a fifth of the window, as a share, where they come by chance: a Poisson count's."""
    answers = level.summary.requests_per_s * level.summary.window_s / SLICES
    poisson = isinstance(level.load, Open) and level.load.distribution == "poisson"
    return 1 / math.sqrt(answers) if poisson and answers else 0.0


def _network_ms(level: Level) -> float | None:
    mean_ms, send_ms = level.summary.latency_ms["mean"], level.summary.send_ms
    if level.server is None or mean_ms is None or send_ms is None:
        return None
    # The server counts over a slightly different interval, so the rest can come out below nothing.
    return max(0.0, mean_ms - send_ms - level.server.total_ms)


def _plain(value: str | float | int | bool | None) -> str | float | int | bool:
    if value is None:
        return ""
    return round(value, 4) if isinstance(value, float) else value


def _ms(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _rate(value: Any) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.1f}"


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
    "network": ("network_ms", _ms),
    "queue": ("queue_ms", _ms),
    "compute": ("compute_ms", _ms),
    "batch": ("batch_images", _number),
    "fallback": ("fallbacks", _plainly),
    "not answered": ("errors", _plainly),
}
_NOTHING = {"", "-", "0", "0.00"}
