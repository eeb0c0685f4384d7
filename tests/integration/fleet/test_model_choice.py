"""A fleet whose model set has several networks for a tier: each node chooses one, and all answers are right."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from models.importing.run import Wish, import_network
from models.manifest import load_manifest
from terrace.cli import run
from tests.acceptance.fleets import running
from tests.model_sets import COLOURS, colour_network, colour_set, coloured
from tierkit.client import Client
from tierkit.testing import service_process, wait_for
from tierkit.types import Tier


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with two end networks of unknown accuracy, of which the second one has more parameters."""
    folder = tmp_path_factory.mktemp("several")
    networks = {"end": colour_network(folder / "a.onnx"), "cloud": colour_network(folder / "c.onnx")}
    models = colour_set(folder / "set", networks)
    with mock.patch("models.importing.run.least_ms_per_image", return_value=1.0):
        for name, tier in (("large", Tier.END), ("huge", Tier.CLOUD)):
            file = colour_network(folder / f"{name}.onnx", grow=10)
            import_network(Wish(file=file, models=models, tier=tier, labels=models.parent / "set.txt", name=name))
    return models


@pytest.fixture(scope="module")
def fleet(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL of the scheduler, and the log of `terrace up --models`."""
    folder = tmp_path_factory.mktemp("up")
    counts = ("--end", "1", "--edge", "0", "--cloud", "1", "--port", "0", "--state", str(folder / "state"))
    with running("--models", str(models), *counts, log=folder / "log") as up:
        found = re.search(r"scheduler  (http://\S+)", up.output)
        assert found is not None
        yield found[1], up.output


def test_each_node_serves_the_network_that_it_chooses_and_says_why(fleet: tuple[str, str]) -> None:
    url, log = fleet
    with Client(url) as client:
        networks = {device.node_id: device.network for device in client.devices()}
    assert networks == {"end-1": "large", "cloud-1": "huge"}
    assert "of-end or large" in log
    assert re.search(r"network chosen .*network=large", log)
    assert "of-end: the chosen one is better" in log


def test_the_list_shows_how_fast_the_networks_are_on_the_nodes(
    fleet: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "list", "--wide", "--json", "--scheduler", fleet[0]]) == 0
    speeds = {entry["name"]: entry["ms_per_image"] for entry in json.loads(capsys.readouterr().out)["models"]}
    assert {name for name, speed in speeds.items() if speed is not None} == {"large", "huge"}
    assert all(speed is None or speed > 0 for speed in speeds.values())


async def test_nodes_of_one_tier_with_other_networks_answer_rightly(
    fleet: tuple[str, str], models: Path, tmp_path: Path
) -> None:
    url, _ = fleet
    command = ["-m", "terrace", "end", "--port", "0", "--scheduler", url, "--node-id", "small", "--model", "of-end"]
    async with service_process([*command, "--cache", str(tmp_path)], ready_file=tmp_path / "ready"):
        with Client(url) as client:

            def both_work() -> bool:
                alive = {device.node_id: device.network for device in client.devices() if device.tier is Tier.END}
                return alive == {"end-1": "large", "small": "of-end"}

            await wait_for(both_work)
            pictures = np.stack([coloured(colour) for colour in COLOURS] * 20)
            job = client.wait(client.submit(pictures, labels=list(COLOURS) * 20, scheme="end-cloud", batch_size=3))
            results = list(client.results(job))
    assert (job.coarse_accuracy, job.fine_accuracy) == (1, 1)
    digests = {entry.name: entry.sha256 for entry in load_manifest(models).models}
    answered = {result.coarse.sha256 for result in results if result.coarse is not None}
    assert answered <= {digests["large"], digests["of-end"]}
    assert {result.fine and result.fine.sha256 for result in results} == {digests["huge"]}
