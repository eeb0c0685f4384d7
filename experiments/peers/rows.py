"""The rows of the table, and what one contender's run over them gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from experiments.record import spread

__all__ = ["Measurement", "Network", "Row", "RowFigures", "Timing", "derive", "rows_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network of the comparison, and where its file lies."""

    name: str
    folder: str
    file: str
    sha256: str
    shape: tuple[int, int, int]
    """Height, width, colours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of load."""

    batch: int
    concurrency: int

    @property
    def key(self) -> str:
        return f"batch-{self.batch}-concurrency-{self.concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things are measured."""

    rounds: int = 3
    window_s: float = 3.0
    warmup_s: float = 0.5
    bare_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFigures:
    """One row, once; the bare loop is the mean of the one before and the one after."""

    images_per_s: float
    bare_images_per_s: float
    p50_ms: float
    p99_ms: float
    bare_batch_ms: float
    compute_ms: float | None
    """In the model, for the batch that a request was part of, as the server says itself; None where it does not."""
    batch_images: float | None
    cpu_us_per_image: float
    """CPU time of all of the server's processes. What else the machine does changes it little."""
    generator_cpu: float


@dataclass(kw_only=True)
class Measurement:
    """One start of one contender with one network."""

    cold_start_s: float
    """From the start of its process to its first right answer."""
    peak_memory_bytes: int = 0
    rows: dict[str, RowFigures] = field(default_factory=dict)
    """By `Row.key`."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why a row has no figures, by `Row.key`."""


BIG_BATCHES = (Row(batch=50, concurrency=4), Row(batch=50, concurrency=1))
SINGLE_IMAGES = (Row(batch=1, concurrency=64), Row(batch=1, concurrency=1))


def rows_for(*, everything: bool) -> tuple[Row, ...]:
    """All rows, or those that show the overhead on a large network."""
    return (*BIG_BATCHES, *SINGLE_IMAGES) if everything else BIG_BATCHES


def derive(measurements: Sequence[Measurement]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Samples by name, one entry for each measurement that has the figure, and the medians of what is compared.

    A ratio is taken within each measurement, then the median of the ratios: the machine's speed drifts meanwhile.
    """
    samples: dict[str, list[float]] = {
        "cold_start_s": [one.cold_start_s for one in measurements],
        "peak_memory_bytes": [float(one.peak_memory_bytes) for one in measurements],
    }
    for key in dict.fromkeys(key for one in measurements for key in one.rows):
        figures = [one.rows[key] for one in measurements if key in one.rows]
        columns: Mapping[str, list[float | None]] = {
            "images_per_s": [row.images_per_s for row in figures],
            "bare_images_per_s": [row.bare_images_per_s for row in figures],
            "ratio_to_bare": [row.images_per_s / row.bare_images_per_s for row in figures],
            "p50_ms": [row.p50_ms for row in figures],
            "p99_ms": [row.p99_ms for row in figures],
            "bare_batch_ms": [row.bare_batch_ms for row in figures],
            "p50_above_bare_ms": [row.p50_ms - row.bare_batch_ms for row in figures],
            "compute_ms": [row.compute_ms for row in figures],
            "batch_images": [row.batch_images for row in figures],
            "cpu_us_per_image": [row.cpu_us_per_image for row in figures],
            "generator_cpu": [row.generator_cpu for row in figures],
        }
        for name, values in columns.items():
            known = [value for value in values if value is not None]
            if known:
                samples[f"{key}.{name}"] = known
    return samples, {name: spread(values).median for name, values in samples.items() if values}
