"""Each experiment, as small as it can be: real services, a few seconds."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.harness import RECORD, Experiment, Record, Request, Run, Table, execute
from experiments.plots import Figures
from experiments.profile import read_profile
from terrace.commands.experiment import app
from tierkit.types import Tier

PROFILE = """
title = "small and fast"
source = "for tests"
[nodes]
end = 3
edge = 1
cloud = 1
[compute_ms_per_image]
end = 3.0
edge = 2.0
cloud = 2.0
[path.end-edge]
delay_s = 0.02
[path.end-cloud]
delay_s = 0.04
"""


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile of one's own; the experiments use the bundled sample."""
    monkeypatch.delenv("TERRACE_DATA", raising=False)
    path = tmp_path / "small.toml"
    path.write_text(PROFILE)
    return str(path)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_table5(profile: str, tmp_path: Path) -> None:
    options = [
        "--profile",
        profile,
        "--tasks",
        "18",
        "--runs",
        "1",
        "--failures",
        "0,1",
        "--out",
        str(tmp_path / "run"),
    ]
    rows = run("table5", "--method", "none", "--method", "monitor", *options)
    assert [(row["method"], row["failures"], row["runs"]) for row in rows] == [
        ("none", 0, 1),
        ("none", 1, 1),
        ("monitor", 0, 1),
        ("monitor", 1, 1),
    ]
    none, failed, whole, shrunk = rows
    assert none["seconds"] >= none["ideal_seconds"] == pytest.approx(0.9)
    assert failed["seconds"] is None
    assert "recovery=none" in failed["reason"]
    # Three tasks from the silent device, fifteen from the two others.
    assert shrunk["ideal_seconds"] == pytest.approx(15 / 2 * 0.15, abs=1e-3)
    assert shrunk["seconds"] >= shrunk["ideal_seconds"]
    assert whole["seconds"] < shrunk["seconds"]
    points = json.loads((tmp_path / "run" / RECORD).read_text())["points"]
    (doomed,) = points[-1]["doomed"]
    assert points[-1]["images_by_node"][doomed] == 150
    assert points[-1]["answered_images"] == 900


async def test_a_service_that_dies_makes_the_run_invalid(profile: str, tmp_path: Path) -> None:
    async def measure(run: Run) -> None:
        machines = run.profile.with_nodes(end=1, edge=0, cloud=0)
        async with run.fleet(machines, run.networks(machines)) as (fleet, client):
            run.add(devices=len(await client.devices()))
            fleet.services["end-1"].process.send_signal(signal.SIGKILL)
            await fleet.changed.wait()
            while True:  # the run is ended from outside
                await client.devices()

    def rows(record: Record) -> list[dict[str, Any]]:
        return list(record["points"])

    def draw(record: Record, figures: Figures) -> None: ...

    experiment = Experiment(
        name="dying",
        summary="a node dies",
        measure=measure,
        rows=rows,
        table=lambda record: Table(headings=("devices",), rows=[]),
        draw=draw,
    )
    request = Request(profile_name="small", profile=read_profile(profile), tasks=8)
    outcome = await execute(experiment, request, tmp_path / "run", lambda *words: None)
    assert outcome.record["state"] == "invalid"
    assert outcome.record["points"] == [{"devices": 1}]
    assert "end-1 was killed by SIGKILL during the measurement" in outcome.record["notes"][-1]
    assert "emulated 3 ms/image" in " ".join(outcome.record["notes"])
    assert f"{Tier.END}-1" in (tmp_path / "run" / "services.log").read_text()


def test_names_that_are_wrong_bring_the_closest_one() -> None:
    result = CliRunner().invoke(app, ["tabel5"])
    assert result.exit_code == 2
    assert "table5" in result.output
