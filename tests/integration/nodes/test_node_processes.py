"""Edge and cloud nodes as they are started in earnest: processes with the networks that ship."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from models.data import read_sample
from models.manifest import Manifest, load_manifest
from models.session import load_model
from tierkit.inference.model import Array
from tierkit.testing import ServiceProcess, service_process

NODES = {"edge": "edge_node", "cloud": "cloud_node"}


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return load_manifest()


def stock_client_logits(url: str, model: str, images: np.ndarray, **options: bool) -> np.ndarray:
    tensor = triton.InferInput("images", list(images.shape), "UINT8")
    tensor.set_data_from_numpy(images, **options)
    wanted = [triton.InferRequestedOutput("logits", **options)]
    with triton.InferenceServerClient(url.removeprefix("http://"), network_timeout=60.0) as client:
        return np.asarray(client.infer(model, [tensor], outputs=wanted).as_numpy("logits"))


@pytest.mark.parametrize("tier", NODES)
async def test_a_stock_client_gets_the_answers_of_the_bare_session(
    tier: str, manifest: Manifest, tmp_path: Path
) -> None:
    entry = manifest.default_for(tier)
    sample = read_sample()
    images = sample.images[:50]
    expected: Array = load_model(entry).run({"images": images}, ["logits"])["logits"]
    async with service_process(["-m", NODES[tier], "--port", "0"], ready_file=tmp_path / "ready") as node:
        for options in ({"binary_data": True}, {"binary_data": False}):
            logits = await asyncio.to_thread(stock_client_logits, node.url, entry.name, images, **options)
            assert np.array_equal(logits, expected)
    assert sample.fine is not None
    assert entry.fine_accuracy is not None
    right = (expected.argmax(axis=1) == sample.fine[:50]).mean()
    assert right == pytest.approx(entry.fine_accuracy, abs=0.28)  # four standard deviations of 50 images


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


async def output_of(command: list[str], tmp_path: Path) -> tuple[int, str]:
    async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as node:
        code = await node.exit_code()
        return code, node.log


async def test_an_unknown_model_is_named_with_the_closest(manifest: Manifest, tmp_path: Path) -> None:
    name = manifest.default_for("edge").name
    code, said = await output_of(["-m", "edge_node", "--port", "0", "--model", name[:-1] + "_"], tmp_path)
    assert code == 2
    assert f"did you mean {name}?" in said
    assert "Traceback" not in said


async def test_a_provider_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    if has_cuda():
        pytest.skip("this ONNX Runtime has CUDA")
    code, said = await output_of(["-m", "cloud_node", "--port", "0", "--provider", "cuda"], tmp_path)
    assert code == 2
    assert "CUDAExecutionProvider" in said
    assert "'gpu'" in said
    assert "Traceback" not in said


def has_cuda() -> bool:
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


async def test_cuda_gives_the_same_classes(manifest: Manifest, tmp_path: Path) -> None:
    if not has_cuda():
        pytest.skip("this ONNX Runtime has no CUDA")
    entry = manifest.default_for("cloud")
    images = read_sample().images[:50]
    expected: Array = load_model(entry).run({"images": images}, ["logits"])["logits"]
    command = ["-m", "cloud_node", "--port", "0", "--provider", "cuda"]
    async with service_process(command, ready_file=tmp_path / "ready", timeout_s=60) as node:
        logits = await asyncio.to_thread(stock_client_logits, node.url, entry.name, images)
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.98


@pytest.mark.parametrize("package", ["end_node", "edge_node", "cloud_node"])
def test_a_node_imports_nothing_heavy(package: str) -> None:
    heavy = ["fastapi", "sqlalchemy", "PIL", "torch", "onnx", "matplotlib", "multipart"]
    code = f"import json, sys, {package}.__main__; json.dump([m for m in {heavy} if m in sys.modules], sys.stdout)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []


async def test_an_idle_node_is_small(manifest: Manifest, tmp_path: Path) -> None:
    """At most 150 MB resident with the end tier's network, the smallest device being the one that counts."""
    name = manifest.default_for("end").name
    command = ["-m", "edge_node", "--port", "0", "--model", name]
    async with service_process(command, ready_file=tmp_path / "ready") as node:
        assert resident_mb(node) <= 150


def resident_mb(node: ServiceProcess) -> float:
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1000
