# mypy: ignore-errors
# Its imports are installed in the environment of this server only.
"""NVIDIA Triton through nvidia-pytriton: Triton's own HTTP server, protocol and dynamic batcher; ONNX Runtime is called
from its Python backend."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from common import HOST, INPUT, MAX_BATCH_IMAGES, OUTPUT, PORT, SHAPE, free_port, infer, open_session
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def main() -> None:
    session = open_session()
    classes = session.get_outputs()[0].shape[-1]

    @batch
    def classify(**inputs: Any) -> dict[str, Any]:
        return {OUTPUT: infer(session, inputs[INPUT])}

    config = TritonConfig(
        http_address=HOST,
        http_port=PORT,
        grpc_address=HOST,
        grpc_port=free_port(),
        metrics_address=HOST,
        metrics_port=free_port(),
        allow_metrics=False,
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name=os.environ["PEER_NAME"],
            infer_func=classify,
            inputs=[Tensor(name=INPUT, dtype=np.uint8, shape=SHAPE)],
            outputs=[Tensor(name=OUTPUT, dtype=np.float32, shape=(classes,))],
            config=ModelConfig(max_batch_size=MAX_BATCH_IMAGES, batcher=DynamicBatcher(max_queue_delay_microseconds=0)),
        )
        triton.serve()


if __name__ == "__main__":
    main()
