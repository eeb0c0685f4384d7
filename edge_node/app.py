"""The edge node and its HTTP application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from edge_node.relay import RelayEndpoint
from edge_node.settings import EdgeSettings
from encryption.heads import Encoders
from encryption.sending import RELAY_PREFIX
from tierkit.inference.node import InferenceNode, node_app

__all__ = ["EdgeNode", "create_app"]


class EdgeNode(InferenceNode):
    """Gives the fine answer near the end devices, with a network of medium size. It also encodes images for an upstream
    node that must not see them, instead of a weak end device (section 4.4 of the paper)."""

    settings: EdgeSettings
    encoders: Encoders | None

    @property
    def allowed_upstreams(self) -> tuple[str, ...]:
        return self.settings.allowed_upstreams


def create_app(node: EdgeNode) -> Starlette:
    """The Open Inference Protocol for the node's models, and the route on which it encodes for others."""
    if node.encoders is None:
        return node_app(node)
    relay = RelayEndpoint(node, node.encoders, node.settings)
    return node_app(node, [Route(f"{RELAY_PREFIX}/{{model}}/infer", relay, methods=["POST"])])
