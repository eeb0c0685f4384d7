"""Start an end node: `python -m end_node`, `terrace end`."""

from __future__ import annotations

from functools import partial

from starlette.applications import Starlette

from encryption.heads import Encoders
from encryption.loading import load_end
from end_node.app import create_app
from end_node.node import EndNode
from end_node.settings import EndSettings
from models.releases import follow
from models.source import GivenSet, load_set
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import Build, serve
from tierkit.inference.served import NO_SUBSTITUTES, Substitutes

__all__ = ["building", "run", "start"]


def start(settings: EndSettings, substitutes: Substitutes = NO_SUBSTITUTES) -> int:
    """Run the node until a signal stops it; returns its exit code."""
    return serve(building(settings, substitutes), settings, node_id=settings.node_id)


def building(settings: EndSettings, substitutes: Substitutes = NO_SUBSTITUTES) -> Build:
    """Return a function that loads the node's networks and makes its application."""

    async def build(lifecycle: Lifecycle) -> Starlette:
        async def load(given: GivenSet) -> Starlette:
            manifest = given.manifest
            parts = await load_end(settings, manifest)
            encoders = Encoders(parts.heads, settings, substitutes.head)
            releases = follow(settings, lifecycle, given, partial(load_end, settings))
            made = (settings, parts.served, lifecycle, manifest.hierarchy, encoders)
            if settings.has_sources:
                # Not before: a node without sources needs none of it.
                from end_node.observing import ObservingNode
                from end_node.routes import source_routes

                observing = ObservingNode(*made, substitutes=substitutes)
                observing.fit = manifest.fit
                observing.follow(releases)
                return create_app(observing, source_routes(observing))
            node = EndNode(*made, substitutes=substitutes)
            node.follow(releases)
            return create_app(node)

        return await load_set(settings, lifecycle, load)

    return build


run = command(EndSettings, start)

if __name__ == "__main__":
    run_main(run)
