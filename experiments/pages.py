"""Tables in documentation pages, written by the commands that make them from records."""

from __future__ import annotations

from pathlib import Path

from tierkit.atomic import write_atomically
from tierkit.errors import InvalidInput

__all__ = ["fill", "place_in", "read_page"]

_END = "<!-- end of table -->"


def read_page(page: Path) -> str:
    """Read a page's text.

    Raises:
        InvalidInput: it cannot be read.
    """
    try:
        return page.read_text(encoding="utf-8")
    except OSError as exc:
        raise InvalidInput(f"cannot read the page {page}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"cannot read the page {page}: it is not UTF-8 text") from exc


def fill(page: Path, name: str, markdown: str) -> None:
    """Replace the text of `page` between `<!-- table: NAME -->` and the next `<!-- end of table -->`.

    Raises:
        InvalidInput: the page cannot be read, or has no such place.
    """
    before, after = place_in(page, name)
    write_atomically(page, f"{before}\n\n{markdown.strip()}\n\n{after}".encode())


def place_in(page: Path, name: str) -> tuple[str, str]:
    """Return the text of `page` before and after a table's place, including the two marks. See `fill` for errors."""
    start = f"<!-- table: {name} -->"
    before, found, rest = read_page(page).partition(start)
    _, closed, after = rest.partition(_END)
    if not (found and closed):
        raise InvalidInput(f"{page} has no place for the table: {start} and, below it, {_END}")
    return before + start, _END + after
