"""Settings of a cloud node."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ValidationInfo, field_validator

from tierkit.settings import HttpUrl, Port, UpperSettings, UserPath

__all__ = ["CloudSettings"]

_PIECES = 2
"""Of one batch, that an upstream has at a time: it computes one while the other is under way."""


class CloudSettings(UpperSettings):
    """A cloud node: serves the largest model to end devices that no edge node takes."""

    service: ClassVar[str] = "cloud"

    port: Port = 8073

    engine: Literal["onnx", "oip"] = "onnx"
    """What computes the networks: `onnx`, ONNX Runtime in this process; `oip`, another server, asked in the Open
    Inference Protocol."""

    upstream: HttpUrl | None = None
    """With `oip`: URL of the server, such as http://10.0.0.9:8000."""

    upstream_model: str = ""
    """With `oip`: name of the network on that server. Default: its name in the model set."""

    upstream_token_file: UserPath | None = None
    """With `oip`: file with the token that the server asks for, its owner's alone."""

    @field_validator("upstream")
    @classmethod
    def _upstream_is_for_oip(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (info.data.get("engine") == "oip") != (value is not None):
            raise ValueError("goes with the engine oip, which needs it: http://HOST:PORT of the server")
        return value

    @property
    def batch_images(self) -> int:
        """Most images in one inference."""
        return self.max_batch_size * _PIECES if self.engine == "oip" else super().batch_images
