"""A small Open Inference Protocol server for the load generator."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np

from edge_node.app import EdgeNode, create_app
from edge_node.settings import EdgeSettings
from tierkit.tensors import Array, TensorSpec
from tierkit.testing import MadeModel, serve_app


class SumModel(MadeModel):
    """Adds up the pixels of each image."""

    name = "sum"
    outputs = (TensorSpec(name="logits", datatype="FP32", shape=(-1, 1)),)

    def __init__(self) -> None:
        self.images_seen = 0

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        images = inputs["images"]
        self.images_seen += len(images)
        return {"logits": images.reshape(len(images), -1).sum(axis=1, keepdims=True).astype(np.float32)}


@asynccontextmanager
async def serving(model: SumModel) -> AsyncIterator[str]:
    settings = EdgeSettings(node_id="edge-1", port=0, drain_s=2.0)
    async with serve_app(lambda lifecycle: create_app(EdgeNode(settings, [model], lifecycle)), settings) as lifecycle:
        yield lifecycle.url
