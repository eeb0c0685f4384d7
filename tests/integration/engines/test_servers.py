"""A cloud node in front of MLServer and of Triton, each in an environment of its own."""

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.peers.contenders import MLSERVER_JSON, choose
from benchmarks.peers.environments import interpreter_of
from experiments.processes import ServerProcesses, running
from models.manifest import load_manifest, weights_folder
from tests.integration.engines.running import NETWORK, agree, cloud, local, sample
from tierkit.errors import SetupError, UpstreamUnavailable
from tierkit.testing import wait_for

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

ENVIRONMENTS = Path(__file__).parents[3] / ".venv-peers"


@contextmanager
def serving(name: str, port: int) -> Iterator[ServerProcesses]:
    (contender,) = [MLSERVER_JSON] if name == "mlserver" else choose([name])
    try:
        python = interpreter_of(contender, ENVIRONMENTS)
    except SetupError as exc:
        pytest.skip(str(exc))
    variables: Mapping[str, str] = {
        **contender.environment,
        "PEER_MODEL": str(weights_folder() / load_manifest().entry(NETWORK).file),
        "PEER_NAME": NETWORK,
        "PEER_PORT": str(port),
        "PEER_SHAPE": "32,32,3",
    }
    core = min(os.sched_getaffinity(0))
    with running(contender.filled(python, {}), variables, core=core) as server:
        yield server


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        found: int = sock.getsockname()[1]
        return found


@pytest.mark.parametrize("name", ["mlserver", "pytriton"])
async def test_it_answers_through_the_node_and_its_death_is_the_nodes(name: str, port: int) -> None:
    images = sample(70)
    expected = local().run({"images": images}, ["logits", "probabilities"])
    with ExitStack() as first:
        first.enter_context(serving(name, port))
        # The node waits for the server to come.
        async with cloud(engine="oip", upstream=f"http://127.0.0.1:{port}", max_batch_size=50) as node:
            agree(await node.infer(images), expected)
            await asyncio.to_thread(first.close)
            await wait_for(lambda: node.node.heartbeat().draining)
            with pytest.raises(UpstreamUnavailable):
                await node.infer(images)
            with serving(name, port):
                await wait_for(lambda: not node.node.heartbeat().draining, timeout_s=60)
                agree(await node.infer(images), expected)
