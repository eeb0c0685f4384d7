"""Settings of an end node."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveFloat

from tierkit.settings import CommaSeparatedUrls, NodeSettings, Port

__all__ = ["EndSettings"]


class EndSettings(NodeSettings):
    """Serve an end node: the coarse answer at once, and the fine one from the upstream nodes that a task names."""

    service: ClassVar[str] = "end"

    port: Port = 8071

    task_budget_s: PositiveFloat = 30.0
    """Seconds that a task may take in all where its sender names no budget."""

    allowed_upstreams: CommaSeparatedUrls = ()
    """URLs, comma-separated, below which an upstream node must lie for this node to send images there, such as
    http://10.0.0.5:8072. Default: any, as the scheduler says."""
