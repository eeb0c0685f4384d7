"""The tables of the documentation that come from records of experiments.

    python -m experiments.tables docs/fault-tolerance.md docs/scheduling.md

fills every place `<!-- table: RECORD -->` of these pages, RECORD being the name of a file in `experiments/records`
without its ending.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from experiments.catalog import EXPERIMENTS
from experiments.pages import fill
from experiments.record import read_record

__all__ = ["RECORDS", "main", "tables_of"]

RECORDS = Path(__file__).parent / "records"

_PLACE = re.compile(r"<!-- table: (\S+) -->")


def tables_of(page: str, records: Path = RECORDS) -> dict[str, str]:
    """The tables that a page asks for, as Markdown by the name of their record; others are left to others."""
    found: dict[str, str] = {}
    for name in _PLACE.findall(page):
        path = records / f"{name}.json"
        if path.exists():
            record = read_record(path)
            if experiment := EXPERIMENTS.get(record["experiment"]):
                found[name] = experiment.table(record).markdown()
    return found


def main(pages: Annotated[list[Path], typer.Argument(help="Pages of the documentation.")]) -> None:
    """Write the tables of these pages again, from the records."""
    for page in pages:
        for name, table in tables_of(page.read_text(encoding="utf-8")).items():
            fill(page, name, table)
            typer.echo(f"{page}: {name}")


if __name__ == "__main__":
    typer.run(main)
