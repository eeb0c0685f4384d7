"""`terrace experiment all`: one that fails does not stop the others, one that is stopped does."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from benchmarks.tables import RECORDS
from experiments.catalog import EXPERIMENTS
from experiments.harness import RECORD, Experiment, Run, Table
from experiments.plots import Figures
from experiments.profile import NodeNumbers
from experiments.table5 import TABLE5
from terrace.cli import run as run_terrace
from terrace.commands import experiment as command
from tierkit.distribution import install_command
from tierkit.errors import DeadlineExceeded, MissingExtra


class Toy(Experiment):
    """Points, measured in some way."""

    def __init__(self, name: str, measure: Callable[[Run], Awaitable[None]]) -> None:
        self.name = name
        self._measure = measure

    async def measure(self, run: Run, chosen: Any) -> None:
        await self._measure(run)

    def rows(self, record: Any) -> list[dict[str, Any]]:
        return list(record["points"])

    def table(self, record: Any) -> Table:
        return Table(headings="points", rows=[[str(len(record["points"]))]])


async def well(run: Run) -> None:
    run.add(seconds=1)


async def failing(run: Run) -> None:
    raise DeadlineExceeded("the fleet was not ready within 30 s")


async def cut_off(run: Run) -> None:
    run.add(seconds=1)
    raise DeadlineExceeded("the job was not done within [9 s]")


async def stopped(run: Run) -> None:
    run.add(seconds=1)
    with run.step("waiting"):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()


def run_all(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *measures: Callable[[Run], Awaitable[None]]
) -> tuple[int, dict[str, Any], str]:
    monkeypatch.setattr(command, "ALL", [Toy(measure.__name__, measure) for measure in measures])
    result = CliRunner().invoke(command.app, ["all", "--json", "--out", str(folder)])
    return result.exit_code, json.loads(result.stdout), result.stderr


def test_one_that_fails_does_not_keep_the_others_from_being_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, rows, said = run_all(monkeypatch, tmp_path / "all", failing, cut_off, well)
    assert code == 1
    assert rows == {"cut_off": [{"seconds": 1}], "well": [{"seconds": 1}]}
    assert "not measured: failing: the fleet was not ready within 30 s" in said
    assert "invalid: cut_off: the job was not done within [9 s]" in said
    assert sorted(path.parent.name for path in tmp_path.rglob(RECORD)) == ["cut_off", "well"]


def test_a_run_of_which_nothing_could_be_used_is_invalid_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def left_out(run: Run, chosen: Any) -> None:
        run.config |= {"devices": 8, "task_s": 0.3705}
        run.note("left out: the first and only run")
        run.add(valid=False)

    monkeypatch.setattr(TABLE5, "measure", left_out)
    result = CliRunner().invoke(command.app, ["table5", "--json", "--out", str(tmp_path / "run")])
    assert result.exit_code == 1
    (said,) = result.stderr.splitlines()
    assert said.startswith("invalid: table5: every run was left out, so that there are no figures; ")
    record = json.loads((tmp_path / "run" / RECORD).read_text())
    assert (record["state"], record["points"]) == ("invalid", [{"valid": False}])
    assert "left out: the first and only run" in record["notes"]


@pytest.mark.parametrize(("missed", "code"), [([], 0), (["too slow"], 1)])
def test_a_missed_target_ends_with_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missed: list[str], code: int
) -> None:
    async def measured(run: Run) -> None:
        run.add(missed=missed)

    monkeypatch.setitem(EXPERIMENTS, "table3", Toy("table3", measured))
    result = CliRunner().invoke(command.app, ["table3", "--json", "--out", str(tmp_path / "run")])
    assert (result.exit_code, json.loads(result.stdout)) == (code, [{"missed": missed}])


def test_the_last_line_names_what_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Drawn(Toy):
        def draw(self, record: Any, figures: Figures) -> None:
            figures.panels("one", ["title"], xlabel="x", ylabel="y")

    for one, made in (
        (Toy("table3", well), "record and table"),
        (Drawn("table3", well), "record, table and plots"),
    ):
        monkeypatch.setitem(EXPERIMENTS, "table3", one)
        result = CliRunner().invoke(command.app, ["table3", "--out", str(tmp_path / made)])
        assert result.stdout.splitlines()[-2:] == ["n = 1 for each row (runs)", f"{made}: {tmp_path / made}"]


@pytest.mark.parametrize("measure", [well, failing])
def test_missing_plots_are_told_once_and_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measure: Callable[[Run], Awaitable[None]]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
    monkeypatch.setitem(EXPERIMENTS, "table3", Toy("table3", measure))
    result = CliRunner().invoke(command.app, ["table3", "--out", str(tmp_path / "run")])
    assert result.stderr.count("[plots]") == 1


def test_notes_and_folders_are_no_markup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def noting(run: Run) -> None:
        run.add(seconds=1)
        run.note("read from [red]here[/b] :cloud:")

    class Undrawn(Toy):
        def draw(self, record: Any, figures: Figures) -> None:
            raise MissingExtra("plots", "drawing plots")

    monkeypatch.setitem(EXPERIMENTS, "table3", Undrawn("table3", noting))
    folder = tmp_path / "[red]a[" / "b] :cloud:"
    result = CliRunner().invoke(command.app, ["table3", "--out", str(folder)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"record and table: {folder}"
    assert "read from [red]here[/b] :cloud:" in result.stdout.splitlines()
    assert result.stderr.endswith(f"{install_command('plots')}\n")

    damaged = tmp_path / "[" / "z]"
    damaged.mkdir(parents=True)
    (damaged / RECORD).write_text("{")
    result = CliRunner().invoke(command.app, ["report", str(tmp_path)])
    assert result.exit_code == 0
    assert f"{damaged / RECORD} is not a whole record" in result.stderr
    assert install_command("plots") in result.stderr


@pytest.mark.parametrize("name", ["table1", "table3"])
def test_what_has_nothing_to_emulate_takes_any_profile_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    toy = Toy(name, well)
    toy.profile = None
    monkeypatch.setitem(EXPERIMENTS, name, toy)
    for profile in ("native", "paper"):
        out = tmp_path / profile
        result = CliRunner().invoke(command.app, [name, "--profile", profile, "--json", "--out", str(out)])
        assert result.exit_code == 0
        assert (f"the profile {profile} has no part in it" in result.stderr) is (profile != "native")
        assert json.loads((out / RECORD).read_text())["config"]["profile"]["name"] == "native"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tabel5", "Did you mean 'table5'"),
        ("table5 --profile papr", "there is no profile 'papr'; did you mean paper?"),
        ("table2 --profile {tmp}/none.toml", "cannot read the profile"),
        ("table5 --method monitro", "'monitro' is not one of "),
        ("figure3 --scheme adaptve", "'adaptve' is not one of "),
        ("table4 --form xyz", "'xyz' is not one of 'uint8', 'float16', 'float32'. See"),
        ("figure3 --ends 1,x --out {tmp}/run", "'1,x' is not a list of numbers: write it like 0,1,6 or 1-8"),
        ("figure3 --ends 1- --out {tmp}/run", "'1-' is not a list of numbers"),
        (
            "figure3 --ends 2,8-1 --out {tmp}/run",
            "'8-1' is not a range: its first number must be the smaller one, as in 1-8",
        ),
        ("figure3 --ends 0-3 --out {tmp}/run", "so a point is for 1 to 8, not for 0"),
        ("table5 --failures 5-8 --out {tmp}/run", "of 8 end devices at most 7 can fail, not 8"),
        ("figure3 --ends 99 --out {tmp}/run", "the profile has 8 end devices"),
        ("figure3 --profile native --out {tmp}/run", "says nothing of the tier end"),
        ("scale --size 10x3 --out {tmp}/run", "'10x3' is not a fleet"),
        ("scale --against {tmp}/damaged.json --out {tmp}/run", "is not a whole record"),
        (
            "scale --against {tmp}/damaged/figure3.json --out {tmp}/run",
            "is not a whole record of figure3: 'tasks' is missing",
        ),
        ("table2 --data {tmp}/none --out {tmp}/run", "TERRACE_DATA to the folder"),
        ("table2 --out {tmp}/damaged.json/run", "cannot make the folder"),
        ("report {tmp}/damaged", "there is no record of an experiment in"),
        ("table3 --out /", "/ cannot hold a run, and no folder can be made next to it"),
        ("table3 --out=", "an empty value"),
        ("table3 --out {tmp}/damaged.json", "is a file; a folder is expected"),
        ("table5 --runs 1000000000000000000000 --out {tmp}/run", "Invalid value for '--runs': "),
        ("table5 --failures 1000000000000000000000 --out {tmp}/run", "0': a fleet has at most 254 end devices"),
        ("figure3 --ends 1-1000000000 --out {tmp}/run", "'1-1000000000': a fleet has at most 254 end devices"),
        pytest.param(f"figure3 --ends 1-{'9' * 5000} --out {{tmp}}/run", "is not a list of numbers", id="long range"),
        ("figure3 --tasks 1000000000000000000000 --out {tmp}/run", "Invalid value for '--tasks': "),
        (
            "table2 --seed 1000000000000000000000 --out {tmp}/run",
            "Invalid value for '--seed': ",
        ),
        ("chaos --faults 1000000000000000000000 --out {tmp}/run", "Invalid value for '--faults': "),
        ("scale --tasks 1000000000000 --out {tmp}/run", "Invalid value for '--tasks': "),
        pytest.param(f"scale --size {'9' * 5000}/1/1 --out {{tmp}}/run", "has more than 200,000 nodes", id="long size"),
        ("scale --size 000000000000000/1/1 --out {tmp}/run", "is not a fleet"),
        ("table4 --bandwidth 1e-9 --out {tmp}/run", "--bandwidth 1e-09 is too little: take 0.01 at least, or 0"),
        ("report {tmp}/none", "there is no folder '"),
        ("report {tmp}/damaged.json", "is a file; a folder is expected"),
        ("table4 --bandwidth inf --out {tmp}/run", "Invalid value for '--bandwidth': "),
    ],
)
def test_what_is_asked_for_wrongly_ends_with_two_and_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    (tmp_path / "damaged.json").write_text('{"experiment": "fig')
    record = json.loads((RECORDS / "figure3-2026-11-26T150432Z.json").read_text())
    del record["config"]["tasks"]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "figure3.json").write_text(json.dumps(record))
    assert run_terrace(["experiment", *arguments.format(tmp=tmp_path).split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "damaged.json"]


def test_ctrl_c_keeps_what_was_measured_and_ends_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, rows, said = run_all(monkeypatch, tmp_path / "all", well, stopped, failing)
    assert code == 130
    assert rows == {"well": [{"seconds": 1}], "stopped": [{"seconds": 1}]}
    assert "interrupted: stopped: stopped before its end" in said
    states = {path.parent.name: json.loads(path.read_text())["state"] for path in tmp_path.rglob(RECORD)}
    assert states == {"well": "complete", "stopped": "interrupted"}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1-8", list(range(1, 9))), ("0, 2-4,3,254", [0, 2, 3, 4, 254]), ("5-5", [5]), ("6,1", [1, 6])],
)
def test_ranges_and_numbers_are_read_in_order_and_once(text: str, numbers: list[int]) -> None:
    assert TypeAdapter(NodeNumbers).validate_python(text) == tuple(numbers)
