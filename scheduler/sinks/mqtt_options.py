"""Options of the sink kind `mqtt`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from scheduler.sinks.discovery import MOST_PREFIX
from scheduler.sinks.protocol import plain_path
from tierkit.errors import MissingExtra

__all__ = ["MqttOptions"]

_PORT, _TLS_PORT = 1883, 8883
_LEVEL = r"[A-Za-z0-9_.-]+"
_PREFIX = rf"{_LEVEL}(/{_LEVEL})*"
_MOST_HOST = 253
PlainPath = Annotated[Path, AfterValidator(plain_path)]
_HOST = r"^([A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$"


class MqttOptions(BaseModel):
    """Options of a sink that publishes to an MQTT 5 broker."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    host: Annotated[str, StringConstraints(max_length=_MOST_HOST, pattern=_HOST)]
    """Name or address of the broker, without a scheme, a port or a user."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """TCP port of the broker. Default: 1883, or 8883 with `tls`."""
    tls: bool = False
    """Connect with TLS and verify the broker's certificate."""
    tls_ca: PlainPath | None = None
    """PEM file on the scheduler's machine with the certificates to trust instead of the usual ones."""
    username: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    """User at the broker."""
    password_file: PlainPath | None = None
    """File on the scheduler's machine with the user's password. Only its owner may read it."""
    client_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    """Client id at the broker. By default it is made of the name of the sink and the moment at which it was added."""
    prefix: Annotated[str, StringConstraints(max_length=MOST_PREFIX, pattern=rf"^{_PREFIX}$")] = "terrace"
    """First levels of all topics. Each sink at a broker needs its own."""
    discovery_prefix: Annotated[str, StringConstraints(max_length=MOST_PREFIX, pattern=rf"^({_PREFIX})?$")] = (
        "homeassistant"
    )
    """First levels of the topics of Home Assistant's discovery; empty: no discovery."""
    pictures: bool = False
    """Also publish the newest picture of each source, if its node sends pictures to the scheduler."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if find_spec("aiomqtt") is None:
            raise MissingExtra("mqtt", "a sink of the kind mqtt")
        if self.password_file is not None and self.username is None:
            raise ValueError("password_file needs a username")
        if self.tls_ca is not None and not self.tls:
            raise ValueError("tls_ca needs tls = true")
        for name in ("password_file", "tls_ca"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_absolute():
                raise ValueError(f"{name} must be an absolute path")
        if self.prefix == self.discovery_prefix:
            raise ValueError("prefix and discovery_prefix must differ: a topic would have two meanings")
        return self

    @property
    def tcp_port(self) -> int:
        """The port in use."""
        return self.port or (_TLS_PORT if self.tls else _PORT)
