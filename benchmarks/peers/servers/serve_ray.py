# mypy: ignore-errors
# Its imports are installed in the environment of this server only.
"""Ray Serve: raw bytes in and out, requests merged by its batching, one replica."""

from __future__ import annotations

import os
from typing import Any

import ray
from common import HOST, MAX_BATCH_REQUESTS, PORT, decode, infer_many, open_session
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
class Classifier:
    def __init__(self) -> None:
        self.session = open_session()

    @serve.batch(max_batch_size=MAX_BATCH_REQUESTS, batch_wait_timeout_s=0.0)
    async def infer(self, requests: list[Any]) -> list[Any]:
        return infer_many(self.session, requests)

    async def __call__(self, request: Request) -> Response:
        logits = await self.infer(decode(await request.body()))
        return Response(logits.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        _node_ip_address=HOST,
        _temp_dir=os.environ["PEER_FOLDER"],
        runtime_env={"env_vars": {name: value for name, value in os.environ.items() if name.startswith("PEER_")}},
        log_to_driver=False,
    )
    serve.start(http_options={"host": HOST, "port": PORT})
    serve.run(Classifier.bind(), route_prefix="/predict", blocking=True)
