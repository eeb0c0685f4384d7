"""End and edge nodes as processes of their own, with the networks that ship and real images."""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import onnxruntime
import pytest

from models.data import read_sample
from models.manifest import load_manifest, weights_folder
from models.session import load_model
from tests.integration.end_node.aids import never, to
from tierkit.http.address import free_port
from tierkit.tensors import Array
from tierkit.testing import ServiceProcess, listening, service_process, wait_for
from tierkit.wire.events import CoarseEvent, FallbackEvent, FineEvent, TaskEvent, read_event
from tierkit.wire.messages import UPSTREAMS, Upstream
from tierkit.wire.oip import InferRequest, Tensor, encode_request

RSS_LIMIT_BYTES = 150 * 1024 * 1024


async def answer(
    end: ServiceProcess, batch: Array, *upstreams: Upstream, budget_s: float = 30.0, task: str = "task-1"
) -> list[TaskEvent]:
    chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", batch),)))
    headers |= {
        "X-Request-Id": "request-1",
        "Terrace-Upstream": UPSTREAMS.dump_json(upstreams).decode(),
        "Terrace-Budget-Ms": str(budget_s * 1000),
    }
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        response = await http.post(f"{end.url}/v1/tasks/{task}", content=b"".join(chunks), headers=headers)
    assert response.status_code == 200, response.text
    return [read_event(line) for line in response.text.splitlines()]


async def test_real_images_get_the_answers_that_the_networks_give_and_a_killed_edge_node_leaves_the_coarse_one(
    end_process: ServiceProcess, edge_process: ServiceProcess
) -> None:
    batch = read_sample().images[:50]
    manifest = load_manifest()
    entries = manifest.default_for("end"), manifest.default_for("edge")
    upstream = to(edge_process.url, "edge-1", entries[1].name, entries[1].sha256)

    coarse, fine = await answer(end_process, batch, upstream)

    expected = [load_model(entry).run({"images": batch}, ["probabilities"]) for entry in entries]
    own, upper = (outputs["probabilities"] for outputs in expected)
    summed = manifest.hierarchy.coarse_probabilities(upper)
    assert isinstance(coarse, CoarseEvent)
    assert (coarse.node_id, coarse.model, coarse.sha256) == ("end-1", entries[0].name, entries[0].sha256)
    np.testing.assert_array_equal(coarse.labels, own.argmax(axis=1))
    np.testing.assert_allclose(coarse.confidences, own.max(axis=1), rtol=1e-5)
    assert isinstance(fine, FineEvent)
    assert fine.sha256 == entries[1].sha256
    np.testing.assert_array_equal(fine.labels, upper.argmax(axis=1))
    np.testing.assert_allclose(fine.confidences, upper.max(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(fine.coarse_labels, summed.argmax(axis=1))
    # The request id went along.
    await wait_for(lambda: "[request-1]" in edge_process.log, what="the edge node's log line")

    edge_process.kill()
    await edge_process.exit_code()
    _, event = await answer(end_process, batch[:2], upstream, task="task-2")
    assert isinstance(event, FallbackEvent)
    assert event.reason == "upstream_unavailable"
    await wait_for(lambda: '"why": "' in end_process.log, what="the reason in the log")
    assert '"request_id": "request-1"' in end_process.log


async def test_sigterm_finishes_the_task_under_way(end_process: ServiceProcess) -> None:
    batch = read_sample().images[:2]
    async with listening(never) as url, httpx.AsyncClient(trust_env=False) as http:
        task = asyncio.create_task(answer(end_process, batch, to(url), budget_s=1.0))

        async def begun() -> bool:
            return bool((await http.get(f"{end_process.url}/healthz")).json()["in_flight"])

        await wait_for(begun, what="the task to begin")
        end_process.terminate()
        assert [event.event for event in await task] == ["coarse", "fallback"]
        assert await end_process.exit_code() == 0


@pytest.mark.usefixtures("fresh_processes")
async def test_without_its_scheduler_a_node_serves_says_what_is_missing_and_is_small(tmp_path: Path) -> None:
    scheduler = f"http://127.0.0.1:{free_port()}"
    command = ["-m", "end_node", "--port", "0", "--scheduler", scheduler, "--models", str(weights_folder())]
    async with service_process(command, ready_file=tmp_path / "ready.json") as end:
        await wait_for(lambda: f"no contact with the scheduler at {scheduler}" in end.log, what="the warning")
        assert resident_bytes(end.process.pid) < RSS_LIMIT_BYTES
        assert [event.event for event in await answer(end, read_sample().images[:2])] == ["coarse"]
        end.terminate()
        assert await end.exit_code() == 0
        assert end.log.count("no contact") == 1


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("needs /proc")
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="the provider is there")
async def test_a_provider_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    command = ["-m", "end_node", "--port", "0", "--provider", "cuda"]
    async with service_process(command, ready_file=tmp_path / "ready.json", wait_ready=False) as service:
        assert await service.exit_code() == 2
    assert service.log.startswith("terrace end: the installed ONNX Runtime has no CUDAExecutionProvider")
    assert "provider 'cuda' needs" in service.log
    assert service.log.count("\n") == 1
