"""Start an edge node: `python -m edge_node`, `terrace edge`."""

from __future__ import annotations

from starlette.applications import Starlette

from edge_node.app import create_app
from edge_node.node import EdgeNode
from edge_node.settings import EdgeSettings
from encryption.heads import Encoders
from encryption.loading import load_heads, load_served
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import serve

__all__ = ["main", "run", "start"]


def start(settings: EdgeSettings) -> int:
    """Run the node until a signal stops it; returns its exit code."""

    async def build(lifecycle: Lifecycle) -> Starlette:
        encoders = Encoders(await load_heads(settings), settings)
        return create_app(EdgeNode(settings, await load_served(settings, EdgeNode.tier), lifecycle, encoders))

    return serve(build, settings, node_id=settings.node_id)


run = command(EdgeSettings, start)


def main() -> None:
    run_main(run)


if __name__ == "__main__":
    main()
