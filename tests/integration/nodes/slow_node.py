"""A node whose model takes 2 ms an image, whatever the machine; run as a process by the tests."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from edge_node.app import EdgeNode, create_app
from edge_node.settings import EdgeSettings
from tierkit.flags import command, run_main
from tierkit.http.server import serve
from tierkit.tensors import Array, TensorSpec
from tierkit.testing import MadeModel

S_PER_IMAGE = 0.002


class SlowModel(MadeModel):
    """Stands for a network that computes outside the interpreter."""

    name = "slow"
    inputs = (TensorSpec(name="images", datatype="UINT8", shape=(-1, 32, 32, 3)),)
    outputs = (TensorSpec(name="logits", datatype="FP32", shape=(-1, 10)),)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        images = len(inputs["images"])
        time.sleep(images * S_PER_IMAGE)
        return {"logits": np.zeros((images, 10), np.float32)}


run = command(
    EdgeSettings,
    lambda settings: serve(
        lambda lifecycle: create_app(EdgeNode(settings, [SlowModel()], lifecycle)), settings, node_id="slow-1"
    ),
)

if __name__ == "__main__":
    run_main(run)
