"""Tables in documentation pages."""

import re
from pathlib import Path

import pytest

from experiments.catalog import EXPERIMENTS
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


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("| experiment | shows |", set(EXPERIMENTS)),
        ("| experiment | with `--quick` |", {name for name, each in EXPERIMENTS.items() if each.quick}),
    ],
    ids=["all", "quick"],
)
def test_every_experiment_stands_in_the_tables_of_its_page(heading: str, names: set[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "experiments.md").read_text(encoding="utf-8")
    rows = page.split(heading)[1].split("\n\n")[0].splitlines()[2:]
    told = [name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(told) == sorted(names)
