"""Tables in documentation pages."""

from pathlib import Path

import pytest

from experiments.pages import fill
from tierkit.errors import InvalidInput

PAGE = """# Page

<!-- table: a -->
old
<!-- end of table -->

Between.

<!-- table: b -->
untouched
<!-- end of table -->
"""


def test_one_table_is_replaced_as_often_as_it_is_made(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for table in ("| first |\n", "| second |\n"):
        fill(page, "a", table)
    assert page.read_text() == PAGE.replace("old", "\n| second |\n")


@pytest.mark.parametrize("text", [None, "no place", "<!-- table: a -->\nwithout an end"])
def test_a_page_without_the_place_is_left_as_it_is(text: str | None, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(InvalidInput, match=r"cannot read the page|has no place for the table"):
        fill(page, "a", "| table |")
    assert text is None or page.read_text() == text
