"""Personal heads on a node that serves: they answer the pictures of its sources, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from end_node.app import create_app
from end_node.observing import ObservingNode
from end_node.routes import source_routes
from end_node.settings import EndSettings
from models.manifest import ModelEntry
from models.personal import PersonalRecord, write_head
from models.session import load_model
from tests import own_networks
from tests.own_networks import SIDE, entry_of
from tests.shapes import SHAPES
from tierkit.http.lifecycle import Lifecycle
from tierkit.testing import serve_app, wait_for
from tierkit.wire.events import CoarseEvent, read_event
from tierkit.wire.oip import InferRequest, Tensor, encode_request

RED = np.tile(np.array([255, 0, 0], np.uint8), (SIDE, SIDE, 1))


def network(*, red: float = 5.0, green: float = 1.0, classes: int = 2, shift: float = 0.0, huge: float = 0.0) -> bytes:
    """A network whose score of the first class is the amount of red, and of the second the amount of green.

    Args:
        huge: weight of a picture with much more red than green, for both classes.
    """
    kernel = np.zeros((6, 3, 3, 3), np.float32)
    kernel[0, 0, 1, 1] = kernel[1, 1, 1, 1] = 1
    kernel[2, :2, 1, 1] = 10, -10
    bias = np.zeros(6, np.float32)
    bias[2] = -5
    last = np.zeros((6, classes), np.float32)
    last[0, 0], last[1, 1], last[2] = red, green, huge
    given = {"kernel": kernel, "bias": bias, "last": last, "shift": np.full(classes, shift, np.float32)}
    return own_networks.network(classes=classes, **given)


BASE = network()
ENTRY = entry_of(BASE, classes=2)


def record(content: bytes, base: bytes = BASE) -> PersonalRecord:
    return PersonalRecord(
        base=hashlib.sha256(base).hexdigest(),
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        release=1,
        temperature=1.0,
        pictures=200,
        figures={},
        made_at=datetime.now(UTC),
    )


def swapped(red: float = -5.0) -> bytes:
    """A head that takes red for the second class."""
    return network(red=red)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class PersonalNode:
    """A node with a source, and a personal head if there is one."""

    node: ObservingNode
    url: str
    http: httpx.AsyncClient
    kept: Path

    async def see(self) -> dict[str, Any]:
        """The local answer to a red picture of the source."""
        answer = await self.http.post(f"{self.url}/v1/sources/gate/pictures", content=own_networks.png(RED))
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()["coarse"]
        return found

    async def state(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"{self.url}/v1/kept")).json()
        return found

    async def answers_with(self, content: bytes) -> None:
        """Wait until the pictures of the source are answered by this network."""

        async def do() -> bool:
            return bool((await self.see())["sha256"] == sha(content))

        await wait_for(do, what="answers of the other network")

    async def refuses(self) -> str:
        """Wait until the newest head is refused, and return the reason."""

        async def do() -> bool:
            return bool((await self.state())["personal_reason"])

        await wait_for(do, what="a reason")
        return str((await self.state())["personal_reason"])


@asynccontextmanager
async def serving(
    folder: Path, http: httpx.AsyncClient, *, entry: ModelEntry = ENTRY, content: bytes = BASE, personal: bool = True
) -> AsyncIterator[PersonalNode]:
    (folder / entry.file).write_bytes(content)
    values: dict[str, Any] = {"learn": {"size": "4MB", "personal": personal}, "source": ["gate=push"]}
    settings = EndSettings.model_validate(
        {"node_id": "end-1", "port": 0, "drain_s": 5.0, "spool": {"folder": folder}, **values}
    )
    nodes: list[ObservingNode] = []

    def build(lifecycle: Lifecycle) -> Starlette:
        model = load_model(entry, folder, labels=SHAPES.coarse)
        nodes.append(ObservingNode(settings, [model], lifecycle, SHAPES))
        nodes[0].fit = entry.fit
        return create_app(nodes[0], source_routes(nodes[0]))

    async with serve_app(build, settings) as lifecycle:
        yield PersonalNode(nodes[0], lifecycle.url, http, settings.kept_folder)


async def write(node: PersonalNode, content: bytes) -> None:
    await asyncio.to_thread(write_head, node.kept, record(content), content)


async def test_a_head_comes_changes_and_goes_while_the_node_serves(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with serving(tmp_path, http) as node:
        seen = await node.see()
        assert (seen["sha256"], seen["index"]) == (ENTRY.sha256, 0)
        for content in (swapped(), swapped(-6.0)):
            await write(node, content)
            await node.answers_with(content)
            seen = await node.see()
            assert (seen["model"], seen["index"]) == (ENTRY.name, 1)
            state = await node.state()
            assert (state["personal"], state["personal_reason"]) == (True, "")
        for file in (node.kept / "personal").iterdir():
            file.unlink()
        await node.answers_with(BASE)
        assert (await node.see())["index"] == 0
        state = await node.state()
        assert (state["personal"], state["personal_reason"]) == (False, "")


async def test_a_head_that_is_there_answers_from_the_first_picture_on(tmp_path: Path, http: httpx.AsyncClient) -> None:
    write_head(tmp_path / "kept", record(swapped()), swapped())
    async with serving(tmp_path, http) as node:
        assert (await node.see())["sha256"] == sha(swapped())


async def test_jobs_and_requests_get_the_network_of_the_release(tmp_path: Path, http: httpx.AsyncClient) -> None:
    write_head(tmp_path / "kept", record(swapped()), swapped())
    async with serving(tmp_path, http) as node:
        assert (await node.see())["index"] == 1
        chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", RED[None]),)))
        body = b"".join(chunks)
        answer = await http.post(f"{node.url}/v1/tasks/task-1", content=body, headers=headers)
        (event,) = [read_event(line) for line in answer.text.splitlines()]
        assert isinstance(event, CoarseEvent)
        assert (event.sha256, event.labels) == (ENTRY.sha256, (0,))
        wanted = {
            "inputs": [{"name": "images", "shape": [1, *RED.shape], "datatype": "UINT8", "data": RED[None].tolist()}]
        }
        answer = await http.post(f"{node.url}/v2/models/{ENTRY.name}/infer", json=wanted)
        assert (answer.status_code, answer.json()["model_version"]) == (200, ENTRY.sha256)
        answer = await http.post(f"{node.url}/v2/models/{ENTRY.name}/versions/{sha(swapped())}/infer", json=wanted)
        assert answer.status_code in (404, 503)


async def test_without_the_setting_a_head_is_not_used(tmp_path: Path, http: httpx.AsyncClient) -> None:
    write_head(tmp_path / "kept", record(swapped()), swapped())
    async with serving(tmp_path, http, personal=False) as node:
        assert (await node.see())["sha256"] == ENTRY.sha256
        assert not (await node.state())["personal"]


def truncated(folder: Path) -> None:
    path = folder / f"{ENTRY.sha256}.onnx"
    path.write_bytes(path.read_bytes()[:100])


def no_record(folder: Path) -> None:
    (folder / f"{ENTRY.sha256}.json").write_text("{")


def huge_record(folder: Path) -> None:
    (folder / f"{ENTRY.sha256}.json").write_bytes(b" " * 100_000)


def of_another(folder: Path) -> None:
    other = record(swapped(), base=b"another network")
    (folder / f"{ENTRY.sha256}.json").write_text(other.model_dump_json())


def other_classes(folder: Path) -> None:
    _put(folder, network(classes=3))


def no_network(folder: Path) -> None:
    _put(folder, b"no network")


def no_numbers(folder: Path) -> None:
    _put(folder, network(shift=float("nan")))


def _put(folder: Path, content: bytes) -> None:
    (folder / f"{ENTRY.sha256}.onnx").write_bytes(content)
    (folder / f"{ENTRY.sha256}.json").write_text(record(content).model_dump_json())


Damage = Callable[[Path], None]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN
@pytest.mark.parametrize(
    "damage", [truncated, no_record, huge_record, of_another, other_classes, no_network, no_numbers]
)
async def test_a_damaged_head_is_not_used_and_says_why(damage: Damage, tmp_path: Path, http: httpx.AsyncClient) -> None:
    write_head(tmp_path / "kept", record(swapped()), swapped())
    damage(tmp_path / "kept" / "personal")
    async with serving(tmp_path, http) as node:
        assert await node.refuses()
        assert (await node.see())["sha256"] == ENTRY.sha256
        assert not (await node.state())["personal"]


async def test_a_damaged_head_does_not_replace_the_one_before(tmp_path: Path, http: httpx.AsyncClient) -> None:
    write_head(tmp_path / "kept", record(swapped()), swapped())
    async with serving(tmp_path, http) as node:
        assert (await node.see())["sha256"] == sha(swapped())
        other_classes(node.kept / "personal")
        await node.refuses()
        assert (await node.see())["sha256"] == sha(swapped())
        assert (await node.state())["personal"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of an infinity
async def test_a_head_that_gives_no_numbers_is_set_aside_and_the_picture_is_answered(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    broken = network(red=-5.0, huge=3e38)  # finite for the pictures of the proof, and not for red ones
    write_head(tmp_path / "kept", record(broken), broken)
    async with serving(tmp_path, http) as node:
        assert (await node.state())["personal"]
        seen = await node.see()
        assert (seen["sha256"], seen["index"]) == (ENTRY.sha256, 0)
        assert not (await node.state())["personal"]
        assert await node.refuses()
        await write(node, swapped())
        await node.answers_with(swapped())


async def test_a_head_of_another_network_stays_unused(tmp_path: Path, http: httpx.AsyncClient) -> None:
    other = network(red=4.0)
    write_head(tmp_path / "kept", record(swapped()), swapped())
    async with serving(tmp_path, http, entry=entry_of(other, classes=2), content=other) as node:
        assert (await node.see())["sha256"] == sha(other)
        state = await node.state()
        assert (state["personal"], state["personal_reason"]) == (False, "")


async def test_the_temperature_of_a_head_makes_it_as_sure_as_it_says(tmp_path: Path, http: httpx.AsyncClient) -> None:
    written = record(swapped())
    write_head(tmp_path / "kept", written, swapped())
    async with serving(tmp_path, http) as node:
        sure = (await node.see())["confidence"]
        await asyncio.to_thread(write_head, node.kept, written.model_copy(update={"temperature": 10.0}), swapped())

        async def less_sure() -> bool:
            return bool((await node.see())["confidence"] < sure - 0.1)

        await wait_for(less_sure, what="an answer that is less sure")
