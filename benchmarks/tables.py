"""The tables and plots of the documentation that come from records of experiments.

    python -m benchmarks.tables docs/results/*.md
    python -m benchmarks.tables --keep runs/table1 docs/results/paper.md

fills every place `<!-- table: RECORD -->` of these pages with table and plots, and with the command, commit and time of
the measurement. RECORD is the name of a file in `benchmarks/records` without its ending, or the name of an experiment
for its newest record there. Several names, with blanks between, are put together. The plots go into `plots/` next to
the page.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.catalog import BENCHMARKS
from experiments.catalog import EXPERIMENTS
from experiments.harness import RECORD, Record, extent
from experiments.pages import fill, read_page
from experiments.plots import Figures
from experiments.record import joined, origin, read_record, record_stem
from terrace import cli
from tierkit.errors import InvalidInput

__all__ = ["PLOTS", "RECORDS", "Place", "keep", "main", "places_of", "run"]

_EXPERIMENTS = {**EXPERIMENTS, **BENCHMARKS}

RECORDS = Path(__file__).parent / "records"

PLOTS = "plots"
"""Folder next to a page."""

_PLACE = re.compile(r"<!-- table: (.+?) -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Content of one place of a page."""

    markdown: str
    plots: Mapping[str, bytes]
    """SVG files by name."""


def places_of(page: Path, records: Path = RECORDS) -> dict[str, Place]:
    """Content of the places of a page, by their words; places without records of this command are left out.

    Raises:
        InvalidInput, SetupError: a record cannot be read, or not be put together with another.
        MissingExtra: matplotlib is not installed.
    """
    found: dict[str, Place] = {}
    for words in _PLACE.findall(read_page(page)):
        paths = [_path(word, records) for word in words.split()]
        kept = {path.stem: read_record(path) for path in paths if path is not None}
        if len(kept) == len(paths) and {record["experiment"] for record in kept.values()} <= _EXPERIMENTS.keys():
            found[words] = _place(kept)
    return found


def _path(word: str, records: Path) -> Path | None:
    """The file of a record, or the newest one of an experiment: its name is followed by the time."""
    named = [path for path in (records / f"{word}.json",) if path.exists()]
    return max([*named, *records.glob(f"{word}-[0-9][0-9][0-9][0-9]-*.json")], default=None)


def _place(records: Mapping[str, Record]) -> Place:
    whole = joined(list(records.values()))
    experiment = _EXPERIMENTS[whole["experiment"]]
    figures = Figures(whole["state"])
    experiment.draw(whole, figures)
    shown = figures.shown()
    plots = {f"{'+'.join(records)}-{name}.svg": content for name, content in figures.render("svg").items()}
    images = [f"![{words}]({PLOTS}/{file})" for words, file in zip(shown.values(), plots, strict=True)]
    sources = [
        f"Measured by {origin(record)}; {extent(experiment, record)} (record `benchmarks/records/{name}.json`)."
        for name, record in records.items()
    ]
    blocks = [experiment.table(whole).markdown().strip(), "\n".join(sources), *images]
    return Place(markdown="\n\n".join(blocks), plots=plots)


def keep(run: Path, records: Path = RECORDS) -> Path:
    """Copy the record of a run folder to the others, under its experiment and time; returns the copy.

    Raises:
        InvalidInput: the run is not complete, or a quick one.
        SetupError: there is no whole record.
    """
    record = read_record(run / RECORD)
    if record["state"] != "complete":
        raise InvalidInput(f"the run in {run} is {record['state']}: only complete ones are kept")
    if record["config"].get("quick"):
        raise InvalidInput(f"the run in {run} is a quick one: only whole ones are kept, so run it without --quick")
    return Path(shutil.copyfile(run / RECORD, records / f"{record_stem(record)}.json"))


def run(
    pages: Annotated[list[Path], typer.Argument(help="Pages of the documentation.")],
    runs: Annotated[
        list[Path] | None,
        typer.Option("--keep", metavar="DIR", help="First copy the record of this run folder to the others."),
    ] = None,
) -> None:
    """Write the tables and plots of these pages again, from the records."""
    for folder in runs or ():
        typer.echo(str(keep(folder)))
    for page in pages:
        for words, place in places_of(page).items():
            fill(page, words, place.markdown)
            for name, content in place.plots.items():
                (page.parent / PLOTS).mkdir(exist_ok=True)
                (page.parent / PLOTS / name).write_bytes(content)
            typer.echo(f"{page}: {words}")


def main() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(run)
    sys.exit(cli.run(sys.argv[1:], app, "python -m benchmarks.tables"))


if __name__ == "__main__":
    main()
