"""The latency-throughput plot: what a server gives, and what its clients wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.bench.levels import Closed, Level
from tierkit.errors import InvalidInput, MissingExtra

__all__ = ["check_plot", "plot_levels"]

_FORMATS = (".png", ".svg", ".pdf")
_MARGIN = 1.03


def check_plot(path: Path) -> None:
    """Find out before the measurement whether the plot can be drawn after it.

    Raises:
        InvalidInput: a file type that cannot be drawn.
        MissingExtra: matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise InvalidInput(f"the plot must be one of {', '.join(_FORMATS)}, not {path.name!r}")
    _figure_class()


def plot_levels(levels: Sequence[Level], path: Path, *, title: str) -> None:
    """Draw latency against throughput, one line for each percentile, the levels as numbers below the lowest line.

    Raises:
        InvalidInput: the file cannot be written, or nothing was answered.
        MissingExtra: matplotlib is not installed.
    """
    shown = [level for level in levels if level.summary.answered]
    if not shown:
        raise InvalidInput("nothing was answered, so there is nothing to plot")
    # The object interface: no global state, and no display needed.
    figure = _figure_class()(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    throughput = [level.summary.images_per_s for level in shown]
    names = [name for name in shown[0].summary.latency_ms if name != "mean"]
    for name, colour in reversed(list(zip(names, _colours(len(names)), strict=True))):
        latencies = [level.summary.latency_ms[name] for level in shown]
        axes.plot(throughput, latencies, marker="o", markersize=4, label=name, color=colour)
    lowest = names[0]
    for level, images_per_s in zip(shown, throughput, strict=True):
        load = f"{level.load.concurrency}" if isinstance(level.load, Closed) else f"{level.load.rate_per_s:g}"
        axes.annotate(
            load,
            (images_per_s, level.summary.latency_ms[lowest]),
            xytext=(0, -6),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            # Where a steep line passes behind it, the label stays readable.
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            zorder=3,
        )
    axes.set(xlabel="images per second", ylabel="latency (ms)", title=title)
    axes.set(xlim=(0, _MARGIN * axes.get_xlim()[1]), ylim=(0, _MARGIN * axes.get_ylim()[1]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(visible=True, alpha=0.3)
    closed = isinstance(shown[0].load, Closed)
    numbers = "requests under way" if closed else "requests due a second"
    axes.legend(frameon=False, title=f"numbers: {numbers}", title_fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except OSError as exc:
        raise InvalidInput(f"cannot write {path}: {exc.strerror}") from exc


def _colours(count: int) -> list[tuple[float, float, float, float]]:
    """So many different ones, from dark to light but not so light that they are lost on white."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * number / max(1, count - 1)) for number in range(count)]


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise MissingExtra("plots", "drawing a plot") from exc
    return Figure
