"""What the documentation says was measured is what the records say."""

from pathlib import Path

import pytest

from experiments.tables import tables_of

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", ["fault-tolerance.md", "scheduling.md", "experiments.md"])
def test_tables_are_those_of_the_records(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    for record, table in tables_of(page).items():
        assert f"<!-- table: {record} -->\n\n{table.strip()}\n\n<!-- end of table -->" in page, (
            f"run: python -m experiments.tables docs/{name}"
        )


def test_a_place_for_another_table_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"experiment": "other", "config": {}, "points": [], "state": "complete"}')
    assert tables_of("<!-- table: other -->\n<!-- table: nothing -->\n", tmp_path) == {}
