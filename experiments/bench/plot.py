"""The latency-throughput plot: what a server gives, and what its clients wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.bench.levels import Closed, Level
from experiments.plots import Figures, measured
from models.atomic import write_atomically
from tierkit.errors import InvalidInput

__all__ = ["check_plot", "plot_levels"]

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Find out before the measurement whether the plot can be drawn after it.

    Raises:
        InvalidInput: a file type that cannot be drawn.
        MissingExtra: matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise InvalidInput(f"the plot must be one of {', '.join(_FORMATS)}, not {path.name!r}")
    Figures()


def plot_levels(levels: Sequence[Level], path: Path, *, title: str) -> None:
    """Draw latency against throughput, one line for each percentile, the levels as numbers below the lowest line.

    Args:
        levels: at least one has answers.

    Raises:
        SetupError: the file cannot be written.
    """
    shown = [level for level in levels if level.summary.answered]
    figures = Figures()
    (axes,) = figures.panels("levels", [title], xlabel="images per second", ylabel="latency (ms)")
    throughput = [level.summary.images_per_s for level in shown]
    lowest, *others = (name for name in shown[0].summary.latency_ms if name != "mean")
    for number, name in enumerate((lowest, *others)):
        axes.plot(throughput, [level.summary.latency_ms[name] for level in shown], label=name, **measured(number))
    for level, images_per_s in zip(shown, throughput, strict=True):
        place = (images_per_s, level.summary.latency_ms[lowest])
        below = {"xytext": (0, -6), "textcoords": "offset points", "ha": "center", "va": "top"}
        axes.annotate(f"{level.load.number:g}", place, fontsize=8, **below)
    axes.set(xlim=(0, None), ylim=(0, None))
    numbers = "requests under way" if isinstance(shown[0].load, Closed) else "requests due a second"
    axes.legend(frameon=False, title=f"numbers: {numbers}", title_fontsize=8)
    write_atomically(path, figures.render(path.suffix.lower().removeprefix("."))["levels"])
