"""HTTP application of an edge node."""

from __future__ import annotations

from starlette.applications import Starlette

from edge_node.node import EdgeNode
from tierkit.node import node_app

__all__ = ["create_app"]


def create_app(node: EdgeNode) -> Starlette:
    """The Open Inference Protocol for the node's models."""
    return node_app(node)
