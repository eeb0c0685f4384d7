"""Tables of results in a terminal of any width: headings go on in the next line, but no word is ever broken.

Where the width does not suffice for that, longer cells go on below as well; then columns are left out, which is said.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from tierkit.plaintext import one_line

__all__ = ["fit", "results_table"]

_GAP = 2
_WHOLE, _SHORT = 24, 12
"""Cells up to so many characters stay on one line, if there is room; and if there is little."""


def results_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, spare: Sequence[str] = ()
) -> tuple[Table, list[str]]:
    """A table that fits into `width`, and the headings of the columns that had to be left out.

    Args:
        spare: headings of the columns to leave out first, if they are there; after them go the last ones. The first
            column stays.
    """
    widths = fit(headings, rows, width=width, spare=spare)
    table = Table(
        box=box.SIMPLE_HEAD,
        header_style="dim",
        border_style="dim",
        pad_edge=False,
        show_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )
    for index, room in widths.items():
        table.add_column(Text(headings[index]), justify="right" if index else "left", width=room, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(row[index])) for index in widths))
    return table, [heading for index, heading in enumerate(headings) if index not in widths]


def fit(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, spare: Sequence[str] = ()
) -> Mapping[int, int]:
    """The widths of the columns that are shown, by their number. As `results_table`."""
    texts = [[heading, *(row[index] for row in rows)] for index, heading in enumerate(headings)]
    shown = list(range(len(headings)))
    leaving = [headings.index(heading) for heading in spare if heading in headings]
    leaving += [index for index in reversed(shown[1:]) if index not in leaving]
    while True:
        for whole in (_WHOLE, _SHORT):
            widths = {index: _least(texts[index], whole) for index in shown}
            free = width - sum(widths.values()) - _GAP * (len(shown) - 1)
            if free >= 0 or (len(shown) == 1 and whole == _SHORT):
                return _widened(widths, texts, free)
        shown.remove(leaving.pop(0))


def _least(texts: Sequence[str], whole: int) -> int:
    """The narrowest in which no word is broken, and no cell of up to `whole` characters."""
    heading, *cells = texts
    kept = [cell for cell in cells if cell_len(cell) <= whole]
    words = [word for text in (heading, *cells) for word in text.split()]
    return max(map(cell_len, (*kept, *words)), default=1)


def _widened(widths: dict[int, int], texts: Sequence[Sequence[str]], free: int) -> Mapping[int, int]:
    """Give what is left of the width to the columns whose texts take most lines."""
    while True:
        for index in sorted(widths, key=lambda index: -_lines(texts[index], widths[index])):
            lines, room = _lines(texts[index], widths[index]), widths[index]
            wider = (room + more for more in range(1, free + 1) if _lines(texts[index], room + more) < lines)
            if lines > 1 and (found := next(wider, None)) is not None:
                free -= found - room
                widths[index] = found
                break
        else:
            return widths


def _lines(texts: Sequence[str], room: int) -> int:
    return max(len(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)) for text in texts)
