"""A node on a real socket that serves a model whose answers tell which image they are for."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette

from edge_node.app import EdgeNode, create_app
from edge_node.settings import EdgeSettings
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.served import Guard, ServedModels
from tierkit.tensors import Array, TensorSpec
from tierkit.testing import MadeModel, connected, serve_app


class PixelModel(MadeModel):
    """Three "classes" whose scores are the image's first pixel; pixel (255, 255, 255) breaks it.

    While `gate` is shut, `run` waits behind it.
    """

    name = "pixel"
    outputs = (
        TensorSpec(name="logits", datatype="FP32", shape=(-1, 3)),
        TensorSpec(name="probabilities", datatype="FP32", shape=(-1, 3)),
    )
    labels: Mapping[str, Sequence[str]] = {"probabilities": ("red", "green", "blue")}
    parameters: Mapping[str, str | int | float | bool] = {"precision": "exact"}

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.images_seen = 0

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.entered.set()
        assert self.gate.wait(20)
        pixels = inputs["images"][:, 0, 0, :].astype(np.float32)
        if (pixels == 255).all(axis=1).any():
            raise ArithmeticError("a white image")
        self.images_seen += len(pixels)
        computed = {"logits": pixels, "probabilities": pixels / np.float32(255)}
        return {name: computed[name] for name in outputs}

    @staticmethod
    def images(*pixels: tuple[int, int, int]) -> Array:
        """Images [n, 4, 4, 3] with these first pixels."""
        array = np.zeros((len(pixels), 4, 4, 3), np.uint8)
        array[:, 0, 0] = pixels
        return array


class TailModel(PixelModel):
    """The same for a model that takes features in place of images."""

    inputs = (TensorSpec(name="features", datatype="FP32", shape=(-1, 4, 4, 3)),)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return super().run({"images": inputs["features"]}, outputs)


class RunningNode:
    """What a test needs of a node that is being served."""

    def __init__(self, node: EdgeNode, lifecycle: Lifecycle, model: PixelModel, http: httpx.AsyncClient) -> None:
        self.node = node
        self.lifecycle = lifecycle
        self.model = model
        self.http = http
        self.url = lifecycle.url
        self.infer_path = f"/v2/models/{model.name}/infer"
        self.port = httpx.URL(self.url).port

    async def exchange(self, sent: bytes, *, then_eof: bool = False, patience_s: float = 10.0) -> bytes:
        """Send bytes on a connection of their own; what comes back until the node closes it.

        Raises:
            TimeoutError: it did not within `patience_s`; the connection is closed then.
        """
        async with connected(self.url) as (reader, writer):
            writer.write(sent)
            await writer.drain()
            if then_eof:
                writer.write_eof()
            async with asyncio.timeout(patience_s):
                return await reader.read()

    def post_bytes(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        """A whole inference request that asks for the connection to be closed, ready for `exchange`."""
        fields = {"Host": "node", "Connection": "close", "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.infer_path} HTTP/1.1\r\n{head}\r\n".encode() + body


StartNode = Callable[..., AbstractAsyncContextManager[RunningNode]]


@pytest.fixture
def start_node() -> StartNode:
    """`async with start_node(max_queue_images=8) as running: ...`; settings of the node as keywords, and the model."""

    @asynccontextmanager
    async def start(
        model: PixelModel | None = None, guard: Guard | None = None, **values: object
    ) -> AsyncIterator[RunningNode]:
        settings = EdgeSettings.model_validate({"node_id": "edge-1", "port": 0, "drain_s": 5.0, **values})
        model = model or PixelModel()
        made: list[EdgeNode] = []

        def build(lifecycle: Lifecycle) -> Starlette:
            guards = {} if guard is None else {model.name: guard}
            made.append(EdgeNode(settings, ServedModels(ready=[model], guards=guards), lifecycle))
            return create_app(made[0])

        async with serve_app(build, settings) as lifecycle:
            model.entered.clear()
            model.images_seen = 0
            async with httpx.AsyncClient(base_url=lifecycle.url, timeout=20) as http:
                try:
                    yield RunningNode(made[0], lifecycle, model, http)
                finally:
                    model.gate.set()

    return start


@pytest.fixture
async def running(start_node: StartNode) -> AsyncIterator[RunningNode]:
    async with start_node() as node:
        yield node


@pytest.fixture
def tail_model() -> TailModel:
    return TailModel()
