"""An end node and an upstream node on real sockets, with networks that a test can compute in its head."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np

from edge_node.app import EdgeNode, create_app as create_edge_app
from edge_node.settings import EdgeSettings
from models.hierarchy import Hierarchy
from tierkit.http.lifecycle import Lifecycle
from tierkit.tensors import Array, TensorSpec
from tierkit.testing import MadeModel, serve_app
from tierkit.types import Tier
from tierkit.wire.events import TaskEvent, read_event
from tierkit.wire.messages import ESCALATION, UPSTREAMS, Stage, Upstream
from tierkit.wire.oip import InferRequest, Tensor, encode_request

HIERARCHY = Hierarchy(name="four", fine=("a", "b", "c", "d"), coarse=("x", "y"), parent=(0, 0, 1, 1))


class PixelModel(MadeModel):
    """The class of an image is its first value, with probability 0.7. Waits while `gate` is closed."""

    inputs = (TensorSpec(name="images", datatype="UINT8", shape=(-1, 2, 2, 3)),)

    def __init__(self, name: str, classes: int) -> None:
        self.name = name
        self.classes = classes
        self.outputs = (TensorSpec(name="probabilities", datatype="FP32", shape=(-1, classes)),)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.ran: list[int] = []
        """First values of all images so far, in the order in which they ran."""

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.entered.set()
        assert self.gate.wait(20)
        self.ran += inputs["images"][:, 0, 0, 0].tolist()
        labels = inputs["images"][:, 0, 0, 0] % self.classes
        probabilities = np.full((len(labels), self.classes), 0.3 / (self.classes - 1), np.float32)
        probabilities[np.arange(len(labels)), labels] = 0.7
        return {"probabilities": probabilities}


def images(*labels: int) -> Array:
    """UINT8 `[n, 2, 2, 3]`, of these classes."""
    array = np.zeros((len(labels), 2, 2, 3), np.uint8)
    array[:, 0, 0, 0] = labels
    array[:, 1, 1, 2] = np.arange(len(labels))  # no two alike
    return array


def to(url: str, node_id: str = "edge-1", model: str = "fine", sha256: str = MadeModel.sha256) -> Upstream:
    return Upstream(node_id=node_id, url=url, tier=Tier.EDGE, model=model, sha256=sha256, encoding=None)


@dataclass
class RunningEnd:
    """An end node that is being served."""

    lifecycle: Lifecycle
    model: PixelModel
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return self.lifecycle.url

    def stream(
        self,
        batch: Array,
        *upstreams: Upstream,
        budget_s: float | None = 10.0,
        task_id: str = "task-1",
        request_id: str = "request-1",
        stage: str | None = None,
        escalation: tuple[Stage, ...] | None = None,
        priority: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """Send a task; the answer is read by the caller."""
        chunks, own = encode_request(InferRequest(inputs=(Tensor("images", batch),)))
        own |= {"X-Request-Id": request_id, "Terrace-Upstream": UPSTREAMS.dump_json(upstreams).decode(), **headers}
        if escalation is not None:
            own["Terrace-Escalation"] = ESCALATION.dump_json(escalation).decode()
        if stage is not None:
            own["Terrace-Stage"] = stage
        if priority is not None:
            own["Terrace-Priority"] = priority
        if budget_s is not None:
            own["Terrace-Budget-Ms"] = str(budget_s * 1000)
        return self.http.stream("POST", f"{self.url}/v1/tasks/{task_id}", content=b"".join(chunks), headers=own)

    async def answer(
        self,
        batch: Array,
        *upstreams: Upstream,
        budget_s: float | None = 10.0,
        stage: str | None = None,
        escalation: tuple[Stage, ...] | None = None,
        priority: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> list[TaskEvent]:
        """All lines of the answer to a task."""
        how: dict[str, Any] = {"budget_s": budget_s, "stage": stage, "escalation": escalation, "priority": priority}
        asked = self.stream(batch, *upstreams, **how, headers=headers)
        async with asked as response:
            await response.aread()
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/x-ndjson"
        assert response.headers["x-request-id"] == "request-1"
        return [read_event(line) for line in response.text.splitlines()]


StartEnd = Callable[..., AbstractAsyncContextManager[RunningEnd]]


@dataclass
class RunningUpper:
    """An edge node that is being served."""

    lifecycle: Lifecycle
    model: PixelModel

    @property
    def url(self) -> str:
        return self.lifecycle.url


@asynccontextmanager
async def serve_upper(model: PixelModel) -> AsyncIterator[RunningUpper]:
    settings = EdgeSettings(node_id="edge-1", port=0, drain_s=5.0)
    async with serve_app(
        lambda lifecycle: create_edge_app(EdgeNode(settings, [model], lifecycle)), settings
    ) as service:
        try:
            yield RunningUpper(service, model)
        finally:
            model.gate.set()


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A peer that takes a connection and says nothing."""
    await asyncio.Event().wait()
