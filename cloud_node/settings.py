"""Settings of a cloud node."""

from __future__ import annotations

from typing import ClassVar

from tierkit.settings import Port, UpperSettings

__all__ = ["CloudSettings"]


class CloudSettings(UpperSettings):
    """A cloud node: serves the largest model to end devices that no edge node takes."""

    service: ClassVar[str] = "cloud"

    port: Port = 8073
