"""How things look in the terminal: one place for colours, numbers and tables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tierkit.plaintext import harmless, one_line
from tierkit.types import Health, Tier

__all__ = [
    "TIER_STYLES",
    "Column",
    "Listing",
    "health_text",
    "image_count",
    "milliseconds",
    "node_order",
    "percent",
    "plain_table",
    "print_json",
    "progress_bars",
    "screen",
    "tier_text",
]

TIER_STYLES: dict[str, str] = {
    "scheduler": "bold",
    Tier.END: "cyan",
    Tier.EDGE: "green",
    Tier.CLOUD: "magenta",
}

_UNBOUNDED_WIDTH = 10_000

_HEALTH_STYLES = {Health.ALIVE: "green", Health.SUSPECT: "yellow", Health.DEAD: "red", Health.DRAINING: "yellow"}


class _Screen(Console):
    """Nothing that it is given to print can command the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def screen(*, stderr: bool = False) -> Console:
    """The terminal: standard output for results, standard error for what goes on meanwhile.

    Into a file or a pipe lines are as long as they are, unless `COLUMNS` says how wide the reader is.
    """
    console = _Screen(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNBOUNDED_WIDTH
    return console


def print_json(value: Any) -> None:
    """One JSON document on standard output, as a program reads it."""
    sys.stdout.write(harmless(to_json(value, indent=2).decode()) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a `Listing`."""

    title: str
    rank: int = 0
    """Where the width does not suffice, the columns of the highest rank go first; those of rank 0 stay."""
    right: bool = False
    """Numbers stand at the right."""
    min_width: int | None = None
    max_width: int | None = None
    """Longer texts end in an ellipsis, unless the width is unbounded."""
    least: int | None = None
    """The column takes what the others leave, and so much at least; what is longer goes on below, for it is no id but
    prose. One such column per listing."""


class Listing:
    """A plain table with one line per row in any width.

    Nothing in it but a column of prose (`Column.least`) is ever wrapped, so that ids can be copied: a terminal too
    narrow for all columns gets fewer of them, and one too narrow for the last of them wraps the lines by itself.
    """

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """One cell per column."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, width = self._fitted(console, options)
        yield from console.render(table, options.update_width(width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        _, width = self._fitted(console, options)
        return Measurement(width, width)

    def _fitted(self, console: Console, options: ConsoleOptions) -> tuple[Table, int]:
        """The table of as many columns as fit, and its width."""
        wide = options.max_width >= _UNBOUNDED_WIDTH
        shown = list(self._columns)
        while True:
            table = self._table(shown, wide=wide)
            width = Measurement.get(console, options.update_width(_UNBOUNDED_WIDTH), table).maximum
            last = max(shown, key=lambda column: column.rank)
            if width <= options.max_width:
                return table, width
            for column in shown:
                if column.least is not None:
                    longest = max(cell_len(text) for text in self._texts(column))
                    room = options.max_width - (width - longest)
                    if room >= column.least or last.rank == 0:
                        room = max(room, min(column.least, longest))
                        return self._table(shown, wide=wide, room=room), width - longest + room
            if last.rank == 0:
                return table, width
            shown.remove(last)

    def _texts(self, column: Column) -> list[str]:
        """The title of a column and all that stands below it."""
        at = self._columns.index(column)
        cells = (row[at] for row in self._rows)
        return [column.title, *(one_line(cell) if isinstance(cell, str) else cell.plain for cell in cells)]

    def _table(self, shown: list[Column], *, wide: bool, room: int | None = None) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", pad_edge=False, show_edge=False)
        for column in shown:
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                min_width=column.min_width,
                max_width=None if wide else column.max_width if column.least is None else room,
                no_wrap=column.least is None,
                overflow="ellipsis" if column.least is None else "fold",
            )
        for row in self._rows:
            table.add_row(
                *(
                    Text(one_line(cell)) if isinstance(cell, str) else cell
                    for column, cell in zip(self._columns, row, strict=True)
                    if column in shown
                )
            )
        return table


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table with quiet headings and no frame; the columns named in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def tier_text(text: str, tier: str) -> Text:
    """Text in the colour of its tier."""
    return Text(text, style=TIER_STYLES.get(tier, ""))


def node_order(tier: Tier, node_id: str) -> tuple[int, list[tuple[str, int]]]:
    """Sorts nodes as people count them: from the end up, and end-2 before end-10."""
    parts = re.findall(r"(\D*)(\d*)", node_id)
    return list(Tier).index(tier), [(text, int(number or 0)) for text, number in parts]


def health_text(health: Health) -> Text:
    """The failure detector's opinion, coloured."""
    return Text(health, style=_HEALTH_STYLES[health])


def image_count(count: int) -> str:
    """1 as "1 image", 2000 as "2,000 images"."""
    return f"{count:,} {'image' if count == 1 else 'images'}"


def percent(share: float | None) -> str:
    """0.4567 as "45.7 %", None as "-"."""
    return "-" if share is None else f"{100 * share:.1f} %"


def milliseconds(value: float | None) -> str:
    """A latency with as many digits as a reader can use, None as "-"."""
    if value is None:
        return "-"
    return f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"


def progress_bars(unit: str) -> Progress:
    """Bars for long work, with the time left; each task counts `unit`s."""
    console = screen(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit}s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # Into a file it would leave an empty line behind.
        disable=not console.is_terminal,
    )
