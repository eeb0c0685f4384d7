"""HTTP application of an edge node."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from edge_node.node import EdgeNode
from edge_node.relay import RelayEndpoint
from encryption.sending import RELAY_PREFIX
from tierkit.inference.node import node_app

__all__ = ["create_app"]


def create_app(node: EdgeNode) -> Starlette:
    """The Open Inference Protocol for the node's models, and the route on which it encodes for others."""
    return node_app(node, [Route(f"{RELAY_PREFIX}/{{model}}/infer", RelayEndpoint(node), methods=["POST"])])
