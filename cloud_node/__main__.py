"""Start a cloud node: `python -m cloud_node`, `terrace cloud`."""

from __future__ import annotations

from functools import partial

from starlette.applications import Starlette

from cloud_node.engines import load_engine, load_next
from cloud_node.settings import CloudSettings
from models.releases import follow
from models.source import GivenSet, load_set
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import Build, serve
from tierkit.inference.node import InferenceNode, node_app
from tierkit.inference.served import NO_SUBSTITUTES, Substitutes

__all__ = ["building", "run", "start"]


def start(settings: CloudSettings, substitutes: Substitutes = NO_SUBSTITUTES) -> int:
    """Run the node until a signal stops it; returns its exit code."""
    return serve(building(settings, substitutes), settings, node_id=settings.node_id)


def building(settings: CloudSettings, substitutes: Substitutes = NO_SUBSTITUTES) -> Build:
    """Return a function that loads the node's networks and makes its application."""

    async def build(lifecycle: Lifecycle) -> Starlette:
        async def load(given: GivenSet) -> Starlette:
            models = await load_engine(settings, given.manifest, lifecycle)
            releases = follow(settings, lifecycle, given, partial(load_next, settings))
            node = InferenceNode(settings, models, lifecycle, substitutes=substitutes)
            node.follow(releases)
            return node_app(node)

        return await load_set(settings, lifecycle, load)

    return build


run = command(CloudSettings, start)

if __name__ == "__main__":
    run_main(run)
