"""Settings of an end node."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveFloat

from tierkit.settings import CommaSeparatedUrls, NodeSettings, Port
from tierkit.wire.messages import MAX_ALLOWED_UPSTREAMS

__all__ = ["EndSettings"]


class EndSettings(NodeSettings):
    """Serve an end node: the coarse answer at once, and the fine one from the upstream nodes that a task names."""

    service: ClassVar[str] = "end"

    port: Port = 8071

    task_budget_s: PositiveFloat = 30.0
    """Seconds that a task may take in all where its sender names no budget."""

    allowed_upstreams: Annotated[CommaSeparatedUrls, Field(max_length=MAX_ALLOWED_UPSTREAMS)] = ()
    """URLs, comma-separated, below which an upstream node must lie for this node to send images there, such as
    http://10.0.0.5:8072. The scheduler hears the list and keeps to it. Default: any, as the scheduler says."""
