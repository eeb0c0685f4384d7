"""docs/explanation/architecture.md names files, functions and rooms that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
WHERE = PAGE.partition("## The file of each behaviour")[2].partition("\n## ")[0]
ROWS = [line.split("|")[1:3] for line in WHERE.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(("behaviour", "where"), ROWS[1:], ids=[behaviour.strip()[:40] for behaviour, _ in ROWS[1:]])
def test_each_behaviour_is_in_the_file_that_the_page_names(behaviour: str, where: str) -> None:
    folder, file, seen = ROOT, ROOT, 0
    for name in re.findall("`([^`]+)`", where):
        if "/" in name or name.endswith(".py"):
            # A bare name, or a path that continues the one before, is below its package.
            places = [
                ROOT / name,
                folder / name,
                *(parent / name for parent in folder.parents if ROOT in parent.parents),
            ]
            file = next(place for place in places if place.exists())
            folder, seen = file.parent, seen + 1
        else:
            assert re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")), f"{name} is not in {file}"
    assert seen


def test_the_rooms_of_the_scheduler_are_those_of_its_contract() -> None:
    table = PAGE.partition("Inside the scheduler")[2].partition("The main rooms of the other")[0]
    named = {name.strip("/") for name in re.findall("`([a-z_]+/?)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.M)))}
    there = {
        path.stem for path in (ROOT / "scheduler").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert named == there - {"__init__", "__main__"}
