"""Tables of results in narrow terminals: no word is broken, and what is left out is said."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.tables import RECORDS
from experiments.catalog import EXPERIMENTS
from terrace.cli import run
from terrace.console import results_table

HEADINGS = ("scheme", "paper's formula, s", "measured, s", "fine accuracy")
ROWS = (("end-edge", "114.1", "76.6", "0.607"), ("mapping, N_map 1", "77.0", "failed after 5.4 (Inf)", "0.622"))

MEASURED = [
    path for path in sorted(RECORDS.glob("*.json")) if json.loads(path.read_text())["experiment"] in EXPERIMENTS
]


@pytest.mark.parametrize(
    ("width", "widths"),
    [
        (10_000, {0: 16, 1: 18, 2: 22, 3: 13}),
        (75, {0: 16, 1: 18, 2: 22, 3: 13}),
        (70, {0: 16, 1: 18, 2: 22, 3: 8}),
        (60, {0: 16, 1: 18, 2: 12, 3: 8}),
        (45, {0: 8, 1: 10, 2: 12, 3: 8}),
        (35, {0: 8, 2: 12, 3: 8}),
        (20, {0: 8, 2: 9}),
        (4, {0: 8}),
    ],
)
def test_headings_are_wrapped_then_cells_and_then_columns_left_out(width: int, widths: dict[int, int]) -> None:
    table = results_table(HEADINGS, ROWS, spare=["paper's formula, s"])
    assert table.widths(width) == widths
    assert table.left_out(width) == [heading for number, heading in enumerate(HEADINGS) if number not in widths]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_no_word_of_a_table_is_broken(path: Path, width: int) -> None:
    record = json.loads(path.read_text())
    table = EXPERIMENTS[record["experiment"]].table(record)
    console = Console(width=width)
    shown = results_table(table.columns, table.rows, spare=table.spare)
    left_out = shown.left_out(width)
    with console.capture() as capture:
        console.print(shown)
    words = capture.get().split()
    missing = {word for heading in table.columns if heading not in left_out for word in heading.split()} - set(words)
    assert not missing
    # The first column tells rows apart.
    assert table.columns[0] not in left_out
    assert len(left_out) <= len(table.columns) // 2


@pytest.mark.parametrize("columns", [80, 110, 120])
def test_the_list_of_experiments_has_no_ragged_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(["experiment", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if "Run all experiments" in line)
    after = next(number for number, line in enumerate(lines) if number > first and line.startswith("╰"))
    assert after - first == (2 if columns == 80 else 1)
