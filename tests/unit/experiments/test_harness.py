"""What every run of an experiment keeps to: folders, records, interruptions. The experiments here measure nothing."""

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from experiments import plots as plots_module, record as record_module
from experiments.escalation import ESCALATION
from experiments.figure3 import FIGURE3
from experiments.harness import (
    RECORD,
    Experiment,
    Log,
    Options,
    Record,
    Request,
    Run,
    Table,
    circumstances,
    execute,
    extent,
    new_folder,
    option,
    publish,
)
from experiments.plots import Figures, bound, formula, measured, paper
from experiments.profile import read_profile
from experiments.record import read_record
from experiments.table1 import TABLE3
from experiments.table2 import TABLE2
from experiments.table4 import TABLE4
from experiments.table5 import TABLE5
from tierkit.atomic import write_atomically
from tierkit.commandline import asked_wrongly
from tierkit.errors import DeadlineExceeded, InvalidInput, SetupError
from tierkit.fleet import Exit, FleetPlan, LaunchOptions

REQUEST = Request(profile_name="paper", profile=read_profile("paper"), seed=3, quick=True)


class TwoPoints(Experiment):
    """Two points."""

    name = "two"
    quick = "{share}, fewer points"

    async def measure(self, run: Run, chosen: Any) -> None:
        run.config["note"] = "two points"
        run.expect(2)
        for value in (1.0, 2.0):
            with run.step(f"point {value}"):
                run.add(x=value, seconds=value)

    def rows(self, record: Record) -> list[dict[str, float]]:
        return [{"x": point["x"], "twice": 2 * point["seconds"]} for point in record["points"]]

    def table(self, record: Record) -> Table:
        rows = [[str(row["x"]), str(row["twice"])] for row in self.rows(record)]
        return Table(headings="x | twice", rows=rows)

    def draw(self, record: Record, figures: Figures) -> None:
        left, right = figures.panels("curve", ["left", "right"], xlabel="x", ylabel="time (s)")
        xs = [point["x"] for point in record["points"]]
        left.plot(xs, xs, label="ours", **measured(0))
        left.plot(xs, xs, label="paper", **paper(0))
        right.plot(xs, xs, label="bound", **bound())
        right.plot(xs, xs, label="formula", **formula(1))


EXPERIMENT = TwoPoints()


def measured_by(measure: Callable[[Run], Awaitable[None]]) -> Experiment:
    """The same, measured in another way."""

    class Other(TwoPoints):
        async def measure(self, run: Run, chosen: Any) -> None:
            await measure(run)

    return Other()


def ignore(label: str, done: int, steps: int) -> None: ...


async def test_a_run_leaves_record_table_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    told: list[tuple[str, int, int]] = []
    outcome = await execute(EXPERIMENT, REQUEST, tmp_path / "run", lambda *words: told.append(words))
    assert {path.name for path in outcome.folder.iterdir()} == {
        RECORD,
        "table.md",
        "curve.png",
        "curve.svg",
        "services.log",
    }
    record = read_record(outcome.folder / RECORD)
    assert (record["state"], record["seed"], record["experiment"]) == ("complete", 3, "two")
    assert record["points"] == [{"x": 1.0, "seconds": 1.0}, {"x": 2.0, "seconds": 2.0}]
    assert record["config"]["profile"]["compute_ms_per_image"]["end"] == 7.41
    assert (record["config"]["tasks"], record["config"]["note"]) == (40, "two points")
    assert record["results"]["rows"][1] == {"x": 2.0, "twice": 4.0}
    text = (outcome.folder / "table.md").read_text()
    assert "| 2.0 | 4.0 |" in text
    assert "; n = 1 for each row (runs); a quick run: a fifth of the test set, fewer points." in text
    assert told == [("point 1.0", 0, 2), ("point 2.0", 1, 2)]


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "end-1 was killed by SIGKILL"), (2, "end-1 stopped with exit code 2"), (0, "end-1 stopped with exit code 0")],
)
def test_the_end_of_a_service_is_told_with_what_it_said_of_it(code: int, words: str) -> None:
    end = Exit(name="end-1", code=code, last_lines=("started", "the port is taken"))
    said = "; it said: the port is taken" if code == 2 else ""
    moment = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert f"{end}{circumstances(end, moment)}" == f"{words}, at 03:04:05 UTC{said}"


async def test_table_and_plots_come_from_the_record_alone(tmp_path: Path) -> None:
    outcome = await execute(EXPERIMENT, REQUEST, tmp_path / "run", ignore)
    first = {path.name: path.read_bytes() for path in outcome.folder.iterdir()}
    for name in first:
        if name != RECORD:
            (outcome.folder / name).unlink()
    publish(EXPERIMENT, outcome.folder)
    assert {path.name for path in outcome.folder.iterdir()} == set(first) - {"services.log"}
    assert (outcome.folder / "table.md").read_bytes() == first["table.md"]


async def test_a_stopped_run_keeps_what_it_has_measured(tmp_path: Path) -> None:
    async def stopped(run: Run) -> None:
        run.add(x=1.0, seconds=1.0)
        running.cancel()
        await asyncio.Event().wait()

    running = asyncio.create_task(execute(measured_by(stopped), REQUEST, tmp_path / "run", ignore))
    record = (await running).record
    assert (record["state"], len(record["points"])) == ("interrupted", 1)
    assert "**This run is interrupted.**" in (tmp_path / "run" / "table.md").read_text()
    assert list((tmp_path / "run").glob("*.png")) == []  # whoever has stopped it waits for no plots


@pytest.mark.parametrize("beside_other_work", [False, True])
async def test_a_failure_after_the_first_point_marks_the_run_invalid(tmp_path: Path, beside_other_work: bool) -> None:
    async def late() -> None:
        raise DeadlineExceeded("the job was not done within 9 s")

    async def failing(run: Run) -> None:
        run.add(x=1.0, seconds=1.0)
        if not beside_other_work:
            await late()
        async with asyncio.TaskGroup() as group:
            group.create_task(late())

    record = (await execute(measured_by(failing), REQUEST, tmp_path / "run", ignore)).record
    assert (record["state"], record["notes"][1:]) == ("invalid", ["the job was not done within 9 s"])
    assert record["notes"][0].startswith("profile paper: The paper's testbed: 8 end, 4 edge, 1 cloud; links, one way: ")


async def test_a_failure_before_the_first_point_is_an_error(tmp_path: Path) -> None:
    async def failing(run: Run) -> None:
        raise DeadlineExceeded("not ready")

    with pytest.raises(DeadlineExceeded, match="not ready"):
        await execute(measured_by(failing), REQUEST, tmp_path / "run", ignore)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_told_of_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"cannot make the folder .*file/run: Not a directory"):
        new_folder(tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("name", "stands"), [(".", "here-2"), ("..", "above-2"), ("../here", "here-2"), ("new/..", "here-2")]
)
def test_a_folder_that_is_meant_by_dots_is_kept_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stands: str
) -> None:
    here = tmp_path / "above" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    assert new_folder(Path(name)).resolve() in {tmp_path / stands, tmp_path / "above" / stands}
    assert list(here.iterdir()) == []


def test_nothing_stands_beside_the_root() -> None:
    with pytest.raises(SetupError, match="/ cannot hold a run, and no folder can be made next to it"):
        new_folder(Path("/"))


@pytest.mark.parametrize(
    ("quick", "tasks", "words"),
    [
        (True, None, "n = 1 for each row (runs); a quick run: a fifth of the test set, fewer points"),
        (True, 8, "n = 1 for each row (runs); a quick run: 8 tasks, fewer points"),
        (False, 8, "n = 1 for each row (runs)"),
    ],
)
async def test_a_quick_run_says_how_much_of_the_test_set_it_took(
    tmp_path: Path, quick: bool, tasks: int | None, words: str
) -> None:
    asked = replace(REQUEST, quick=quick, tasks=tasks)
    assert extent(EXPERIMENT, (await execute(EXPERIMENT, asked, tmp_path / "run", ignore)).record) == words


@pytest.mark.parametrize(
    ("experiment", "config", "words"),
    [
        (TABLE2, {"tasks_per_row": 10}, "10 tasks for each row"),
        (TABLE3, {}, ""),
        (TABLE4, {"tasks_per_cell": 2}, "2 tasks for each cell, fewer links unless chosen"),
        (FIGURE3, {}, "a fifth of the test set, fewer points unless chosen"),
    ],
    ids=lambda value: value.name if isinstance(value, Experiment) else "",
)
def test_a_quick_run_says_what_it_took_of_its_own_experiment(
    experiment: Experiment, config: dict[str, Any], words: str
) -> None:
    profile = REQUEST.profile.model_dump(mode="json")
    record = {"config": {**config, "profile": profile, "quick": True, "tasks": 40}, "points": []}
    assert extent(experiment, record).partition("; ")[2] == (f"a quick run: {words}" if words else "")


@pytest.mark.parametrize("beside_other_work", [False, True])
async def test_a_service_that_dies_before_the_first_point_leaves_an_invalid_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside_other_work: bool
) -> None:
    @asynccontextmanager
    async def dying(plan: FleetPlan, folder: Path, options: LaunchOptions) -> AsyncIterator[None]:
        assert options.on_exit is not None
        options.on_exit(Exit(name="end-1", code=-9, last_lines=()))
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr("experiments.harness.launch", dying)

    async def launching(run: Run) -> None:
        async with run.launched(FleetPlan(services=()), tmp_path):
            run.add(x=1.0, seconds=1.0)

    async def measure(run: Run) -> None:
        if not beside_other_work:
            await launching(run)
        async with asyncio.TaskGroup() as group:
            group.create_task(launching(run))

    record = (await execute(measured_by(measure), REQUEST, tmp_path / "run", ignore)).record
    assert (record["state"], record["points"]) == ("invalid", [])
    assert record["notes"][-1].startswith("end-1 was killed by SIGKILL during the measurement, at ")
    assert "**This run is invalid.**" in (tmp_path / "run" / "table.md").read_text()


@pytest.mark.parametrize(
    "experiment",
    [TABLE2, TABLE4, TABLE5, FIGURE3, ESCALATION],
    ids=lambda one: one.name,
)
async def test_what_is_stopped_before_its_first_point_leaves_a_record_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: Experiment
) -> None:
    monkeypatch.setattr("experiments.harness.measure_networks", lambda *arguments: [])
    running = asyncio.create_task(execute(experiment, REQUEST, tmp_path / "run", ignore))
    asyncio.get_running_loop().call_soon(running.cancel)  # when it waits for the first time
    outcome = await running
    assert (outcome.record["state"], outcome.record["points"]) == ("interrupted", [])
    # `--json` prints the only row of such an experiment.
    assert outcome.record["results"]["rows"] or not experiment.one_row


@pytest.mark.parametrize("experiment", [FIGURE3, TABLE5], ids=lambda one: one.name)
async def test_a_profile_without_speeds_is_refused_where_they_are_needed(
    tmp_path: Path, experiment: Experiment
) -> None:
    native = Request(profile_name="native", profile=read_profile("native"))
    with pytest.raises(InvalidInput, match=r"says nothing of the tier end: give it compute_ms_per_image\.end"):
        await execute(experiment, native, tmp_path / "run", ignore)


@pytest.mark.parametrize("experiment", [FIGURE3, ESCALATION], ids=lambda one: one.name)
async def test_a_profile_without_upper_nodes_is_refused_where_they_are_needed(
    tmp_path: Path, experiment: Experiment
) -> None:
    lone = replace(REQUEST, profile=REQUEST.profile.with_nodes(cloud=0))
    with pytest.raises(InvalidInput, match=r"nodes\.cloud of the profile is 0"):
        await execute(experiment, lone, tmp_path / "run", ignore)


@pytest.mark.parametrize("ends", [[0], [8, 9], [255]], ids=str)
@pytest.mark.parametrize("experiment", [FIGURE3], ids=lambda experiment: experiment.name)
async def test_a_point_for_end_devices_that_the_profile_has_not_is_refused(
    tmp_path: Path, experiment: Any, ends: list[int]
) -> None:
    words = rf"8 end devices \(nodes\.end\), so a point is for 1 to 8, not for {ends[-1]}$"
    with pytest.raises(InvalidInput, match=words):
        await execute(experiment, REQUEST, tmp_path / "run", ignore, experiment.options(ends=ends))


def test_a_folder_that_exists_is_kept_and_the_run_stands_beside_it(tmp_path: Path) -> None:
    first = new_folder(tmp_path / "deep" / "run")
    (first / "mine").touch()
    assert new_folder(first) == tmp_path / "deep" / "run-2"
    assert new_folder(first) == tmp_path / "deep" / "run-3"
    assert [path.name for path in first.iterdir()] == ["mine"]


def fill_disk(monkeypatch: pytest.MonkeyPatch, module: Any, folder: Path, name: str = "") -> None:
    """Leave no room for files of that name, or for any, in the folder."""

    def write(path: Path, content: bytes) -> None:
        if path.parent == folder and name in path.name:
            raise SetupError(f"cannot write {path}: No space left on device") from OSError(
                errno.ENOSPC, "No space left"
            )
        write_atomically(path, content)

    monkeypatch.setattr(module, "write_atomically", write)


async def test_a_record_that_has_no_room_in_its_folder_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fill_disk(monkeypatch, record_module, tmp_path / "run")
    with pytest.raises(SetupError) as caught:
        await execute(EXPERIMENT, REQUEST, tmp_path / "run", ignore)
    said, _, kept = str(caught.value).partition("; the record is ")
    assert said == f"cannot write {tmp_path / 'run' / RECORD}: No space left on device"
    assert [point["seconds"] for point in read_record(Path(kept))["points"]] == [1.0, 2.0]
    assert not asked_wrongly(caught.value)


async def test_a_plot_that_has_no_room_leaves_a_whole_record_and_says_how_to_make_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    folder = tmp_path / "my run"
    fill_disk(monkeypatch, plots_module, folder, ".png")
    with pytest.raises(SetupError) as caught:
        await execute(EXPERIMENT, REQUEST, folder, ignore)
    assert (
        f"No space left on device; {folder / RECORD} is whole, and `terrace experiment report '{folder}'` makes"
        in str(caught.value)
    )
    assert not asked_wrongly(caught.value)
    assert read_record(folder / RECORD)["state"] == "complete"


async def test_a_disk_that_fills_up_during_a_measurement_leaves_what_was_measured(tmp_path: Path) -> None:
    async def measure(run: Run) -> None:
        run.add(x=1.0, seconds=1.0)
        raise OSError(errno.ENOSPC, "No space left on device")

    outcome = await execute(measured_by(measure), REQUEST, tmp_path / "run", ignore)
    assert (outcome.record["state"], len(outcome.record["points"])) == ("invalid", 1)
    assert "No space left on device" in outcome.record["notes"][-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_log_without_room_says_so_and_stops_nothing() -> None:
    log = Log(Path("/dev/full"))
    for _ in range(2):
        log.write("x" * 10_000)
    log.close()
    assert log.lost == "No space left on device"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"experiment": "two", "con', "is not a whole record"),
        pytest.param("[" * 100_000, "is not a whole record", id="brackets"),
        ("[]", "is not a record of an experiment: it is not a table of fields"),
        (
            json.dumps({"experiment": "x", "config": {}, "state": "complete"}),
            "it has no command, commit, host, measured_at, notes, points, results",
        ),
    ],
)
def test_a_damaged_record_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / RECORD
    path.write_text(text)
    with pytest.raises(SetupError, match=sentence):
        read_record(path)


def test_a_record_that_is_not_there_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot read the record"):
        read_record(tmp_path / RECORD)


class Two(Options):
    runs: int = option(1000, "Runs.", quick=5)
    parts: list[float] = option([0.5, 1.0], "Parts.", quick=[0.5])
    left: int = option(7, "Left.")


@pytest.mark.parametrize(
    ("chosen", "quick", "expected"),
    [({}, False, (1000, [0.5, 1.0], 7)), ({}, True, (5, [0.5], 7)), ({"runs": 1000}, True, (1000, [0.5], 7))],
)
def test_a_quick_run_has_smaller_defaults_for_what_was_not_chosen(
    chosen: dict[str, Any], quick: bool, expected: tuple[Any, ...]
) -> None:
    settled = Two(**chosen).settled(quick=quick)
    assert (settled.runs, settled.parts, settled.left) == expected
    assert Two.model_fields["runs"].description == "Runs. Default: 1,000; 5 with --quick."
    assert Two.model_fields["parts"].description == "Parts. Default: 0.5, 1; 0.5 with --quick."
