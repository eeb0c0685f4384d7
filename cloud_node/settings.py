"""Settings of a cloud node."""

from __future__ import annotations

import operator
import re
from typing import Annotated, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, NonNegativeFloat, field_validator, model_validator

from tierkit.extensions import load, name_in
from tierkit.settings import HttpUrl, Port, UpperSettings, UserPath

__all__ = ["ENGINES", "CloudSettings"]

ENGINES = "terrace.engines"
"""Group of the entry points of engines."""

_ENGINE_OF = {
    "upstream": "oip",
    "upstream_model": "oip",
    "upstream_token_file": "oip",
    "address": "ray",
    "replicas": "ray",
    "gpus": "ray",
}
"""Settings that an engine reads only if it lists them in `EngineKind.reads`, and the engine they were made for."""

_RANGE = re.compile(r"[1-9]\d{0,3}(:[1-9]\d{0,3})?", re.ASCII)


class CloudSettings(UpperSettings):
    """A cloud node: serves a fine model to end devices that no edge node takes."""

    service: ClassVar[str] = "cloud"

    port: Port = 8073

    engine: Annotated[str, AfterValidator(name_in(ENGINES))] = "onnx"
    """Engine that computes the networks. `onnx`: ONNX Runtime in this process. `oip`: a server of the Open Inference
    Protocol. `ray`: replicas on a Ray cluster, with the extra `ray`. Or an engine of another package."""

    upstream: HttpUrl | None = None
    """With `oip`: URL of the server, such as http://10.0.0.9:8000."""

    upstream_model: str = ""
    """With `oip`: name of the network on that server. Default: its name in the model set."""

    upstream_token_file: UserPath | None = None
    """With `oip`: file with the token that the server asks for; only its owner may read it."""

    address: str = "auto"
    """With `ray`: address of the cluster; `auto` finds the one of this machine, `local` starts one here."""

    replicas: str = "1"
    """With `ray`: copies of the networks, such as 2, or 1:8 for as many as the load needs within these limits.
    `threads` and `max_batch_size` apply to each replica; without `threads`, a replica has one core."""

    gpus: NonNegativeFloat = 0.0
    """With `ray`: GPUs of each replica, such as 0.25. A replica with 0 computes on its cores."""

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
        given = [name for name in _ENGINE_OF if name in self.model_fields_set]
        # Most cloud nodes: no engine is imported to check that.
        if self.engine == "onnx" and not given:
            return self
        engine = self._kind
        for name in given:
            if name not in engine.reads:
                raise ValueError(
                    f"the setting {name} (--{name.replace('_', '-')}) is for the engine {_ENGINE_OF[name]}, and the "
                    f"engine is {self.engine}: leave it out, or say --engine {_ENGINE_OF[name]}"
                )
        engine.check(self)
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
        return super().batch_images if self.engine == "onnx" else int(self._kind.batch_images(self))

    @property
    def _kind(self) -> Any:
        """The `cloud_node.engines.kind.EngineKind`, which builds on these settings and so is not imported above."""
        return load(ENGINES, self.engine)


def _range(replicas: str) -> tuple[int, int]:
    least, _, most = replicas.partition(":")
    return int(least), int(most or least)
