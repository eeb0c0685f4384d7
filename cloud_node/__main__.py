"""Start a cloud node: `python -m cloud_node`, `terrace cloud`."""

from __future__ import annotations

from starlette.applications import Starlette

from cloud_node.engines import load_engine
from cloud_node.settings import CloudSettings
from models.manifest import Manifest
from models.source import load_set
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import serve
from tierkit.inference.node import NO_SUBSTITUTES, InferenceNode, Substitutes, node_app

__all__ = ["run", "start"]


def start(settings: CloudSettings, substitutes: Substitutes = NO_SUBSTITUTES) -> int:
    """Run the node until a signal stops it; returns its exit code."""

    async def build(lifecycle: Lifecycle) -> Starlette:
        async def load(manifest: Manifest) -> Starlette:
            models = await load_engine(settings, manifest, lifecycle)
            return node_app(InferenceNode(settings, models, lifecycle, substitutes=substitutes))

        return await load_set(settings, lifecycle, load)

    return serve(build, settings, node_id=settings.node_id)


run = command(CloudSettings, start)

if __name__ == "__main__":
    run_main(run)
