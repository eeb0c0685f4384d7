"""Settings of an edge node."""

from __future__ import annotations

from typing import ClassVar

from tierkit.settings import CommaSeparatedUrls, Port, UpperSettings

__all__ = ["EdgeSettings"]


class EdgeSettings(UpperSettings):
    """An edge node: serves a fine model to the end devices that are mapped to it."""

    service: ClassVar[str] = "edge"

    port: Port = 8072

    allowed_upstreams: CommaSeparatedUrls = ()
    """URLs, comma-separated, below which an upstream node must lie for this node to send features there. Default: any,
    as the scheduler says."""
