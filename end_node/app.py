"""The end node's HTTP application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from end_node.node import EndNode
from end_node.tasks import TaskEndpoint
from tierkit.inference.node import node_app

__all__ = ["create_app"]


def create_app(node: EndNode) -> Starlette:
    """The task route, and the Open Inference Protocol for the node's own models."""
    tasks = TaskEndpoint(node)
    return node_app(
        node, [Route("/v1/tasks/{task_id}", tasks, methods=["POST"])], below={"/v1/tasks": (tasks, "task_id")}
    )
