"""Colours, numbers and tables in the terminal."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
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
from tierkit.types import Health, SiteHealth, Tier

__all__ = [
    "TIER_STYLES",
    "Column",
    "Listing",
    "age_text",
    "health_text",
    "image_count",
    "milliseconds",
    "node_order",
    "percent",
    "plain_table",
    "print_json",
    "progress_bars",
    "results_table",
    "screen",
    "site_health_text",
    "tier_text",
]

TIER_STYLES: dict[str, str] = {
    "scheduler": "bold",
    Tier.END: "cyan",
    Tier.EDGE: "green",
    Tier.CLOUD: "magenta",
}

_UNBOUNDED_WIDTH = 10_000
_GAP = 2
_WHOLE = 12
"""Results of up to this many characters stay on one line."""

_HEALTH_STYLES = {
    Health.ALIVE: "green",
    Health.SUSPECT: "yellow",
    Health.DEAD: "red",
    Health.DRAINING: "yellow",
    Health.REMOVED: "dim",
}

_SITE_STYLES = {
    SiteHealth.OK: "green",
    SiteHealth.DEGRADED: "yellow",
    SiteHealth.COARSE: "red",
    SiteHealth.DRAINED: "yellow",
    SiteHealth.DOWN: "red",
}


class _Screen(Console):
    """Console that removes control characters from all that it prints."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def screen(*, stderr: bool = False) -> Console:
    """Return the console: standard output for results, standard error for progress and notes.

    Into a file or a pipe lines are as long as they are, unless `COLUMNS` says how wide the reader is.
    """
    console = _Screen(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNBOUNDED_WIDTH
    return console


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.write(harmless(to_json(value, indent=2).decode()) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a `Listing`."""

    title: str
    rank: int = 0
    """Order of removal from a narrow terminal: the highest rank goes first, and rank 0 stays."""
    right: bool = False
    """True to align numbers at the right."""
    min_width: int | None = None
    max_width: int | None = None
    """Longer texts end in an ellipsis, unless the width is unbounded."""
    least: int | None = None
    """Least width of the column if longer texts are wrapped in it. None: they are never wrapped, so that ids can be
    copied."""


class Listing:
    """A plain table in any width: a terminal too narrow for all columns gets fewer of them, and one too narrow for the
    last of them wraps the lines by itself."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._rows: list[list[Text]] = []

    def add_row(self, *cells: str | Text) -> None:
        """One cell per column."""
        self._rows.append([Text(one_line(cell)) if isinstance(cell, str) else cell for cell in cells])

    def widths(self, width: int) -> dict[int, int]:
        """The numbers of the columns that are shown in a terminal, and how wide they are."""
        fitted = {number: self._narrowest(number, width) for number in range(len(self._columns))}
        while True:
            free = width - _total(fitted)
            last = max(fitted, key=lambda number: self._columns[number].rank)
            if free >= 0 or self._columns[last].rank == 0:
                return self._widened(fitted, free)
            del fitted[last]

    def left_out(self, width: int) -> list[str]:
        """The titles of the columns that are not shown in a terminal."""
        shown = self.widths(width)
        return [column.title for number, column in enumerate(self._columns) if number not in shown]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = _quiet_table()
        table.padding = (0, _GAP - 1, 0, 0)
        widths = self.widths(options.max_width)
        for number, width in widths.items():
            column = self._columns[number]
            table.add_column(
                Text(column.title),
                justify="right" if column.right else "left",
                width=width,
                no_wrap=column.least is None,
                overflow="ellipsis" if column.least is None else "fold",
            )
        for row in self._rows:
            table.add_row(*(row[number] for number in widths))
        yield from console.render(table, options.update_width(_total(widths)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        total = _total(self.widths(options.max_width))
        return Measurement(total, total)

    def _texts(self, number: int) -> list[str]:
        """The title of a column and all cells below it."""
        return [self._columns[number].title, *(row[number].plain for row in self._rows)]

    def _narrowest(self, number: int, width: int) -> int:
        column, longest = self._columns[number], max(map(cell_len, self._texts(number)))
        if column.least is not None:
            return max(1, min(column.least, longest))  # an empty one as well: text cannot be wrapped in no width
        if column.max_width is not None and width < _UNBOUNDED_WIDTH:
            longest = min(longest, column.max_width)
        return max(longest, column.min_width or 0)

    def _widened(self, widths: dict[int, int], free: int) -> dict[int, int]:
        """Give what is left of the width to the columns whose texts take most lines."""

        def lines(number: int, width: int) -> int:
            return max(len(textwrap.wrap(text, width, break_on_hyphens=False)) for text in self._texts(number))

        while True:
            taken = {number: lines(number, widths[number]) for number in widths if self._columns[number].least}
            for number, count in sorted(taken.items(), key=lambda item: -item[1]):
                wider = (more for more in range(1, free + 1) if lines(number, widths[number] + more) < count)
                if count > 1 and (more := next(wider, None)) is not None:
                    free -= more
                    widths[number] += more
                    break
            else:
                return widths


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def results_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, spare: Sequence[str] = ()) -> Listing:
    """Return a table of figures, whose headings may wrap; words are never broken.

    Args:
        spare: headings of the columns to leave out first; then the last columns are left out. The first column stays.
    """
    staying = [*(heading for heading in headings if heading not in spare), *reversed(spare)]
    columns = []
    for number, heading in enumerate(headings):
        cells = [row[number] for row in rows]
        whole = [cell for cell in cells if cell_len(cell) <= _WHOLE]
        words = [word for text in (heading, *cells) for word in text.split()]
        least = max(map(cell_len, (*whole, *words)), default=1)
        rank = staying.index(heading) if number else 0
        columns.append(Column(title=heading, rank=rank, right=number > 0, least=least))
    listing = Listing(*columns)
    for row in rows:
        listing.add_row(*row)
    return listing


def _quiet_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", pad_edge=False, show_edge=False)


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table with quiet headings and no frame; the columns named in `right` hold numbers."""
    table = _quiet_table()
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


def site_health_text(health: SiteHealth) -> Text:
    """Health of a site, coloured."""
    return Text(health, style=_SITE_STYLES[health])


def image_count(count: int) -> str:
    """1 as "1 image", 2000 as "2,000 images"."""
    return f"{count:,} {'image' if count == 1 else 'images'}"


def percent(share: float | None) -> str:
    """0.4567 as "45.7 %", None as "-"."""
    return "-" if share is None else f"{100 * share:.1f} %"


def age_text(seconds: float | None) -> str:
    """75 as "1 min", with the largest unit that is full, None as "-"."""
    if seconds is None:
        return "-"
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds // unit:,.0f} {name}"
    return f"{seconds:.0f} s"


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
