"""Settings of an edge node."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from tierkit.settings import CommaSeparatedUrls, Port, UpperSettings
from tierkit.wire.messages import MAX_ALLOWED_UPSTREAMS

__all__ = ["EdgeSettings"]


class EdgeSettings(UpperSettings):
    """An edge node: serves a fine model to the end devices that are mapped to it."""

    service: ClassVar[str] = "edge"

    port: Port = 8072

    allowed_upstreams: Annotated[CommaSeparatedUrls, Field(max_length=MAX_ALLOWED_UPSTREAMS)] = ()
    """URLs of upstream nodes to which this node may send features, comma-separated; URLs below them count too. The
    scheduler gets the list and respects it. Default: any node that the scheduler names."""
