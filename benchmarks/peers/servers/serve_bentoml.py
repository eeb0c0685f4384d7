# mypy: ignore-errors
# Its imports are installed in the environment of this server only.
"""BentoML: raw bytes in and out, one worker. Its batching merges typed arrays, which travel as JSON; raw bodies are
several times faster than that, and are not merged."""

# No `from __future__ import annotations` here: BentoML reads the annotations of `predict`.
from typing import Annotated

import bentoml
from bentoml.validators import ContentType
from common import decode, infer, open_session

OctetStream = ContentType("application/octet-stream")


@bentoml.service(
    workers=1, threads=1, traffic={"timeout": 60}, metrics={"enabled": False}, logging={"access": {"enabled": False}}
)
class Classifier:
    def __init__(self) -> None:
        self.session = open_session()

    @bentoml.api
    def predict(self, images: Annotated[bytes, OctetStream], /) -> Annotated[bytes, OctetStream]:
        return bytes(infer(self.session, decode(images)).tobytes())
