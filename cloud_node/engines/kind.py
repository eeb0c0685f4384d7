"""The interface of an engine: it computes the networks of a cloud node."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from cloud_node.settings import CloudSettings
from encryption.loading import upper_keys
from models.manifest import Manifest
from tierkit.errors import NeedsRestart
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.served import Loaded, ReleaseParts, ServedModels
from tierkit.types import Tier

__all__ = ["EngineKind"]


class EngineKind(Protocol):
    """An entry point of `terrace.engines`. A class that derives from it has to write only `load`."""

    reads: Collection[str] = ()
    """Settings for particular engines, `upstream` and `address` among them, that this one reads. The others must not be
    set."""

    def check(self, settings: CloudSettings) -> None:
        """Raise ValueError if the settings do not fit the engine."""
        return

    def batch_images(self, settings: CloudSettings) -> int:
        """Most images that it computes at a time."""
        return settings.max_batch_size

    async def load(self, settings: CloudSettings, manifest: Manifest, lifecycle: Lifecycle) -> ServedModels:
        """Return the models of the node, ready to run. `encryption.loading.load_served` makes them from a `Loader`.

        Args:
            lifecycle: shows what the engine waits for.

        Raises:
            SetupError: it cannot compute them.
        """
        ...

    async def load_next(self, settings: CloudSettings, manifest: Manifest, loaded: Loaded) -> ReleaseParts:
        """Load the networks of a further release, while the node serves.

        Raises:
            NeedsRestart: the engine does not have these networks, and takes networks only at its start.
            SetupError: a network cannot be loaded.
        """
        keys = upper_keys(settings, Tier.CLOUD, manifest, loaded.models)
        if not loaded.models.issuperset(keys):
            raise NeedsRestart(
                f"the engine {settings.engine} takes networks only when the node starts", is_trouble=True
            )
        return ReleaseParts(models=keys, served=ServedModels(ready=()))
