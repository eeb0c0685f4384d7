"""Settings of an edge node."""

from __future__ import annotations

from typing import ClassVar

from tierkit.settings import NodeSettings, Port

__all__ = ["EdgeSettings"]


class EdgeSettings(NodeSettings):
    """An edge node: serves a fine model to the end devices that are mapped to it."""

    service: ClassVar[str] = "edge"
    takes_all_cores: ClassVar[bool] = True

    port: Port = 8072
