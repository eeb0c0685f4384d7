"""The cloud node and its HTTP application."""

from __future__ import annotations

from typing import ClassVar

from starlette.applications import Starlette

from tierkit.inference.node import InferenceNode, node_app
from tierkit.types import Tier

__all__ = ["CloudNode", "create_app"]


class CloudNode(InferenceNode):
    """Gives the fine answer of the strongest network, far away and, unless the scheduler says otherwise, untrusted."""

    tier: ClassVar[Tier] = Tier.CLOUD


def create_app(node: CloudNode) -> Starlette:
    """The Open Inference Protocol for the node's models."""
    return node_app(node)
