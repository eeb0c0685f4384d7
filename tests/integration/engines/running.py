"""Cloud nodes on real sockets, whatever computes their networks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
from starlette.applications import Starlette

from cloud_node.engines import load_engine
from cloud_node.settings import CloudSettings
from models.data import read_sample
from models.manifest import load_manifest
from models.session import OnnxModel, load_model
from tierkit.http.client import open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.node import InferenceNode, node_app
from tierkit.inference.oip_client import InferOptions, OipClient
from tierkit.testing import serve_app
from tierkit.wire.oip import InferRequest, InferResponse, RequestedOutput, Tensor

__all__ = ["ENCODER", "NETWORK", "RunningCloud", "agree", "cloud", "local", "sample"]

NETWORK, ENCODER = "wrn-16-4", "wrn-16-4.conv1"


class RunningCloud:
    """A cloud node that is being served."""

    def __init__(self, node: InferenceNode, lifecycle: Lifecycle, http: Any) -> None:
        self.node = node
        self.lifecycle = lifecycle
        self.url = lifecycle.url
        self._oip = OipClient(http)

    async def infer(self, images: Any, *outputs: str, model: str = NETWORK, **options: Any) -> InferResponse:
        tensor = images if isinstance(images, Tensor) else Tensor("images", images)
        wanted = tuple(map(RequestedOutput, outputs or ("logits", "probabilities")))
        request = InferRequest((tensor,), wanted)
        return await self._oip.infer(self.url, model, request, InferOptions(**{"budget_s": 60.0, **options}))

    async def get(self, path: str, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20) as client:
            return await client.get(path)

    async def ready(self) -> bool:
        return (await self.get("/readyz")).status_code == 200

    async def not_ready(self) -> bool:
        return not await self.ready()


@asynccontextmanager
async def cloud(**values: Any) -> AsyncIterator[RunningCloud]:
    settings = CloudSettings.model_validate({"node_id": "cloud-1", "port": 0, "drain_s": 5.0, "threads": 1, **values})
    made: list[InferenceNode] = []

    async def build(lifecycle: Lifecycle) -> Starlette:
        made.append(InferenceNode(settings, await load_engine(settings, load_manifest(), lifecycle), lifecycle))
        return node_app(made[0])

    async with open_client() as http, serve_app(build, settings) as lifecycle:
        yield RunningCloud(made[0], lifecycle, http)


def sample(images: int) -> Any:
    return read_sample().images[:images]


def local() -> OnnxModel:
    """The network in this process."""
    return load_model(load_manifest().entry(NETWORK))


def agree(response: InferResponse, expected: Any) -> None:
    """The answers are those of the network itself: another batch may round differently, and no more."""
    for name, values in expected.items():
        given = response.output(name)
        assert given is not None
        assert given.dtype == np.float32
        assert np.allclose(given, values, atol=0.02 * float(np.abs(values).max()))
        assert np.mean(given.argmax(axis=1) == values.argmax(axis=1)) > 0.97
