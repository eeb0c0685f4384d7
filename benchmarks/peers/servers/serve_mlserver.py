# mypy: ignore-errors
# Its imports are installed in the environment of this server only.
"""MLServer: the Open Inference Protocol as JSON, the only form that it reads over HTTP; pixels and logits as base64."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from common import HOST, OUTPUT, PORT, decode, free_port, infer, open_session
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import Base64Codec
from mlserver.types import InferenceRequest, InferenceResponse


class Classifier(MLModel):
    async def load(self) -> bool:
        self.session = open_session()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        [body] = Base64Codec.decode_input(payload.inputs[0])
        logits: Any = infer(self.session, decode(body))
        output = Base64Codec.encode_output(OUTPUT, [logits.tobytes()])
        return InferenceResponse(model_name=self.name, outputs=[output])


async def main() -> None:
    settings = Settings(
        debug=False,
        host=HOST,
        http_port=PORT,
        grpc_port=free_port(),
        metrics_port=free_port(),
        metrics_dir=os.environ["PEER_FOLDER"],
        parallel_workers=0,  # the model in the server's own process, which is faster for one model
        gzip_enabled=False,
        load_models_at_startup=False,
    )
    server = MLServer(settings)
    model = ModelSettings(name=os.environ["PEER_NAME"], implementation=Classifier)
    await server.start([model])


if __name__ == "__main__":
    asyncio.run(main())
