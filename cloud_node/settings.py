"""Settings of a cloud node."""

from __future__ import annotations

import operator
import re
from typing import ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import NonNegativeFloat, field_validator, model_validator

from tierkit.settings import HttpUrl, Port, UpperSettings, UserPath

__all__ = ["CloudSettings"]

_PIECES = 2
"""Of one batch, that an upstream has at a time: it computes one while the other is under way."""

_ENGINE_OF = {
    "upstream": "oip",
    "upstream_model": "oip",
    "upstream_token_file": "oip",
    "address": "ray",
    "replicas": "ray",
    "gpus": "ray",
}
"""Settings that one engine alone reads."""

_RANGE = re.compile(r"[1-9]\d{0,3}(:[1-9]\d{0,3})?", re.ASCII)


class CloudSettings(UpperSettings):
    """A cloud node: serves a fine model to end devices that no edge node takes."""

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

    replicas: str = "1"
    """With `ray`: copies of the networks, such as 2, or 1:8 for as many as the load asks for within these bounds.
    `threads` and `max_batch_size` hold for each; it has one core unless `threads` says otherwise."""

    gpus: NonNegativeFloat = 0.0
    """With `ray`: GPUs of each replica, such as 0.25, which it then computes on; with 0 it computes on its cores."""

    @field_validator("upstream")
    @classmethod
    def _upstream_has_no_path_of_the_protocol(cls, value: str | None) -> str | None:
        if value is not None and "v2" in urlsplit(value).path.split("/"):
            raise ValueError("must be the URL of the server without /v2, which the node adds itself")
        return value

    @field_validator("replicas")
    @classmethod
    def _replicas_are_a_range(cls, value: str) -> str:
        if not _RANGE.fullmatch(value) or operator.gt(*_range(value)):
            raise ValueError("must be N or MIN:MAX, such as 2 or 1:8, from 1 to 9999")
        return value

    @model_validator(mode="after")
    def _settings_fit_the_engine(self) -> Self:
        if self.engine == "oip" and self.upstream is None:
            raise ValueError("the engine oip needs the setting upstream: --upstream http://HOST:PORT of the server")
        for name, engine in _ENGINE_OF.items():
            if name in self.model_fields_set and engine != self.engine:
                raise ValueError(
                    f"the setting {name} (--{name.replace('_', '-')}) is for the engine {engine}, and the engine is "
                    f"{self.engine}: leave it out, or say --engine {engine}"
                )
        return self

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
