"""The engine `onnx`: ONNX Runtime computes the networks in the process of the node."""

from __future__ import annotations

from cloud_node.engines.kind import EngineKind
from cloud_node.settings import CloudSettings
from encryption.loading import load_served, load_upper
from models.manifest import Manifest
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.served import Loaded, ReleaseParts, ServedModels
from tierkit.types import Tier

__all__ = ["ENGINE"]


class _Onnx(EngineKind):
    async def load(self, settings: CloudSettings, manifest: Manifest, lifecycle: Lifecycle) -> ServedModels:
        return await load_served(settings, Tier.CLOUD, manifest)

    async def load_next(self, settings: CloudSettings, manifest: Manifest, loaded: Loaded) -> ReleaseParts:
        return await load_upper(settings, Tier.CLOUD, manifest, loaded)


ENGINE = _Onnx()
