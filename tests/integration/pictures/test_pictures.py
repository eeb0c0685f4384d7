"""Pictures of any size through a fleet whose networks see different sizes: real services, real files."""

from __future__ import annotations

import asyncio
import io
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from PIL import Image

from terrace.cli import run
from tests.model_sets import COLOURS, encoded_set, wide_picture
from tierkit.client import (
    AsyncClient,
    CoarseResults,
    FineResults,
    ImageResult,
    Job,
    JobState,
    StateChange,
)
from tierkit.errors import Forbidden, InvalidInput
from tierkit.fleet import Fleet, FleetPlan, launch, local_plan
from tierkit.testing import service_process, wait_for
from tierkit.types import Health, Tier

SIDES = {"end": 32, "edge": 80, "cloud": 96}


@pytest.fixture(scope="module")
def pictures_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks that see squares of different sizes, the middle of a picture; with encoders for those above. That of the
    edge takes one picture at a time."""
    return encoded_set(tmp_path_factory.mktemp("colours"), SIDES, single=("edge",))


@asynccontextmanager
async def fleet_of(
    models: Path, folder: Path, *, ends: int = 1, **scheduler: Any
) -> AsyncIterator[tuple[Fleet, AsyncClient]]:
    plan = local_plan(
        {Tier.END: ends, Tier.EDGE: 1, Tier.CLOUD: 1},
        scheduler={"models": models, "state": folder / "state", "trusted": "end,edge,cloud", "port": 0} | scheduler,
        node={"models": models},
    )
    async with launch(plan, folder) as fleet, AsyncClient(fleet.scheduler_url) as client:

        async def all_ready() -> bool:
            """Alive, and their networks have answered the probe pictures: before, a node gets no work."""
            devices = await client.devices()
            release = (await client.releases()).releases[0]
            return (
                [device.health for device in devices] == [Health.ALIVE] * (ends + 2)
                and release.probes == len(release.networks)
                and not any("gets no work" in device.reason for device in devices)
            )

        await wait_for(all_ready, what="the nodes")
        yield fleet, client


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def fleet(pictures_set: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with fleet_of(pictures_set, tmp_path_factory.mktemp("fleet")) as (fleet, _):
        yield fleet


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(fleet.scheduler_url) as client:
        yield client


async def answered(client: AsyncClient, images: Any, **policy: Any) -> tuple[Job, list[ImageResult]]:
    job = await client.wait(await client.submit(images, **policy))
    return job, [result async for result in client.results(job)]


@pytest.mark.parametrize("scheme", ["end", "end-edge", "end-cloud"])
async def test_each_tier_sees_the_middle_in_its_own_size(client: AsyncClient, scheme: str) -> None:
    files = [wide_picture(colour, "JPEG", edges="white") for colour in COLOURS] * 20
    job, results = await answered(client, files, scheme=scheme, batch_size=7, labels=list(COLOURS) * 20)
    assert (job.state, job.failed_images, job.resized_images) == (JobState.COMPLETED, 0, 60)
    assert [result.label for result in results] == list(COLOURS) * 20
    assert {result.resized_from for result in results} == {(90, 200)}
    assert job.coarse_accuracy == 1.0
    if scheme != "end":
        assert job.fine_accuracy == 1.0
        sent = job.sent["pixels"].upload_bytes
        # The files travel, not their pixels.
        size = sum(map(len, files))
        assert size <= sent <= size + 60 * 4 + 9 * 400, (job.sent, {each.fallback for each in results}, job)


def cut_short(data: bytes) -> bytes:
    """A file whose head is whole, and whose pixels are not."""
    return data[: len(data) - len(data) // 3]


def noisy(colour: str, form: str = "JPEG") -> bytes:
    """Too many bytes to be whole after it was cut."""
    pixels = np.random.default_rng(0).integers(0, 90, (90, 200, 3), np.uint8)
    pixels[..., COLOURS.index(colour)] += 150
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def upload_folder(folder: Path) -> Path:
    """Two good pictures, one whose head is none, one that is cut, and a task full of cut ones."""
    folder.mkdir()
    for number, colour in enumerate(COLOURS * 3):
        (folder / f"{number}-{colour}.jpg").write_bytes(noisy(colour))
    (folder / "1-green.jpg").write_bytes(b"no picture")
    for number in (2, 3, 4, 5):
        path = folder / f"{number}-{COLOURS[number % 3]}.jpg"
        path.write_bytes(cut_short(path.read_bytes()))
    return folder


@pytest.mark.parametrize("scheme", ["end", "end-edge", "end-cloud"])
async def test_damaged_pictures_are_listed_and_the_others_answered(
    client: AsyncClient, tmp_path: Path, scheme: str
) -> None:
    folder = upload_folder(tmp_path / "photographs")
    # Tasks of three: one with a good picture, one without any, one with good ones alone.
    job, results = await answered(client, folder, scheme=scheme, batch_size=3, on_bad_input="skip")
    assert (job.state, job.damaged_images, job.failed_images, job.fallback) == (JobState.COMPLETED, 5, 5, 0)
    bad = ["1-green.jpg", "2-blue.jpg", "3-red.jpg", "4-green.jpg", "5-blue.jpg"]
    assert [(image.index, image.name) for image in job.damaged] == list(enumerate(bad, 1))
    assert "JPEG" in job.damaged[0].reason
    assert all("damaged" in image.reason for image in job.damaged[1:])
    assert [result.name for result in results if result.error] == bad
    good = [result for result in results if not result.error]
    assert [result.label for result in good] == ["red", *COLOURS]
    assert {result.answered_by for result in good} == {{"end": "end", "end-edge": "edge", "end-cloud": "cloud"}[scheme]}
    assert {(result.coarse, result.fine, result.answered_by) for result in results if result.error} == {(None,) * 3}
    answers = (job.answered_coarse, job.answered_fine)
    assert answers == (4, 0 if scheme == "end" else 4)


@pytest.mark.parametrize("scheme", ["end", "end-cloud"])
async def test_a_damaged_picture_is_answered_as_far_as_it_can_be_decoded(
    client: AsyncClient, tmp_path: Path, scheme: str
) -> None:
    folder = upload_folder(tmp_path / "photographs")
    job, results = await answered(client, folder, scheme=scheme, batch_size=3, on_bad_input="answer")
    assert (job.state, job.damaged_images, job.damaged_answered) == (JobState.COMPLETED, 1, 4)
    assert [result.label for result in results] == ["red", None, "blue", *COLOURS, *COLOURS]
    assert [result.index for result in results if result.damaged] == [1, 2, 3, 4, 5]
    assert results[2].resized_from == (90, 200)


async def test_all_bad_pictures_are_named_where_none_may_be_skipped(client: AsyncClient, tmp_path: Path) -> None:
    folder = upload_folder(tmp_path / "photographs")
    (folder / "0-red.jpg").write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"2 of 9 files .*0-red\.jpg.*1-green\.jpg"):
        await client.submit(folder)
    for name in ("0-red.jpg", "1-green.jpg"):
        (folder / name).unlink()
    job, results = await answered(client, folder, scheme="end")
    assert (job.state, job.answered_coarse) == (JobState.FAILED, 3)
    assert [image.name for image in job.damaged] == ["2-blue.jpg", "3-red.jpg", "4-green.jpg", "5-blue.jpg"]
    assert [result.label for result in results if not result.error] == list(COLOURS)
    nothing = {f"{name}.png": b"none" for name in ("a", "b")}
    for name, content in nothing.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=r"a\.png.*b\.png"):
        await client.submit([tmp_path / name for name in nothing], on_bad_input="skip")


@pytest.mark.parametrize("on_bad_input", ["fail", "skip"])
async def test_a_classification_tells_of_damage_at_once(client: AsyncClient, on_bad_input: str) -> None:
    pictures = [noisy("red"), cut_short(noisy("blue"))]
    coarse, fine = [event async for event in client.classify(pictures, scheme="end-cloud", on_bad_input=on_bad_input)]
    assert isinstance(coarse, CoarseResults)
    assert isinstance(fine, FineResults), fine
    for event in (coarse, fine):
        assert event.results[0].label == "red"
        assert "damaged" in (event.results[1].error or "")
        assert event.results[1].label is None


async def test_arrays_are_answered_as_well(client: AsyncClient) -> None:
    pixels = np.full((3, 70, 100, 3), 10, np.uint8)
    for number in range(3):
        pixels[number, ..., number] = 200
    job, results = await answered(client, pixels, scheme="end-edge")
    assert [result.label for result in results] == list(COLOURS)
    assert (job.resized_images, results[0].resized_from) == (3, (70, 100))


async def test_a_stock_client_sends_files_to_a_node(fleet: Fleet) -> None:
    for node, side in (("end-1", 32), ("cloud-1", 96)):
        url, model = fleet.services[node].url, f"of-{node[:-2]}"

        def infer(*files: bytes, url: str = url, model: str = model) -> Any:
            tensor = triton.InferInput("images", [len(files)], "BYTES")
            tensor.set_data_from_numpy(np.array(files, dtype=object))
            with triton.InferenceServerClient(url.removeprefix("http://"), network_timeout=60.0) as stock:
                return stock.infer(model, [tensor]).as_numpy("probabilities")

        files = [wide_picture(colour, "WEBP", edges="black") for colour in COLOURS]
        assert (await asyncio.to_thread(infer, *files)).argmax(axis=1).tolist() == [0, 1, 2]
        with pytest.raises(triton.InferenceServerException, match=r"picture 1: damaged"):
            await asyncio.to_thread(infer, files[0], cut_short(noisy("red")))
        pixels = np.zeros((2, side, side, 3), np.uint8)
        async with httpx.AsyncClient(timeout=60) as http:
            raw = {"Inference-Header-Content-Length": "0"}
            answer = await http.post(f"{url}/v2/models/{model}/infer", content=pixels.tobytes(), headers=raw)
        assert answer.status_code == 200


@pytest.mark.timeout(120)
async def test_killed_nodes_cost_no_picture_its_answer(pictures_set: Path, tmp_path: Path) -> None:
    """An end node with files in its hands, then an upstream node: they are stopped, get work, and are killed."""
    good = [noisy(colour) for colour in COLOURS]
    files = [cut_short(good[number % 3]) if number % 20 == 7 else good[number % 3] for number in range(200)]
    damaged = list(range(7, 200, 20))
    # A node that stands still is not given up before it has got work.
    patient = {"heartbeat_s": 10.0, "suspect_s": 60.0, "lease_s": 90.0}
    async with fleet_of(pictures_set, tmp_path, ends=2, n_map=1, **patient) as (fleet, client):
        for stopped in (["end-2"], ["edge-1", "cloud-1"]):
            for name in stopped:
                fleet.services[name].process.send_signal(signal.SIGSTOP)
            job = await client.submit(
                files, scheme="adaptive", batch_size=4, on_bad_input="skip", on_upstream_loss="wait"
            )
            victim = await node_at_work(client, job, stopped)
            fleet.services[victim].process.kill()
            for name in set(stopped) - {victim}:
                fleet.services[name].process.send_signal(signal.SIGCONT)
            told: dict[type, list[int]] = {CoarseResults: [], FineResults: []}
            async for event in client.events(job):
                if not isinstance(event, StateChange):
                    told[type(event)] += [result.index for result in event.results]
            job = await client.job(job)
            assert (job.state, job.damaged_images, job.fallback) == (JobState.COMPLETED, len(damaged), 0)
            # Each picture's answers were told once, or what is wrong with it.
            assert {kind: sorted(indices) for kind, indices in told.items()} == {
                CoarseResults: list(range(200)),
                FineResults: list(range(200)),
            }
            assert [image.index for image in job.damaged] == damaged
            results = [result async for result in client.results(job)]
            assert [result.index for result in results] == list(range(200))
            assert [result.index for result in results if result.error] == damaged
            assert all(result.label == COLOURS[result.index % 3] for result in results if not result.error)


async def node_at_work(client: AsyncClient, job: Job, names: list[str]) -> str:
    """The first of these nodes that has a task of the job, once others have answered some of it."""
    found: list[str] = []

    async def at_work() -> bool:
        running = [each for each in (await client.attempts(job)).attempts if each.outcome == "running"]
        found[:] = [name for name in names if any(name in (each.node, each.upstream) for each in running)]
        return bool(found) and (await client.job(job)).answered_coarse > 0

    await wait_for(at_work, what=f"work for {' or '.join(names)}")
    return found[0]


async def test_jobs_of_files_go_on_after_a_restart_of_the_scheduler(pictures_set: Path, tmp_path: Path) -> None:
    """No node is there before the restart, so all is still to be done."""
    command = [
        "-m",
        "terrace",
        "scheduler",
        "--models",
        str(pictures_set),
        "--port",
        "0",
        "--state",
        str(tmp_path / "s"),
    ]
    async with service_process(command, ready_file=tmp_path / "first") as first, AsyncClient(first.url) as client:
        job = await client.submit([noisy(colour) for colour in COLOURS], scheme="end")
        first.kill()
        await first.exit_code()
    plan = local_plan({Tier.END: 1}, node={"models": pictures_set})
    async with service_process(command, ready_file=tmp_path / "second") as second, AsyncClient(second.url) as client:
        nodes = FleetPlan(services=plan.nodes, scheduler_url=second.url)
        async with launch(nodes, tmp_path):
            assert (await client.wait(job.id)).state is JobState.COMPLETED
            assert [result.label async for result in client.results(job.id)] == list(COLOURS)


async def test_the_command_line_lists_what_cannot_be_read(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = upload_folder(tmp_path / "photographs")
    words = ["classify", str(folder), "--scheduler", fleet.scheduler_url, "--scheme", "end"]
    assert await asyncio.to_thread(run, words) == 2
    assert "1-green.jpg" in capsys.readouterr().err
    assert await asyncio.to_thread(run, [*words, "--on-bad-input", "skip"]) == 0
    said = capsys.readouterr().out
    for name in ("1-green.jpg", "2-blue.jpg", "3-red.jpg", "4-green.jpg", "5-blue.jpg", "cloud 96 x 96 (the middle)"):
        assert name in said
    (folder / "1-green.jpg").unlink()
    assert await asyncio.to_thread(run, words) == 1
    assert "2-blue.jpg" in capsys.readouterr().out


async def test_an_untrusted_tier_gets_features_of_the_pictures(pictures_set: Path, tmp_path: Path) -> None:
    async with fleet_of(pictures_set, tmp_path, trusted="end,edge") as (_, client):
        files = [wide_picture(colour, "PNG", edges="white") for colour in COLOURS]
        for encode_on, bad in itertools.product(("end", "edge"), ([], [cut_short(noisy("red"))])):
            job, results = await answered(
                client, [*files, *bad], scheme="end-cloud", encode_on=encode_on, on_bad_input="skip"
            )
            assert [result.fine and result.fine.label for result in results] == [*COLOURS, *(None for _ in bad)]
            assert set(job.sent) == {"conv1"}
            assert job.damaged_images == len(bad)
        with pytest.raises(Forbidden):
            await client.submit(files, scheme="end-cloud", privacy="none")
