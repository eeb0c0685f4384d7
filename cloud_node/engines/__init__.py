"""What computes the networks of a cloud node: ONNX Runtime in its own process, another server, or a Ray cluster."""

from __future__ import annotations

from cloud_node.engines.oip import load_oip
from cloud_node.engines.ray import load_ray
from cloud_node.settings import CloudSettings
from encryption.loading import load_served, load_upper, upper_keys
from models.manifest import Manifest
from tierkit.errors import NeedsRestart
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.served import Loaded, ReleaseParts, ServedModels
from tierkit.types import Tier

__all__ = ["load_engine", "load_next"]


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


async def load_next(settings: CloudSettings, manifest: Manifest, loaded: Loaded) -> ReleaseParts:
    """Load the networks of a further release, while the node serves.

    Raises:
        NeedsRestart: the engine does not have the networks of the release, and takes networks only at its start.
        SetupError: a network cannot be loaded.
    """
    if settings.engine == "onnx":
        return await load_upper(settings, Tier.CLOUD, manifest, loaded)
    keys = upper_keys(settings, Tier.CLOUD, manifest, loaded.models)
    if not loaded.models.issuperset(keys):
        raise NeedsRestart(f"the engine {settings.engine} takes networks only when the node starts", is_trouble=True)
    return ReleaseParts(models=keys, served=ServedModels(ready=()))
