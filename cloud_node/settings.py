"""Settings of a cloud node."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, ValidationInfo, field_validator

from tierkit.settings import HttpUrl, Port, UpperSettings, UserPath

__all__ = ["CloudSettings"]

_PIECES = 2
"""Of one batch, that an upstream has at a time: it computes one while the other is under way."""


class CloudSettings(UpperSettings):
    """A cloud node: serves the largest model to end devices that no edge node takes."""

    service: ClassVar[str] = "cloud"

    port: Port = 8073

    engine: Literal["onnx", "oip", "ray"] = "onnx"
    """What computes the networks: `onnx`, ONNX Runtime in this process; `oip`, a server of the Open Inference Protocol;
    `ray`, replicas on a Ray cluster, which needs the extra `ray`."""

    upstream: HttpUrl | None = None
    """With `oip`: URL of the server, such as http://10.0.0.9:8000."""

    upstream_model: str = ""
    """With `oip`: name of the network on that server. Default: its name in the model set."""

    upstream_token_file: UserPath | None = None
    """With `oip`: file with the token that the server asks for, its owner's alone."""

    address: str = "auto"
    """With `ray`: address of the cluster; `auto` finds the one of this machine, `local` starts one here."""

    replicas: Annotated[str, Field(pattern=r"^[1-9]\d{0,3}(:[1-9]\d{0,3})?$")] = "1"
    """With `ray`: copies of the networks, such as 2, or 1:8 for as many as the load asks for within these bounds.
    `threads` and `max_batch_size` hold for each; it has one core unless `threads` says otherwise."""

    gpus: NonNegativeFloat = 0.0
    """With `ray`: GPUs of each replica, such as 0.25, which it then computes on; with 0 it computes on its cores."""

    @field_validator("upstream")
    @classmethod
    def _upstream_is_for_oip(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (info.data.get("engine") == "oip") != (value is not None):
            raise ValueError("goes with the engine oip, which needs it: http://HOST:PORT of the server")
        return value

    @field_validator("replicas")
    @classmethod
    def _replicas_are_a_range(cls, value: str) -> str:
        least, most = _range(value)
        if least > most:
            raise ValueError("must be a number, or the least and the most of them, such as 1:8")
        return value

    @property
    def replica_range(self) -> tuple[int, int]:
        """Fewest and most replicas."""
        return _range(self.replicas)

    @property
    def replica_cores(self) -> int:
        """Cores of one replica."""
        return self.threads or 1

    @property
    def batch_images(self) -> int:
        """Most images in one inference."""
        match self.engine:
            case "oip":
                return self.max_batch_size * _PIECES
            case "ray":
                return self.max_batch_size * self.replica_cores * self.replica_range[1]
        return super().batch_images


def _range(replicas: str) -> tuple[int, int]:
    least, _, most = replicas.partition(":")
    return int(least), int(most or least)
