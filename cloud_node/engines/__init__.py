"""The engines, which compute the networks of a cloud node: ONNX Runtime in its own process, another server, a Ray
cluster, or one that another package adds."""

from __future__ import annotations

from typing import cast

from cloud_node.engines.kind import EngineKind
from cloud_node.settings import ENGINES, CloudSettings
from models.manifest import Manifest
from tierkit.extensions import load
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.served import Loaded, ReleaseParts, ServedModels

__all__ = ["EngineKind", "load_engine", "load_next"]


async def load_engine(settings: CloudSettings, manifest: Manifest, lifecycle: Lifecycle) -> ServedModels:
    """The models of the node, computed by the engine that its settings name; see `EngineKind.load`.

    Raises:
        MissingExtra: the engine is not installed.
    """
    return await _engine_of(settings).load(settings, manifest, lifecycle)


async def load_next(settings: CloudSettings, manifest: Manifest, loaded: Loaded) -> ReleaseParts:
    """Load the networks of a further release; see `EngineKind.load_next`."""
    return await _engine_of(settings).load_next(settings, manifest, loaded)


def _engine_of(settings: CloudSettings) -> EngineKind:
    return cast(EngineKind, load(ENGINES, settings.engine))
