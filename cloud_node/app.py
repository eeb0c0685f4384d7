"""HTTP application of a cloud node."""

from __future__ import annotations

from starlette.applications import Starlette

from cloud_node.node import CloudNode
from tierkit.inference.node import node_app

__all__ = ["create_app"]


def create_app(node: CloudNode) -> Starlette:
    """The Open Inference Protocol for the node's models."""
    return node_app(node)
