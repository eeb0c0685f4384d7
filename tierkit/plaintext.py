"""Text from outside (names of files and jobs, messages of other services) on a terminal: shown, and never obeyed.

A terminal takes control characters for commands: they move the cursor, rename the window, and make one line look like
another. They are written as JSON escapes them (`\\u001b`), so that what goes through here stays the JSON that it was.
"""

from __future__ import annotations

import re

__all__ = ["from_cell", "harmless", "one_line", "spreadsheet_cell", "without_passwords"]

# C0 and C1 but for tab and line feed, DEL, the separators of lines, and what turns the direction of writing.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


_PASSWORD = re.compile(r"(://[^:/@\s]*:)\S*(?=@)|(?<=[?&])(password=)[^&\s]*")


_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
"""Beginning of a cell that a spreadsheet computes, or of such a cell with quotes in front. Full-width signs are
computed as well."""


def spreadsheet_cell(text: str) -> str:
    """The text as a cell of a CSV: a quote in front keeps a spreadsheet from computing it."""
    return f"'{text}" if _FORMULA.match(text) else text


def from_cell(cell: str) -> str:
    """The text that such a cell stands for."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def without_passwords(text: str) -> str:
    """The text without the passwords of the URLs in it."""
    return _PASSWORD.sub(r"\1\2***", text)


def harmless(text: str) -> str:
    """The text with its control characters made visible; tabs and line breaks stay."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """The same for a text that is to stay on its line."""
    return harmless(text).replace("\n", "\\n").replace("\t", "\\t")
