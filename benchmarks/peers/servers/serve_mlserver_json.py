# mypy: ignore-errors
# Its imports are installed in the environment of this server only.
"""MLServer with a custom runtime for the network, written like a user's: tensors of FP32, as JSON."""

import asyncio
import os

import numpy as np
from common import HOST, PORT, SHAPE, free_port, infer, open_session
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse, MetadataTensor


class Classifier(MLModel):
    async def load(self) -> bool:
        self.session = open_session()
        return True

    async def predict(self, payload) -> InferenceResponse:
        images = NumpyCodec.decode_input(payload.inputs[0]).astype(np.uint8)
        logits = infer(self.session, images)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("scores", logits)])


async def main() -> None:
    settings = Settings(
        debug=False,
        host=HOST,
        http_port=PORT,
        grpc_port=free_port(),
        metrics_port=free_port(),
        metrics_dir=os.environ["PEER_FOLDER"],
        parallel_workers=0,
        load_models_at_startup=False,
    )
    model = ModelSettings(
        name=os.environ["PEER_NAME"],
        implementation=Classifier,
        inputs=[MetadataTensor(name="pixels", datatype="FP32", shape=[-1, *SHAPE])],
        outputs=[MetadataTensor(name="scores", datatype="FP32", shape=[-1, 100])],
    )
    await MLServer(settings).start([model])


if __name__ == "__main__":
    asyncio.run(main())
