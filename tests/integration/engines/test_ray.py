"""What replicas on a Ray cluster promise besides (the rest is in test_contract.py)."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engines.conftest import pids_of
from tests.integration.engines.running import NETWORK, agree, cloud, local, sample
from tierkit.errors import ClusterUnavailable, SetupError, UpstreamUnavailable
from tierkit.http.client import open_client
from tierkit.inference.oip_client import InferOptions, OipClient
from tierkit.testing import service_process, wait_for
from tierkit.wire.oip import InferRequest, RequestedOutput, Tensor

# Ray itself gives warnings.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


NODE = f"cloud-{os.getpid()}"


@pytest.fixture
def on_ray(ray_cluster: str) -> Any:
    return partial(cloud, engine="ray", address=ray_cluster, node_id=NODE)


def replicas() -> list[int]:
    """Processes of this test's replicas."""
    return pids_of(f"ServeReplica:terrace-{NODE}")


async def test_a_killed_replica_loses_no_image(on_ray: Any) -> None:
    images = sample(50)
    expected = local().run({"images": images}, ["logits"])
    async with on_ray(replicas="2") as running, asyncio.timeout(90):
        await wait_for(lambda: running.node.heartbeat().replicas == 2)
        asked = [asyncio.create_task(running.infer(images, "logits")) for _ in range(20)]
        await wait_for(lambda: running.node.heartbeat().images_done > 0)
        pids = replicas()
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        for answer in await asyncio.gather(*asked):
            agree(answer, expected)
        await wait_for(lambda: running.node.heartbeat().replicas == 1)
        assert await running.ready()
        await wait_for(lambda: running.node.heartbeat().replicas == 2, timeout_s=60)


async def test_speed_is_told_for_one_replica(on_ray: Any) -> None:
    async with on_ray(replicas="2") as running:
        (offer, *_) = running.node.registration("http://127.0.0.1:9").models
        assert offer.name == NETWORK
        runner = running.node.default_runner
        beat = running.node.heartbeat()
        assert offer.ms_per_image >= runner.ms_per_image
        assert 1 <= beat.replicas <= 2


async def test_a_node_leaves_nothing_behind(on_ray: Any) -> None:
    async with on_ray():
        assert len(replicas()) == 1
    await wait_for(lambda: not replicas())


@pytest.mark.usefixtures("ray_cluster")
async def test_no_cluster_is_told() -> None:
    with pytest.raises(ClusterUnavailable, match=r"no cluster listens at 127\.0\.0\.1:9"):
        async with cloud(engine="ray", address="127.0.0.1:9"):
            pass


async def test_replicas_that_cannot_be_started_are_told(on_ray: Any) -> None:
    with pytest.raises(SetupError, match="no replica can be started"):
        async with on_ray(provider="cuda"):  # which this ONNX Runtime has not
            pass


async def test_no_cluster_ends_the_service_for_a_later_start(tmp_path: Path) -> None:
    command = ["-m", "cloud_node", "--port", "0", "--engine", "ray", "--address", "127.0.0.1:9"]
    async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as service:
        assert await service.exit_code() == os.EX_TEMPFAIL


async def test_a_cluster_of_its_own_lasts_as_long_as_the_node(tmp_path: Path) -> None:
    command = ["-m", "cloud_node", "--port", "0", "--engine", "ray", "--address", "local", "--node-id", NODE]
    async with service_process(command, ready_file=tmp_path / "ready") as service, open_client() as http:
        (first,) = replicas()
        os.kill(first, signal.SIGKILL)
        await wait_for(lambda: replicas() not in ([], [first]))  # which the cluster has started
        request = InferRequest((Tensor("images", sample(2)),), (RequestedOutput("logits"),))

        async def answers() -> bool:
            try:
                answer = await OipClient(http).infer(service.url, NETWORK, request, InferOptions(budget_s=60.0))
            except UpstreamUnavailable:  # until it runs
                return False
            agree(answer, local().run({"images": sample(2)}, ["logits"]))
            return True

        await wait_for(answers)
        service.terminate()
        assert await service.exit_code() == 0
