"""Each experiment, as small as it can be: real services, a few seconds."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.harness import RECORD, Experiment, Record, Request, Run, Table, execute
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
    # A device has to fall silent while it computes: slow enough for a busy machine.
    Path(profile).write_text(PROFILE.replace("end = 3.0", "end = 6.0"))
    options = ["--profile", profile, "--tasks", "18", "--failures", "0,1", "--out", str(tmp_path / "run")]
    rows = run("table5", "--quick", *options)
    assert [(row["method"], row["failures"], row["runs"]) for row in rows] == [
        (method, failures, 1) for method in ("none", "reassign", "monitor") for failures in (0, 1)
    ]
    none, failed, _, reassigned, whole, shrunk = rows
    assert none["seconds"] >= none["ideal_seconds"] == pytest.approx(1.8)
    assert failed["seconds"] is None
    assert "recovery=none" in failed["reason"]
    # Three tasks from the silent device, 15 from the two others.
    assert shrunk["ideal_seconds"] == pytest.approx(15 / 2 * 0.3, abs=1e-3)
    assert shrunk["seconds"] >= shrunk["ideal_seconds"]
    assert whole["ratio"] >= 1
    assert reassigned["unacknowledged_sends"] > 0
    assert reassigned["seconds"] > reassigned["eq9_seconds"]
    points = json.loads((tmp_path / "run" / RECORD).read_text())["points"]
    (doomed,) = points[-1]["doomed"]
    assert points[-1]["images_by_node"][doomed] < min(points[0]["images_by_node"].values())
    assert points[-1]["answered_images"] == 900


def test_table1(profile: str, tmp_path: Path) -> None:
    rows = run("table1", "--tasks", "8", "--out", str(tmp_path / "run"))
    assert [row["made_for"] for row in rows] == ["end", "edge", "cloud"]
    assert all(row["ms_per_image"]["end"] > 0 and row["runs"]["end"] == 8 for row in rows)
    assert rows[0]["fine_accuracy"] is None
    assert 0.5 < rows[1]["fine_accuracy"] < rows[1]["coarse_accuracy"] < 1
    points = json.loads((tmp_path / "run" / RECORD).read_text())["points"]
    assert all(point["ms_per_image"] or point["unmeasured"] for point in points)


def test_table2(profile: str, tmp_path: Path) -> None:
    machines = tmp_path / "mixed.toml"
    machines.write_text(PROFILE.replace("cloud = 2.0\n", ""))
    rows = run("table2", "--profile", str(machines), "--tasks", "2", "--out", str(tmp_path / "run"))
    assert [(row["tier"], row["link_s"]) for row in rows] == [
        ("end", 0.0),
        ("edge", 0.0),
        ("cloud", 0.0),
        ("edge", 0.04),
        ("cloud", 0.08),
    ]
    end, edge, cloud, far_edge, far_cloud = rows
    # What the nodes measured: an emulated network takes its time, and a busy machine may add to that.
    assert all(row["inference_ms_per_image"] >= ms for row, ms in ((end, 3.0), (edge, 2.0), (far_edge, 2.0)))
    assert all(row["inference_ms_per_image"] > 0 for row in (cloud, far_cloud))
    assert all(row["tasks"] == 2 for row in rows)
    # And it measured the very tasks that the scheduler saw.
    points = json.loads((tmp_path / "run" / RECORD).read_text())["points"]
    assert all(point["images"] == len(point["stage_ms"]) * 50 for point in points)
    # An upstream node's time is that between two lines at the scheduler: a busy machine may read the first one late.
    assert end["overhead_ms_per_task"] > 0
    assert all(row["overhead_ms_per_task"] > -20 for row in rows)


def test_table3(tmp_path: Path) -> None:
    rows = run("table3", "--out", str(tmp_path / "run"))
    assert [(row["shape"], row["parameters"]) for row in rows] == [([16, 16, 64], 9472), ([32, 32, 16], 432)]


def test_table4(profile: str, tmp_path: Path) -> None:
    real = tmp_path / "real.toml"  # tails are not emulated: they must be allowed to take their time
    real.write_text(PROFILE.partition("[compute_ms_per_image]")[0] + "[compute_ms_per_image]\nend = 5.0\n")
    options = ["--profile", str(real), "--tasks", "1", "--latency", "0.03", "--bandwidth", "0"]
    rows = run("table4", *options, "--out", str(tmp_path / "run"))
    assert [(row["encode_on"], row["upper"], row["network"], row["tasks"]) for row in rows] == [
        ("end", "cloud", "wrn-16-4", 1),
        ("edge", "cloud", "wrn-16-4", 1),
        ("auto", "cloud", "wrn-16-4", 1),
        ("end", "edge", "resnet-34", 1),
    ]
    assert rows[2]["encoded_on_edge"] in (0, 1)
    assert rows[2]["of_better"] > 0
    assert all(row["ms_without"] > 30 and row["ms_with"] > 30 and row["encoding_ms"] > 0 for row in rows)
    # The end device is emulated, many times slower than this machine, and so are its heads.
    assert rows[0]["slowness"] > 2
    assert rows[1]["slowness"] is None
    assert [round(row["upload_bytes_without"] / 50) for row in rows] == [pytest.approx(3072, rel=0.02)] * 4
    # Where the edge node encodes it gets the pixels as well.
    assert rows[1]["upload_bytes_with"] == pytest.approx(rows[0]["upload_bytes_with"] + 50 * 3072, rel=0.01)


def test_figure3(profile: str, tmp_path: Path) -> None:
    options = ["--profile", profile, "--tasks", "8", "--ends", "2", "--window", "4", "--out", str(tmp_path / "run")]
    rows = run("figure3", *options)
    assert [row["series"] for row in rows] == [
        "end",
        "end-cloud",
        "end-edge",
        "mapping, N_map 1",
        "mapping, N_map by Eq. 4",
        "adaptive",
    ]
    # Two of three end devices: the third one is drained.
    assert rows[0]["bound_seconds"] == pytest.approx(8 / 2 * 0.15)
    assert all(row["seconds"] >= row["bound_seconds"] and row["fallback"] == 0 for row in rows)
    assert [row["fine_accuracy"] is None for row in rows] == [True, False, False, False, False, False]
    assert rows[1]["cloud_share"] == 1.0
    points = json.loads((tmp_path / "run" / RECORD).read_text())["points"]
    assert all(point["images_by_tier"]["end"] == 400 for point in points)
    # The encoder is on, as in the paper.
    assert [point["tasks_by_form"] for point in points] == [{}, *[{"conv1": 8}] * 5]


def test_escalation(profile: str, tmp_path: Path) -> None:
    options = ["--profile", profile, "--tasks", "8", "--budget", "0.5", "--out", str(tmp_path / "run")]
    rows = run("escalation", *options)
    assert [row["choice"] for row in rows] == [
        "end only",
        "all to the edge",
        "all to the cloud",
        "budget 0.5, from edge",
        "budget 0.5, from end",
    ]
    assert [(row["to_edge"], row["to_cloud"]) for row in rows[:3]] == [(0, 0), (1, 0), (0, 1)]
    end, edge, cloud, from_edge, from_end = rows
    assert from_edge["to_edge"] == 1.0
    assert 0.4 < from_edge["to_cloud"] < 0.6
    assert from_end["to_cloud"] < from_end["to_edge"] < 0.6
    assert from_edge["upload_bytes_per_image"] == pytest.approx(3072 * (1 + from_edge["to_cloud"]), abs=0.2)
    assert edge["fine_accuracy"] < from_edge["fine_accuracy"]
    assert end["coarse_accuracy"] < from_end["coarse_accuracy"] < cloud["coarse_accuracy"] + 0.05
    assert from_edge["random_fine_accuracy"] < from_edge["promised_fine_accuracy"] < from_edge["oracle_fine_accuracy"]
    assert all(row["fallback"] == 0 for row in rows)
    assert {path.name for path in (tmp_path / "run").glob("*.svg")} == {"escalation.svg", "escalation-cost.svg"}


def test_scale(tmp_path: Path) -> None:
    key = {"scheme": "end-edge", "by_formula": False, "window": 6, "ends": 8}
    record = {
        "experiment": "figure3",
        "state": "complete",
        "config": {"tasks": 40, "profile": {"name": "paper", **read_profile("paper").model_dump(mode="json")}},
        "points": [{**key, "seconds": 4.0}],
        "host": {"cpu": "a processor", "cores": 1, "python": "3.11.7", "terrace": "0.1.0"},
        "results": {},
        "samples": {},
        "seed": 0,
        "notes": [],
        "command": ["terrace"],
        "commit": None,
        "measured_at": "2030-01-01T00:00:00+00:00",
    }
    (tmp_path / "figure3.json").write_text(json.dumps(record))
    options = ["--against", str(tmp_path / "figure3.json"), "--out", str(tmp_path / "run")]
    chosen = ["--scheme", "mapping", "--scheme", "end", "--scheme", "adaptive"]
    compared, grown, alone, planned = run("scale", "--size", "40/2/1", "--tasks", "200", *chosen, *options)
    assert (compared["series"], compared["seconds"]) == ("end-edge", 4.0)
    assert compared["simulated_seconds"] == pytest.approx(0.374 + 0.5 + 10 * 0.2995, rel=0.02)
    assert (grown["nodes"], grown["tasks"], grown["answers"]) == (43, 200, {"fine": 200})
    assert grown["seconds"] >= grown["bound_seconds"]
    assert alone["answers"] == {"coarse": 200}
    # With the best split of its fleet; the one that came about would say that the job was as quick as it could be.
    assert planned["seconds"] > 1.005 * planned["bound_seconds"]
    assert {path.stem for path in (tmp_path / "run").glob("*.svg")} == {"scale", "scale-makespan", "scale-validation"}


class Dying(Experiment):
    """A node dies."""

    name = "dying"

    async def measure(self, run: Run, chosen: Any) -> None:
        machines = run.profile.with_nodes(end=1, edge=0, cloud=0)
        async with run.fleet(machines, await run.networks(machines)) as (fleet, client):
            run.add(devices=len(await client.devices()))
            fleet.services["end-1"].process.send_signal(signal.SIGKILL)
            await fleet.changed.wait()
            while True:  # the run is ended from outside
                await client.devices()

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return list(record["points"])

    def table(self, record: Record) -> Table:
        return Table(headings="devices", rows=[])


async def test_a_service_that_dies_makes_the_run_invalid(profile: str, tmp_path: Path) -> None:
    request = Request(profile_name="small", profile=read_profile(profile), tasks=8)
    outcome = await execute(Dying(), request, tmp_path / "run", lambda *words: None)
    assert outcome.record["state"] == "invalid"
    assert outcome.record["points"] == [{"devices": 1}]
    # Who, how and when; what it said last has nothing to do with it.
    note = outcome.record["notes"][-1]
    assert re.fullmatch(r"end-1 was killed by SIGKILL during the measurement, at \d\d:\d\d:\d\d UTC", note)
    assert "emulated 3 ms/image" in " ".join(outcome.record["notes"])
    assert f"{Tier.END}-1" in (tmp_path / "run" / "services.log").read_text()


def test_names_that_are_wrong_bring_the_closest_one() -> None:
    result = CliRunner().invoke(app, ["tabel5"])
    assert result.exit_code == 2
    assert "table5" in result.output
