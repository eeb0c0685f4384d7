"""The look of plots: one style for all experiments, readable in grey and by colour-blind people. Needs the extra
`plots`.

Colours are from Okabe and Ito (Color Universal Design, 2008), each with another marker. Measurements are full lines
with filled markers. The paper's figures are dotted, bounds dashed with hollow markers, formulas dash-dotted, with
half-filled markers if there are several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from tierkit.atomic import write_atomically
from tierkit.errors import MissingExtra

__all__ = ["Figures", "averaged", "bound", "counted", "draw_ranges", "formula", "measured", "paper"]

_LOOKS = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)


_IN_A_ROW = 3
"""Most panels side by side: with more their titles would run into one another."""

_LETTER = 6
"""Pixels."""


def measured(number: int) -> dict[str, Any]:
    """Options of matplotlib's `plot` and `errorbar` for the `number`-th thing that was measured."""
    colour, marker = _LOOKS[number % len(_LOOKS)]
    return {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6, "linestyle": "-"}


def paper(number: int) -> dict[str, Any]:
    """The paper's figures for the same."""
    return {**measured(number), "linestyle": ":", "linewidth": 1.2, "markerfacecolor": "white"}


def bound(number: int | None = None) -> dict[str, Any]:
    """Style of a bound that cannot be beaten: the bound of one series, or of all."""
    return {**_thin(number, "#000000"), "markerfacecolor": "none", "linestyle": "--"}


def formula(number: int | None = None) -> dict[str, Any]:
    """Style of a formula's values: the values of one series, or of all."""
    return {**_thin(number, "#777777"), "fillstyle": "bottom", "markerfacecoloralt": "white", "linestyle": "-."}


def _thin(number: int | None, of_all: str) -> dict[str, Any]:
    if number is None:
        return {"color": of_all, "linewidth": 1.1}
    colour, marker = _LOOKS[number % len(_LOOKS)]
    return {"color": colour, "linewidth": 1.1, "marker": marker, "markersize": 6}


def draw_ranges(axes: Any, rows: Sequence[Mapping[str, Any]], fields: tuple[str, str, str, str], **looks: Any) -> None:
    """Points with their ranges, of the rows that have one.

    Args:
        fields: where the point lies, its figure, and the lowest and the highest figure.
        looks: options of `errorbar`.
    """
    done = [row for row in rows if row[fields[1]] is not None]
    places, middles, lows, highs = ([row[name] for row in done] for name in fields)
    # Rounded figures may lie a hair outside each other.
    below = [max(0.0, middle - low) for middle, low in zip(middles, lows, strict=True)]
    above = [max(0.0, high - middle) for middle, high in zip(middles, highs, strict=True)]
    axes.errorbar(places, middles, yerr=(below, above), **looks)


def counted(runs: Iterable[int]) -> str:
    """Number of runs behind the points of a plot, to be used in its title."""
    numbers = sorted(set(runs)) or [0]
    return "n = " + " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


def averaged(runs: Iterable[int]) -> str:
    """Number of runs behind the points of a plot of means; mentions mean and range if there were several runs."""
    numbers = list(runs)
    return counted(numbers) + (", mean and range" if max(numbers, default=0) > 1 else "")


class Figures:
    """The plots of one run; `save` writes each as PNG and SVG.

    Args:
        state: of its record; what is not complete says so above each plot.

    Raises:
        MissingExtra: matplotlib is not installed.
    """

    def __init__(self, state: str = "complete") -> None:
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError as exc:
            raise MissingExtra("plots", "drawing plots") from exc
        # The object interface: no global state, and no display needed.
        self._figure_class: Any = Figure
        self._rc_context: Any = rc_context
        self.by_name: dict[str, Any] = {}
        """Figures of matplotlib, by file name."""
        self._warning = "" if state == "complete" else f"{state} run"

    def panels(self, name: str, titles: Sequence[str], *, xlabel: str, ylabel: str, finding: str = "") -> list[Any]:
        """A plot of that file name with one panel per title, side by side in rows of three on one scale.

        Args:
            finding: The result in a few words, above the panels. Axes and titles give quantities, units and conditions.

        Returns:
            The axes of the panels.
        """
        width = (
            6.8 if len(titles) == 1 else 11.4
        )  # inches: as wide as a page of text, so that the letters stay as large
        rows, columns = math.ceil(len(titles) / _IN_A_ROW), min(len(titles), _IN_A_ROW)
        figure = self._figure_class(figsize=(width, 4.6 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        panels = list(grid.flat)[: len(titles)]
        for spare in list(grid.flat)[len(titles) :]:
            spare.remove()
        for axes, title in zip(panels, titles, strict=True):
            axes.set(title=title, xlabel=xlabel)
            axes.grid(visible=True, alpha=0.3)
        for first in grid[:, 0]:
            first.set_ylabel(ylabel)
        if self._warning:
            figure.suptitle(self._warning, color="#b00000")
        elif finding:
            figure.suptitle(finding, fontweight="bold")
        self.by_name[name] = figure
        return panels

    def legend(self, name: str, columns: int) -> None:
        """One legend below all panels of a plot."""
        figure = self.by_name[name]
        handles = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.set_figheight(figure.get_figheight() + 0.25 * math.ceil(len(handles) / columns))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)

    def shown(self) -> dict[str, str]:
        """Descriptions of all plots in words, by file name. They serve readers who cannot see the plots."""
        return {name: _words(figure) for name, figure in self.by_name.items()}

    def render(self, suffix: str) -> dict[str, bytes]:
        """The plots as files of a kind, `png` or `svg`, by their file names without its ending."""
        files = {}
        # Without the date and with names that are not random, the same record gives the same file.
        with self._rc_context({"svg.hashsalt": "terrace"}):
            for name, figure in self.by_name.items():
                for text in figure.findobj(lambda artist: hasattr(artist, "set_parse_math")):
                    text.set_parse_math(False)  # a dollar sign in a name is one
                _write_plainly(figure)
                _thin_out(figure)
                file = BytesIO()
                described = {"Date": None, "Title": figure.get_suptitle() or name, "Description": _words(figure)}
                figure.savefig(file, format=suffix, dpi=150, metadata=described if suffix == "svg" else None)
                files[name] = file.getvalue()
        return files

    def save(self, folder: Path) -> list[Path]:
        """Write them, and return the files."""
        paths = []
        for suffix in ("png", "svg"):
            for name, content in self.render(suffix).items():
                path = folder / f"{name}.{suffix}"
                write_atomically(path, content)
                paths.append(path)
        return paths


def _write_plainly(figure: Any) -> None:
    """Numbers on logarithmic axes as plain text: matplotlib would write them in the mathematics that is off here."""
    from matplotlib.ticker import LogFormatter, LogFormatterMathtext

    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
            axis.set_major_formatter(LogFormatter())
        if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
            axis.set_minor_formatter(LogFormatter())


def _thin_out(figure: Any) -> None:
    """Keep only every second, third, ... number below each panel if they would overlap."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        labels = [label for label in axes.get_xticklabels() if label.get_text()]
        boxes = [label.get_window_extent() for label in labels]
        step = next(step for step in range(1, len(boxes) + 2) if not _overlap(boxes[::step]))
        for number, label in enumerate(labels):
            label.set_visible(number % step == 0)


def _overlap(boxes: Sequence[Any]) -> bool:
    """True if labels, from left to right, have less than a letter's width between two of them."""
    return any(right.x0 - left.x1 < _LETTER for left, right in itertools.pairwise(boxes))


def _words(figure: Any) -> str:
    panels = figure.axes
    first = panels[0]
    labels = dict.fromkeys(label for axes in panels for label in axes.get_legend_handles_labels()[1])
    against = " and ".join(dict.fromkeys(axes.get_xlabel() for axes in panels))
    lines = f": {'; '.join(labels)}" if labels else ""
    drawn = f"{first.get_ylabel()} against {against}{lines} ({' | '.join(axes.get_title() for axes in panels)})"
    return f"{title}. {drawn[0].upper()}{drawn[1:]}" if (title := figure.get_suptitle()) else drawn
