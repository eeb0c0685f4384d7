"""All runs below a folder as one HTML page that needs no other file: tables, plots, and their sources."""

from __future__ import annotations

import base64
import errno
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.cost import ServedImages, cost_of_1000
from experiments.harness import RECORD, Experiment, Outcome, Table, present, publish
from experiments.record import read_record
from tierkit.atomic import write_atomically
from tierkit.commandline import NO_ROOM
from tierkit.errors import InvalidInput, SetupError
from tierkit.types import Tier

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"

_KEPT = re.compile(r".+-\d{4}-\d\d-\d\dT\d{6}Z(-\d+)?")
"""Names of records without their ending, in the form that `experiments.record` gives them."""

_PRIVACY = "made by `terrace privacy audit` or `front`, which wrote table and plot into the same folder"
_FORMER = "made by no experiment of this version"

_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --quiet: #555; --line: #ccc; --bad: #fbe3d6; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --page: #1b1b1b; --quiet: #aaa; --line: #555; --bad: #5a2a12; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: var(--text);
  background: var(--page); }
h1, h2, li, p { overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.75rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; min-width: 9rem; }
.scroll { overflow-x: auto; }
figure { margin: 1rem 0; }
img { max-width: max(100%, 36rem); height: auto; background: #fff; }
.facts, .notes { color: var(--quiet); font-size: 0.85rem; }
.bad { background: var(--bad); padding: 0.5rem 1rem; }
@media print {
  :root { --text: #000; --page: #fff; --quiet: #333; --line: #ccc; --bad: #fbe3d6; }
  body { margin: 0; max-width: none; }
  table { font-size: 0.65rem; }
  th, td { padding: 0.1rem 0.3rem; }
  th:first-child, td:first-child { min-width: 5rem; }
  .scroll { overflow: visible; }
  img { max-width: 100%; }
  h2 { break-after: avoid; }
  tr, figure { break-inside: avoid; }
}
"""

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)

_CODE = re.compile(r"`([^`]+)`")


def write_report(
    folder: Path, experiments: Mapping[str, Experiment], prices: Mapping[Tier, float] | None = None
) -> tuple[Path, list[str]]:
    """Write `report.html` into `folder`, from the records in it and below it. Records of runs are called `record.json`;
    their tables and plots are written again. Kept records are named after experiment and time.

    The page names what it left out.

    Args:
        prices: price of a machine per hour, by tier. With them, the page has the cost of 1,000 images for each record
            that has the time of a fleet; see `Experiment.served`.

    Returns:
        The page, and what a person should know: records that could not be used, plots that could not be drawn.

    Raises:
        InvalidInput: there is no record of an experiment.
        SetupError: all records are damaged, or the page cannot be written.
    """
    paths = sorted(_records(folder), key=lambda path: path.parts)
    if not paths:
        raise InvalidInput(f"there is no record of an experiment in {folder} or below it ({RECORD}, or NAME-TIME.json)")
    sections: list[tuple[str, str]] = []
    warnings: list[str] = []
    damaged: list[str] = []
    others: dict[str, list[str]] = {}
    for path in paths:
        try:
            record = read_record(path)
            name = record["experiment"]
            if name not in experiments or record["samples"]:  # experiments of earlier versions have samples
                why = _PRIVACY if name.startswith("privacy-") else _FORMER
                others.setdefault(why, []).append(str(path.relative_to(folder)))
                continue
            make = _again if path.name == RECORD else present
            outcome = make(experiments[name], path)
        except SetupError as exc:
            if len(paths) == 1:
                raise
            if isinstance(exc.__cause__, OSError) and exc.__cause__.errno in NO_ROOM:
                raise
            damaged.append(str(exc))
            continue
        warnings += outcome.warnings
        title = f"{name}: {experiments[name].summary} ({_name(path, folder)})"
        cost = "" if prices is None else _costs(experiments[name].served(outcome.record), prices)
        sections.append((title, _section(outcome, cost)))
    if not sections and not others:
        raise SetupError(f"none of the {len(paths)} records in {folder} can be used; of the first one: {damaged[0]}")
    left_out = damaged + [f"left out: {', '.join(names)}: {why}" for why, names in others.items()]
    page = folder / REPORT
    write_atomically(page, _page(sections, left_out).encode(errors="backslashreplace"))
    return page, warnings + left_out


def _again(experiment: Experiment, path: Path) -> Outcome:
    """Make table and plots of a run's record again, and write them into its folder if that is permitted."""
    try:
        return publish(experiment, path.parent)
    except SetupError as exc:
        if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno not in _FORBIDDEN:
            raise
        outcome = present(experiment, path)
        return replace(outcome, warnings=[*outcome.warnings, str(exc)])


def _records(folder: Path) -> Iterator[Path]:
    """Files that are records, or would be if they were whole."""
    for path in folder.rglob("*.json"):
        if (path.name == RECORD or _KEPT.fullmatch(path.stem)) and not path.is_fifo():
            yield path


def _name(path: Path, folder: Path) -> str:
    """Name by which a person finds a record below a folder: its run folder, or its file name."""
    return str((path.parent if path.name == RECORD else path.with_suffix("")).relative_to(folder))


def _marked(text: str) -> str:
    """Text in HTML; what stands between backticks is code."""
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


def _page(sections: Sequence[tuple[str, str]], left_out: Sequence[str]) -> str:
    titles = [_marked(title) for title, _ in sections]
    contents = "\n".join(f'<li><a href="#run-{number}">{title}</a></li>' for number, title in enumerate(titles, 1))
    body = "\n".join(
        f'<h2 id="run-{number}">{title}</h2>\n{text}'
        for number, (title, (_, text)) in enumerate(zip(titles, sections, strict=True), 1)
    )
    if left_out:
        contents += '\n<li><a href="#left-out">not on this page</a></li>'
        items = "\n".join(f"<li>{_marked(why)}</li>" for why in left_out)
        body += f'\n<h2 id="left-out">not on this page</h2>\n<ul class="notes">\n{items}\n</ul>'
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Terrace: experiments</title>\n'
        f"<style>{_STYLE}</style>\n<h1>Terrace: experiments</h1>\n<ul>\n{contents}\n</ul>\n{body}\n</html>\n"
    )


def _html_of(table: Table) -> str:
    heading = "".join(f'<th scope="col">{_marked(text)}</th>' for text in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{_marked(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    return f'<div class="scroll"><table>\n<thead><tr>{heading}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n'


def _costs(served: Sequence[ServedImages], prices: Mapping[Tier, float]) -> str:
    """The table of costs; empty without a fleet."""
    if not served:
        return ""
    rows = [
        [
            each.words,
            ", ".join(f"{count} {tier}" for tier, count in each.nodes.items()),
            f"{each.images / each.seconds:,.0f}",
            f"{cost_of_1000(each, prices):.4g}",
        ]
        for each in served
    ]
    said = ", ".join(f"{tier} {price:g}" for tier, price in prices.items())
    words = f'<p class="facts">Prices of a machine an hour: {said}; others are free.</p>\n'
    return _html_of(Table(headings="fleet | machines | images/s | cost of 1,000 images", rows=rows)) + words


def _section(outcome: Outcome, cost: str) -> str:
    record = outcome.record
    state = "" if record["state"] == "complete" else f'<p class="bad">This run is {html.escape(record["state"])}.</p>\n'
    notes = "".join(f"<li>{_marked(note)}</li>" for note in record["notes"])
    notes = f'<ul class="notes">{notes}</ul>\n' if notes else ""
    profile = record["config"].get("profile")
    whence = f" The profile's source: {profile['source']}" if isinstance(profile, dict) and "source" in profile else ""
    facts = f'<p class="facts">{_marked(outcome.source)} Seed {record["seed"]}.{_marked(whence)}</p>\n'
    return f"{state}{_html_of(outcome.table)}{cost}{_plots(outcome)}\n{notes}{facts}"


def _plots(outcome: Outcome) -> str:
    if outcome.figures is None:
        return ""
    words = outcome.figures.shown()
    # As images of their own: names inside one drawing must not meet those of another.
    return "\n".join(
        f'<figure class="scroll"><img alt="{html.escape(words[name])}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(content).decode()}"></figure>'
        for name, content in outcome.figures.render("svg").items()
    )
