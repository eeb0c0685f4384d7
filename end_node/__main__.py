"""Start an end node: `python -m end_node`, `terrace end`."""

from __future__ import annotations

from starlette.applications import Starlette

from encryption.heads import Encoders
from encryption.loading import load_heads
from end_node.app import create_app
from end_node.node import EndNode
from end_node.settings import EndSettings
from models.manifest import Manifest
from models.serving import load_models
from models.source import load_set
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import serve
from tierkit.inference.node import NO_SUBSTITUTES, Substitutes
from tierkit.types import Tier

__all__ = ["run", "start"]


def start(settings: EndSettings, substitutes: Substitutes = NO_SUBSTITUTES) -> int:
    """Run the node until a signal stops it; returns its exit code."""

    async def build(lifecycle: Lifecycle) -> Starlette:
        async def load(manifest: Manifest) -> Starlette:
            models = await load_models(settings, Tier.END, manifest)
            encoders = Encoders(await load_heads(settings, manifest), settings, substitutes.head)
            if settings.has_sources:
                # Not before: a node without sources needs none of it.
                from end_node.observing import ObservingNode
                from end_node.routes import source_routes

                node = ObservingNode(settings, models, lifecycle, manifest.hierarchy, encoders, substitutes=substitutes)
                node.fit = manifest.fit
                return create_app(node, source_routes(node))
            return create_app(
                EndNode(settings, models, lifecycle, manifest.hierarchy, encoders, substitutes=substitutes)
            )

        return await load_set(settings, lifecycle, load)

    return serve(build, settings, node_id=settings.node_id)


run = command(EndSettings, start)

if __name__ == "__main__":
    run_main(run)
