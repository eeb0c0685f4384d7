"""A fleet that serves imported networks, and nodes that have nothing of them but the scheduler's address."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from models.manifest import load_manifest, weights_folder
from terrace.cli import run
from tests.acceptance.fleets import running
from tests.model_sets import COLOURS, colour_network, colour_pictures, colour_set, coloured
from tierkit.client import Client
from tierkit.errors import Forbidden, InvalidInput
from tierkit.testing import service_process, wait_for
from tierkit.types import Health, Tier


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    sure, unsure = colour_network(folder / "sure.onnx"), colour_network(folder / "unsure.onnx", factor=1.0)
    return colour_set(folder / "set", {"end": unsure, "cloud": sure})


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with an encoder and thresholds, made by the commands; the end network takes green for another colour."""
    folder = tmp_path_factory.mktemp("tuned")
    pictures = str(colour_pictures(folder / "pictures", each=8))
    blind = colour_network(folder / "blind.onnx", weights=(1.0, 0.1, 1.0))
    networks = {"end": blind, "edge": colour_network(folder / "edge.onnx"), "cloud": colour_network(folder / "c.onnx")}
    models = colour_set(folder / "set", networks)
    for command in ("cut-encoder", "tune-escalation"):
        given = ["--models", str(models), "--out", str(models), "--dataset", pictures]
        assert run(["models", command, *given]) == 0
    return models


@pytest.fixture(scope="module")
def private_url(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a fleet of the tuned set, whose cloud must not see pixels."""
    folder = tmp_path_factory.mktemp("private")
    more = ("--end", "1", "--untrusted", "cloud", "--port", "0", "--state", str(folder / "state"))
    with running("--models", str(tuned), *more, log=folder / "log") as up:
        found = re.search(r"scheduler  (http://\S+)", up.output)
        assert found is not None
        yield found[1]


@pytest.fixture(scope="module")
def url(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the scheduler of a `terrace up --models` with an end node and a cloud node."""
    folder = tmp_path_factory.mktemp("up")
    counts = ("--end", "1", "--edge", "0", "--cloud", "1", "--port", "0", "--state", str(folder / "state"))
    with running("--models", str(models), *counts, log=folder / "log") as up:
        found = re.search(r"scheduler  (http://\S+)", up.output)
        assert found is not None
        yield found[1]


def test_all_services_of_a_fleet_serve_the_set(url: str, models: Path) -> None:
    pictures = np.stack([coloured(colour) for colour in COLOURS])
    with Client(url) as client:
        job = client.wait(client.submit(pictures, labels=list(COLOURS), scheme="end-cloud"))
        results = list(client.results(job))
        offers = {device.node_id: device.models for device in client.devices()}
    assert [result.label for result in results] == list(COLOURS)
    assert [result.fine and result.fine.label for result in results] == list(COLOURS)
    assert (job.coarse_accuracy, job.fine_accuracy) == (1, 1)
    expected = {f"{entry.tier}-1": (entry.name, entry.sha256) for entry in load_manifest(models).models}
    assert {node: (offer[0]["name"], offer[0]["sha256"]) for node, offer in offers.items()} == expected


async def test_a_node_without_the_set_gets_it_from_the_scheduler(url: str, models: Path, tmp_path: Path) -> None:
    entry = load_manifest(models).default_for("cloud")
    command = ["-m", "terrace", "cloud", "--port", "0", "--scheduler", url, "--node-id", "far"]
    cache = tmp_path / "cache"
    async with service_process([*command, "--cache", str(cache)], ready_file=tmp_path / "ready") as node:
        assert [path.read_bytes() for path in cache.rglob(entry.file)] == [(models / entry.file).read_bytes()]
        async with httpx.AsyncClient(trust_env=False) as http:
            served = (await http.get(f"{node.url}/v2/models/{entry.name}")).json()
        assert served["parameters"]["tier"] == "cloud"


PICTURES = np.stack([coloured(colour) for colour in COLOURS])


def test_an_untrusted_cloud_gets_features_of_the_imported_network(private_url: str) -> None:
    with Client(private_url) as client:
        job = client.wait(client.submit(PICTURES, scheme="end-cloud"))
        assert [result.fine and result.fine.label for result in client.results(job)] == list(COLOURS)
        assert {name.split("/")[0] for name in job.sent} == {"conv1"}, job.sent
        with pytest.raises(Forbidden):
            client.submit(PICTURES, scheme="end-cloud", privacy="none")


def test_only_unsure_images_go_up_in_a_set_without_hierarchy(private_url: str) -> None:
    with Client(private_url) as client:
        job = client.submit(PICTURES, scheme="end-edge", escalate="threshold", escalate_from="end")
        results = list(client.results(client.wait(job)))
    assert [result.label for result in results] == list(COLOURS)
    assert [result.answered_by for result in results] == [Tier.END, Tier.EDGE, Tier.END]


def test_the_command_line_shows_the_answer_that_stands(
    private_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    pictures = colour_pictures(tmp_path / "pictures", each=1)
    classify = ["classify", str(pictures), "--scheduler", private_url, "--scheme", "end-edge"]
    assert run([*classify, "--labels", "folders", "--out", str(tmp_path / "out.csv")]) == 0
    shown = capsys.readouterr().out
    assert "coarse" not in shown
    assert "fine" not in shown
    _, green, _ = (line.split() for line in shown.splitlines() if "/000.png" in line)
    assert green[1] == "green"
    # What the end device took it for is not what stands.
    assert green[-1] == "red"
    with (tmp_path / "out.csv").open() as rows:
        assert {row["true_fine"]: row["label"] for row in csv.DictReader(rows)} == dict(
            zip(COLOURS, COLOURS, strict=True)
        )


def test_adaptive_serves_an_imported_set(private_url: str) -> None:
    with Client(private_url) as client:
        job = client.wait(client.submit(PICTURES, scheme="adaptive"))
        assert [result.label for result in client.results(job)] == list(COLOURS)
        assert job.answered_fine == len(COLOURS)


def test_a_job_that_needs_thresholds_names_the_command_that_makes_them(url: str) -> None:
    command = r"'terrace models tune-escalation --models (\S+) --out \1 --dataset PICTURES' makes it"
    with Client(url) as client, pytest.raises(InvalidInput, match=command):
        client.submit(PICTURES, scheme="end-cloud", escalate="threshold", escalate_from="end")


async def test_a_node_of_other_classes_is_refused(url: str, tmp_path: Path) -> None:
    bundled = ["--models", str(weights_folder())]
    command = ["-m", "terrace", "end", "--port", "0", "--scheduler", url, "--node-id", "stranger", *bundled]
    async with service_process(command, ready_file=tmp_path / "ready") as node:
        await wait_for(lambda: "the scheduler refuses this node" in node.log, what="the refusal")
        assert "answers other classes than this fleet does" in node.log
        with Client(url) as client:
            health = {device.node_id: device.health for device in client.devices()}
            assert health["stranger"] is Health.DEAD


def test_what_the_set_lacks_for_a_node_is_told_before_anything_starts(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    up = ["up", "--models", str(models), "--port", "0", "--state", str(state)]
    assert run(up) == 2
    said = capsys.readouterr().err
    assert "edge-1" in said
    assert "'terrace models import" in said
    assert run([*up, "--edge", "0", "--untrusted", "cloud"]) == 2
    assert "'terrace models cut-encoder of-cloud" in capsys.readouterr().err
    assert run(["up", "--models", str(tmp_path), "--port", "0", "--state", str(state)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert not state.exists()


def test_the_environment_names_the_set_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERRACE_MODELS", str(tmp_path / "nowhere"))
    for command in ("up", "demo"):
        assert run([command]) == 2
        assert "nowhere" in capsys.readouterr().err
