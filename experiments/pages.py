"""Tables in documentation pages, written by the commands that make them from records."""

from __future__ import annotations

from pathlib import Path

from models.atomic import write_atomically
from tierkit.errors import InvalidInput

__all__ = ["fill", "read_page"]

_END = "<!-- end of table -->"


def read_page(page: Path) -> str:
    """What stands in a page.

    Raises:
        InvalidInput: it cannot be read.
    """
    try:
        return page.read_text(encoding="utf-8")
    except OSError as exc:
        raise InvalidInput(f"cannot read the page {page}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"cannot read the page {page}: it is no text in UTF-8") from exc


def fill(page: Path, name: str, markdown: str) -> None:
    """Replace what stands in `page` between `<!-- table: NAME -->` and the next `<!-- end of table -->`.

    Raises:
        InvalidInput: the page cannot be read, or has no such place.
    """
    start = f"<!-- table: {name} -->"
    text = read_page(page)
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(_END)
    if not (found and closed):
        raise InvalidInput(f"{page} has no place for the table: {start} and, below it, {_END}")
    write_atomically(page, f"{before}{start}\n\n{markdown.strip()}\n\n{_END}{after}".encode())
