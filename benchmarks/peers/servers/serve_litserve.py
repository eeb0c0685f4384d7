# mypy: ignore-errors
# Its imports are installed in the environment of this server only.
"""LitServe: raw bytes in and out, requests merged by its batching as they wait, one worker."""

# No `from __future__ import annotations` here: LitServe hands the annotations of `decode_request` to FastAPI.
from typing import Annotated, Any

import litserve as ls
from common import HOST, MAX_BATCH_REQUESTS, PORT, decode, infer_many, open_session
from fastapi import Body, Response


class Classifier(ls.LitAPI):
    def setup(self, device: str) -> None:
        self.session = open_session()

    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> Any:
        return decode(request)

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, x: list[Any]) -> list[Any]:
        return infer_many(self.session, x)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    # batch_timeout 0: what waits is merged, no request waits for others.
    api = Classifier(max_batch_size=MAX_BATCH_REQUESTS, batch_timeout=0.0)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True, timeout=60)
    server.run(host=HOST, port=PORT, num_api_servers=1, generate_client_file=False, log_level="warning")
