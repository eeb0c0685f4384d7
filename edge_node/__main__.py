"""Start an edge node: `python -m edge_node`, `terrace edge`."""

from __future__ import annotations

from starlette.applications import Starlette

from edge_node.app import EdgeNode, create_app
from edge_node.settings import EdgeSettings
from encryption.heads import Encoders
from encryption.loading import load_heads, load_served
from models.manifest import Manifest
from models.source import load_set
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import serve
from tierkit.inference.node import NO_SUBSTITUTES, Substitutes
from tierkit.types import Tier

__all__ = ["run", "start"]


def start(settings: EdgeSettings, substitutes: Substitutes = NO_SUBSTITUTES) -> int:
    """Run the node until a signal stops it; returns its exit code."""

    async def build(lifecycle: Lifecycle) -> Starlette:
        async def load(manifest: Manifest) -> Starlette:
            models = await load_served(settings, Tier.EDGE, manifest)
            encoders = Encoders(await load_heads(settings, manifest), settings, substitutes.head)
            return create_app(EdgeNode(settings, models, lifecycle, encoders, substitutes=substitutes))

        return await load_set(settings, lifecycle, load)

    return serve(build, settings, node_id=settings.node_id)


run = command(EdgeSettings, start)

if __name__ == "__main__":
    run_main(run)
