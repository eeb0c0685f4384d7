"""What computes the networks of a cloud node: ONNX Runtime in its own process, another server, or a Ray cluster."""

from __future__ import annotations

from cloud_node.engines.oip import load_oip
from cloud_node.engines.ray import load_ray
from cloud_node.settings import CloudSettings
from encryption.loading import load_served
from models.manifest import Manifest
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.node import ServedModels
from tierkit.types import Tier

__all__ = ["load_engine"]


async def load_engine(settings: CloudSettings, manifest: Manifest, lifecycle: Lifecycle) -> ServedModels:
    """The models of the node, computed by the engine that its settings name. `lifecycle` shows what it waits for.

    Raises:
        SetupError: as `encryption.loading.load_served`, or the engine cannot compute them.
        MissingExtra: the engine is not installed.
    """
    match settings.engine:
        case "oip":
            return await load_oip(settings, manifest, lifecycle)
        case "ray":
            return await load_ray(settings, manifest, lifecycle)
    return await load_served(settings, Tier.CLOUD, manifest)
