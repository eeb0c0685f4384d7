"""Nodes as they are started in earnest: processes with the networks that ship, and the clients that people have."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from models.data import read_sample
from models.manifest import Manifest, load_manifest
from models.session import load_model
from tierkit.testing import service_process

NODES = {"end": "end_node", "edge": "edge_node", "cloud": "cloud_node"}


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return load_manifest()


def pixels(images: np.ndarray, **options: bool) -> triton.InferInput:
    tensor = triton.InferInput("images", list(images.shape), "UINT8")
    tensor.set_data_from_numpy(images, **options)
    return tensor


WAYS: list[dict[str, Any]] = [
    {},
    *(
        {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
        for coding in ("gzip", "deflate")
    ),
]


def asked_by_a_stock_client(address: str, model: str, images: np.ndarray) -> list[triton.InferResult]:
    """All that the blocking client can do with a model, but for its failures."""
    with triton.InferenceServerClient(address, network_timeout=60.0) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        index = client.get_model_repository_index()
        assert {"name": model, "version": load_manifest().entry(model).sha256, "state": "READY", "reason": ""} in index
        client.unload_model(model)
        with pytest.raises(InferenceServerException, match="unloaded"):
            client.infer(model, [pixels(images)])
        client.load_model(model)
        assert client.get_model_repository_index() == index
        results = []
        for binary in (True, False):
            options = {"binary_data": binary}
            wanted = [
                triton.InferRequestedOutput("logits", **options),
                triton.InferRequestedOutput("probabilities", class_count=3, **options),
            ]
            results += [client.infer(model, [pixels(images, **options)], outputs=wanted, **way) for way in WAYS]
        return results


async def asked_by_the_asyncio_client(address: str, model: str, images: np.ndarray) -> list[triton.InferResult]:
    wanted = [
        triton_aio.InferRequestedOutput("logits"),
        triton_aio.InferRequestedOutput("probabilities", class_count=3),
    ]
    async with triton_aio.InferenceServerClient(address) as client:
        assert model in [entry["name"] for entry in await client.get_model_repository_index()]
        asked = (client.infer(model, [pixels(images)], outputs=wanted, **way) for way in WAYS)
        return list(await asyncio.gather(*asked))


@pytest.mark.parametrize("tier", NODES)
async def test_stock_clients_get_the_answers_of_the_bare_session(tier: str, manifest: Manifest, tmp_path: Path) -> None:
    entry = manifest.default_for(tier)
    sample = read_sample()
    images = sample.images[:50]
    model = load_model(entry)
    expected = model.run({"images": images}, ["logits", "probabilities"])
    logits = expected["logits"]
    async with service_process(["-m", NODES[tier], "--port", "0"], ready_file=tmp_path / "ready") as node:
        address = node.url.removeprefix("http://")
        results = await asyncio.to_thread(asked_by_a_stock_client, address, entry.name, images)
        results += await asked_by_the_asyncio_client(address, entry.name, images)
    assert len(results) == 9
    best = np.argsort(-expected["probabilities"], axis=1, kind="stable")[:, :3]
    names = model.labels["probabilities"]
    for result in results:
        assert np.array_equal(result.as_numpy("logits"), logits)
        told = [
            [text if isinstance(text, str) else text.decode() for text in row]
            for row in result.as_numpy("probabilities")
        ]
        assert [[text.partition(":")[2] for text in row] for row in told] == [
            [f"{index}:{names[index]}" for index in row] for row in best
        ]
    truth, accuracy = (sample.coarse, entry.coarse_accuracy) if tier == "end" else (sample.fine, entry.fine_accuracy)
    assert truth is not None
    assert accuracy is not None
    right = (logits.argmax(axis=1) == truth[:50]).mean()
    assert right == pytest.approx(accuracy, abs=0.28)  # four standard deviations of 50 images


def perf_analyzer() -> str:
    """NVIDIA's load generator, where there is one that runs."""
    program = shutil.which("perf_analyzer") or pytest.skip(
        "no perf_analyzer on the PATH; the package perf-analyzer needs glibc 2.38"
    )
    tried = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        pytest.skip(f"perf_analyzer does not run here: {tried.stderr.strip()[-200:]}")
    return program


@pytest.mark.parametrize("tier", NODES)
async def test_perf_analyzer_measures_a_node(tier: str, manifest: Manifest, tmp_path: Path) -> None:
    program, name, report = perf_analyzer(), manifest.default_for(tier).name, tmp_path / "report.csv"
    async with service_process(["-m", NODES[tier], "--port", "0"], ready_file=tmp_path / "ready") as node:
        address = ["-u", node.url.removeprefix("http://"), "-i", "http", "-m", name]
        load = ["--concurrency-range", "2", "--request-count", "50", "-b", "2", "-f", str(report)]
        run = await asyncio.to_thread(
            subprocess.run, [program, *address, *load], capture_output=True, text=True, timeout=100, check=False
        )
    assert run.returncode == 0, run.stdout + run.stderr
    head, *rows = report.read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["2"]
    assert "Server Compute Infer" in head  # what the node's statistics say


async def post_images(http: httpx.AsyncClient, url: str, images: np.ndarray) -> int:
    answer = await http.post(url, content=images.tobytes(), headers={"Inference-Header-Content-Length": "0"})
    return answer.status_code


async def test_sigterm_finishes_what_is_under_way(manifest: Manifest, tmp_path: Path) -> None:
    entry = manifest.default_for("edge")
    images = read_sample().images[:50]
    async with (
        service_process(["-m", "edge_node", "--port", "0"], ready_file=tmp_path / "ready") as node,
        httpx.AsyncClient(timeout=60) as http,
    ):
        url = f"{node.url}/v2/models/{entry.name}/infer"
        under_way = [asyncio.create_task(post_images(http, url, images)) for _ in range(8)]
        while (await http.get(f"{node.url}/readyz")).json()["in_flight"] == 0:
            assert not all(task.done() for task in under_way), "too fast to be caught: give it more to do"
        node.terminate()
        statuses = await asyncio.gather(*under_way, return_exceptions=True)
        assert await node.exit_code() == 0
    # What came in before the signal is answered; what came after is refused or finds nobody.
    assert statuses.count(200) >= 1
    assert all(status in (200, 503) or isinstance(status, httpx.TransportError) for status in statuses)


async def test_an_unknown_model_is_named_with_the_closest(manifest: Manifest, tmp_path: Path) -> None:
    name = manifest.default_for("edge").name
    command = ["-m", "edge_node", "--port", "0", "--model", name[:-1] + "_"]
    async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as node:
        assert await node.exit_code() == 2
    assert f"did you mean {name}?" in node.log
    assert node.log.count("\n") == 1


def has_cuda() -> bool:
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


async def test_cuda_gives_the_same_classes(manifest: Manifest, tmp_path: Path) -> None:
    if not has_cuda():
        pytest.skip("this ONNX Runtime has no CUDA")
    entry = manifest.default_for("cloud")
    images = read_sample().images[:50]
    expected = load_model(entry).run({"images": images}, ["logits"])["logits"]
    command = ["-m", "cloud_node", "--port", "0", "--provider", "cuda"]
    async with service_process(command, ready_file=tmp_path / "ready", timeout_s=60) as node:
        address = node.url.removeprefix("http://")
        logits = (await asked_by_the_asyncio_client(address, entry.name, images))[0].as_numpy("logits")
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.98


def test_nodes_import_nothing_heavy() -> None:
    heavy = ["fastapi", "sqlalchemy", "PIL", "torch", "onnx", "matplotlib", "multipart", "av", "sqlite3"]
    nodes = ", ".join(f"{package}.__main__" for package in NODES.values())
    code = f"import json, sys, {nodes}; json.dump([m for m in {heavy} if m in sys.modules], sys.stdout)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []
