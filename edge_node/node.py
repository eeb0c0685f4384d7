"""What an edge node does."""

from __future__ import annotations

from typing import ClassVar

from tierkit.node import InferenceNode
from tierkit.types import Tier

__all__ = ["EdgeNode"]


class EdgeNode(InferenceNode):
    """Gives the fine answer near the end devices, with a network of medium size."""

    tier: ClassVar[Tier] = Tier.EDGE
