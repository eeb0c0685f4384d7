# mypy: ignore-errors
# Its imports are installed in the environment of this server only.
"""MLServer with a runtime of its own for the network, as its users write them: tensors of FP32, as JSON."""

import asyncio
import os
import socket

import numpy as np
import onnxruntime
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse, MetadataTensor


class Classifier(MLModel):
    async def load(self) -> bool:
        self.session = onnxruntime.InferenceSession(os.environ["PEER_MODEL"], providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload) -> InferenceResponse:
        images = NumpyCodec.decode_input(payload.inputs[0]).astype(np.uint8)
        (logits,) = self.session.run(["logits"], {"images": images})
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("scores", logits)])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


async def main() -> None:
    settings = Settings(
        debug=False,
        host="127.0.0.1",
        http_port=int(os.environ["PEER_PORT"]),
        grpc_port=free_port(),
        metrics_port=free_port(),
        metrics_dir=os.environ["PEER_FOLDER"],
        parallel_workers=0,
        load_models_at_startup=False,
    )
    model = ModelSettings(
        name=os.environ["PEER_NAME"],
        implementation=Classifier,
        inputs=[MetadataTensor(name="pixels", datatype="FP32", shape=[-1, 32, 32, 3])],
        outputs=[MetadataTensor(name="scores", datatype="FP32", shape=[-1, 100])],
    )
    await MLServer(settings).start([model])


if __name__ == "__main__":
    asyncio.run(main())
