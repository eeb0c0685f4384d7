"""A node process at an emulated speed, asked over an emulated link: both take their time, and the answers are real."""

import time
from pathlib import Path

import numpy as np
import pytest

from experiments.emulation.compute import Answers
from experiments.emulation.links import read_links
from experiments.emulation.middleware import LinkMiddleware
from models.data import read_sample
from models.manifest import load_manifest, weights_folder
from models.session import load_model
from tierkit.http.client import ask, open_client
from tierkit.inference.oip_client import InferOptions, OipClient
from tierkit.testing import service_process
from tierkit.types import Tier
from tierkit.wire.oip import InferRequest, RequestedOutput, Tensor

IMAGES = 5
MS_PER_IMAGE = 20.0
BUSY_S = 0.5


async def test_a_node_at_an_emulated_speed_over_an_emulated_link(tmp_path: Path) -> None:
    entry = load_manifest().default_for(Tier.EDGE)
    images = read_sample().images[:IMAGES]
    model = load_model(entry)
    answers = Answers.compute(model, images)
    answers.save(tmp_path / "answers.npz")
    links = tmp_path / "links.toml"
    links.write_text('[[link]]\nname = "up"\nto = ["127.0.2.0/24"]\ndelay_s = 0.05\n')
    flags = {
        "--host": "127.0.2.1",
        "--port": "0",
        "--model": entry.name,
        "--scheduler": "http://127.0.0.1:9",  # none there: heartbeats fail meanwhile
        "--models": f"{weights_folder()}",
        "--links": f"{links}",
        "--emulate-ms-per-image": f"{MS_PER_IMAGE}",
        "--emulate-answers": f"{tmp_path / 'answers.npz'}",
    }
    command = ["-m", "experiments.emulation", "edge", *(word for flag in flags.items() for word in flag)]
    async with (
        service_process(command, ready_file=tmp_path / "ready") as service,
        open_client(middlewares=[LinkMiddleware(read_links(links))]) as http,
    ):
        assert "EMULATED COMPUTE is active" in service.log
        assert service.log.count("EMULATED LINKS are active") == 1
        async with ask(http, "GET", f"{service.url}/v2/models/{entry.name}") as answer:
            metadata = await answer.json()
        assert metadata["parameters"]["emulated_ms_per_image"] == MS_PER_IMAGE
        request = InferRequest(inputs=(Tensor("images", images),), outputs=(RequestedOutput("logits"),))
        started = time.perf_counter()
        response = await OipClient(http).infer(service.url, entry.name, request, InferOptions(budget_s=10))
        spent_s = time.perf_counter() - started
    logits = response.output("logits")
    assert logits is not None
    assert np.array_equal(logits, model.run({"images": images}, ["logits"])["logits"])
    expected_s = 2 * 0.05 + IMAGES * MS_PER_IMAGE / 1000
    assert expected_s <= spent_s < expected_s + BUSY_S


async def test_answers_that_are_not_there_stop_the_node_with_a_sentence(tmp_path: Path) -> None:
    command = [
        "-m",
        "experiments.emulation",
        "edge",
        "--port",
        "0",
        "--emulate-ms-per-image",
        "5",
        "--emulate-answers",
        "/nowhere.npz",
    ]
    async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as service:
        assert await service.exit_code() == 2
    assert "cannot use the file of answers /nowhere.npz" in service.log


async def test_links_that_are_wrong_stop_the_node_with_a_sentence(tmp_path: Path) -> None:
    links = tmp_path / "links.toml"
    links.write_text('[[link]]\nname = "up"\nto = ["x"]\ndelay = 1\n')
    command = ["-m", "experiments.emulation", "end", "--port", "0", "--links", str(links)]
    async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as service:
        assert await service.exit_code() == 2
    assert "link.0.delay is unknown; did you mean delay_s?" in service.log


@pytest.mark.parametrize("words", [[], ["house"], ["--help"]])
async def test_a_command_that_names_no_service_says_which_there_are(words: list[str], tmp_path: Path) -> None:
    command = ["-m", "experiments.emulation", *words]
    async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as service:
        assert await service.exit_code() == 2
    assert "name a service first: scheduler, end, edge, cloud" in service.log


async def test_answers_for_a_model_that_is_not_emulated_are_refused(tmp_path: Path) -> None:
    command = ["-m", "experiments.emulation", "end", "--emulate-answers", "answers.npz"]
    async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as service:
        assert await service.exit_code() == 2
    assert "the flag --emulate-answers is 'answers.npz': needs emulate_ms_per_image as well" in service.log
