"""Start an edge node: `python -m edge_node`, `terrace edge`."""

from __future__ import annotations

from functools import partial

from starlette.applications import Starlette

from edge_node.app import EdgeNode, create_app
from edge_node.settings import EdgeSettings
from encryption.heads import Encoders
from encryption.loading import load_upper
from models.releases import follow
from models.source import GivenSet, load_set
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import Build, serve
from tierkit.inference.served import NO_SUBSTITUTES, Substitutes
from tierkit.types import Tier

__all__ = ["building", "run", "start"]


def start(settings: EdgeSettings, substitutes: Substitutes = NO_SUBSTITUTES) -> int:
    """Run the node until a signal stops it; returns its exit code."""
    return serve(building(settings, substitutes), settings, node_id=settings.node_id)


def building(settings: EdgeSettings, substitutes: Substitutes = NO_SUBSTITUTES) -> Build:
    """Return a function that loads the node's networks and makes its application."""

    async def build(lifecycle: Lifecycle) -> Starlette:
        async def load(given: GivenSet) -> Starlette:
            build = partial(load_upper, settings, Tier.EDGE, encodes=True)
            parts = await build(given.manifest)
            encoders = Encoders(parts.heads, settings, substitutes.head)
            releases = follow(settings, lifecycle, given, build)
            node = EdgeNode(settings, parts.served, lifecycle, encoders, substitutes=substitutes)
            node.follow(releases)
            return create_app(node)

        return await load_set(settings, lifecycle, load)

    return build


run = command(EdgeSettings, start)

if __name__ == "__main__":
    run_main(run)
