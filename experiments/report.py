"""All runs below a folder as one HTML page that needs no other file: tables, plots, and where they come from."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.harness import RECORD, Experiment, publish
from experiments.record import read_record
from tierkit.errors import InvalidInput, SetupError

__all__ = ["REPORT", "write_report"]

REPORT = "report.html"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.75rem; text-align: right; border-bottom: 1px solid #ccc; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; }
img { max-width: 100%; height: auto; }
.facts, .notes { color: #555; font-size: 0.85rem; }
.bad { background: #fbe3d6; padding: 0.5rem 1rem; }
"""


def write_report(folder: Path, experiments: Mapping[str, Experiment]) -> tuple[Path, list[str]]:
    """Write `report.html` into `folder`, from the records in it and below it.

    Returns:
        The page, and what a person should know: records that could not be used, plots that could not be drawn.

    Raises:
        InvalidInput: there is no record.
        SetupError: there is but one, and it is damaged.
    """
    paths = sorted(folder.rglob(RECORD), key=lambda path: path.parts)
    if not paths:
        raise InvalidInput(f"there is no {RECORD} in {folder} or below it")
    sections: list[str] = []
    warnings: list[str] = []
    for path in paths:
        try:
            name = read_record(path)["experiment"]
        except SetupError as exc:
            if len(paths) == 1:
                raise
            warnings.append(str(exc))
            continue
        if name not in experiments:
            warnings.append(f"{path}: there is no experiment {name!r} in this version")
            continue
        outcome = publish(experiments[name], path.parent)
        warnings += outcome.warnings
        plots = sorted(path.parent.glob("*.svg"))
        sections.append(_section(experiments[name], outcome.record, plots, str(path.parent.relative_to(folder))))
    page = folder / REPORT
    body = "\n".join(sections)
    page.write_text(
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Terrace: experiments</title>\n'
        f"<style>{_STYLE}</style>\n<h1>Terrace: experiments</h1>\n{body}\n</html>\n",
        encoding="utf-8",
    )
    return page, warnings


def _section(experiment: Experiment, record: Mapping[str, Any], plots: Sequence[Path], folder: str) -> str:
    table = experiment.table(record)
    heading = "".join(f"<th>{html.escape(text)}</th>" for text in table.headings)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    state = "" if record["state"] == "complete" else f'<p class="bad">This run is {html.escape(record["state"])}.</p>\n'
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in record["notes"])
    drawn = "\n".join(_image(plot) for plot in plots)
    facts = (
        f"{record['measured_at']}, commit {record['commit']}, {record['host']['cores']} cores "
        f"({record['host']['cpu']}), seed {record['seed']}, {' '.join(record['command'])}, in {folder}"
    )
    return (
        f"<h2>{html.escape(experiment.name)}: {html.escape(experiment.summary)}</h2>\n{state}"
        f'<div class="scroll"><table><tr>{heading}</tr>\n{rows}</table></div>\n{drawn}\n'
        f'<ul class="notes">{notes}</ul>\n<p class="facts">{html.escape(facts)}</p>\n'
    )


def _image(path: Path) -> str:
    # As an image of its own: names inside one drawing must not meet those of another.
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{html.escape(path.stem)}" src="data:image/svg+xml;base64,{content}"></figure>'
