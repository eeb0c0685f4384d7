"""Commands of experiments: what is asked for wrongly ends in one sentence, before anything is measured."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import app
from benchmarks.catalog import BENCHMARKS
from terrace.cli import run
from tierkit.commandline import asked_wrongly
from tierkit.errors import (
    Conflict,
    DataError,
    InvalidInput,
    NotFound,
    PortInUse,
    ProviderUnavailable,
    SetupError,
    TerraceError,
)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("overload --seconds nan", "Invalid value for '--seconds': "),
        ("overload --seconds long", "Invalid value for '--seconds': "),
        ("overload --server-core -1", "Invalid value for '--server-core': "),
        ("overload --nope", "No such option: --nope"),
        ("overload --server-core 0 --load-core 0", "a core each"),
        ("durability --tasks 10001", "Invalid value for '--tasks': "),
        ("durability --out {file}", "is a file"),
        ("durability --out {file}/runs", "cannot make the folder"),
        ("main-job --end 999", "Invalid value for '--end': "),
        ("main-job --out {file}", "is a file"),
        ("main-job --data {file}", "TERRACE_DATA to the folder"),
        ("overload --only mobilenet=0", "write MODEL=FACTOR"),
        ("photographs --photographs 0", "Invalid value for '--photographs': "),
        ("photographs --models {file}", "Invalid value for '--models': "),
        ("peers --rounds 101", "Invalid value for '--rounds': "),
        ("peers --only nobody", "no contender 'nobody'"),
        ("duel --peer terrace", "a duel is with another server"),
    ],
)
def test_a_measurement_that_is_asked_for_wrongly_ends_with_two_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff")
    assert run(line.format(file=file).split(), app, "benchmarks") == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("benchmarks")
    assert sentence in said
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (InvalidInput("x"), True),
        (NotFound("x"), True),
        (DataError("x"), True),
        (ProviderUnavailable("x"), True),
        (SetupError("x"), True),
        (PortInUse("x"), False),
        (Conflict("x"), False),
    ],
)
def test_what_other_options_would_have_helped_was_asked_for_wrongly(error: TerraceError, wrong: bool) -> None:
    assert asked_wrongly(error) is wrong


def test_every_benchmark_stands_in_the_table_of_its_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "benchmarking.md").read_text(encoding="utf-8")
    rows = page.split("| benchmark | what it shows |")[1].split("\n\n")[0].splitlines()[2:]
    assert sorted(re.findall(r"`([\w-]+)`", row.split("|")[1])[0] for row in rows) == sorted(BENCHMARKS)
