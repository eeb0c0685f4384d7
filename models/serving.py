"""The networks that a node serves: found, fetched from the scheduler where they are missing, loaded."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import anyio

from models.manifest import Manifest, ModelEntry, WeightsFile, weights_folder
from models.session import OnnxModel, load_model
from models.source import chosen_entries, fetch_from, from_scheduler, pause
from models.store import ModelStore
from tierkit.errors import DeadlineExceeded, SetupError, Unavailable, UpstreamError
from tierkit.inference.background import in_background
from tierkit.inference.copies import NetworkCopies
from tierkit.inference.runner import examine
from tierkit.inference.served import NOTHING_LOADED, Loaded, ModelKey
from tierkit.settings import NodeSettings
from tierkit.tensors import Decode
from tierkit.types import Tier

__all__ = ["decode_of", "key_of", "load_models", "obtain_weights", "open_store"]

log = logging.getLogger(__name__)


async def load_models(
    settings: NodeSettings, tier: Tier, manifest: Manifest, loaded: Loaded = NOTHING_LOADED
) -> list[OnnxModel]:
    """Load the networks that the settings name, or the manifest's default for its tier, except those already loaded.

    Weights that are neither in the weights folder nor in the cache are fetched from the scheduler, and kept in the
    cache. At the start of a node, this waits for the scheduler and logs that once.

    Raises:
        SetupError: the manifest lacks a name; the networks answer only superclasses, but the scheduler asks for
            classes; weights are missing here and at the scheduler, or differ from the manifest; or `load_model` misses
            something.
        WeightsError: a network that the scheduler gave answers with NaN.
    """
    store = open_store(settings)
    models = []
    entries = chosen_entries(manifest, settings.model, tier, gpu=settings.provider == "cuda")
    if settings.scheduler is not None and tier is not Tier.END and all(entry.target == "coarse" for entry in entries):
        raise SetupError(
            f"{', '.join(entry.name for entry in entries)} answers only superclasses, and a scheduler asks the {tier} "
            "tier for classes: name a network with classes with --model, or leave --model out"
        )
    for entry in entries:
        if key_of(entry) in loaded.models:
            continue
        path = await obtain_weights(store, entry, settings, patient=not loaded.serving, copies=loaded.copies)
        load = partial(
            load_model,
            entry,
            path.parent,
            provider=settings.provider,
            threads=settings.cores,
            labels=manifest.labels(entry),
            decode=decode_of(manifest, entry),
        )
        if loaded.serving:
            models.append(await in_background(load))
            continue
        models.append(await anyio.to_thread.run_sync(load))
        if from_scheduler(settings):  # a node examines what it loads later in turn with its requests
            await anyio.to_thread.run_sync(examine, models[-1])
    return models


def key_of(entry: ModelEntry) -> ModelKey:
    """Identity of a network as a node serves it."""
    return ModelKey(entry.name, entry.sha256, entry.reading)


def decode_of(manifest: Manifest, entry: ModelEntry) -> Decode | None:
    """Return the decoder for images that come as files; None if they come as pixels."""
    if manifest.fit is not None:
        return None
    from models.pictures import decoder  # needs memory and time that other nodes have no use for

    return decoder(entry.fit)


def open_store(settings: NodeSettings) -> ModelStore:
    """Return the store in which a node looks for weights and keeps them."""
    if settings.models is None and settings.scheduler is not None:
        # The set is the scheduler's (`models.source`), and may be another than the bundled one.
        return ModelStore([], settings.cache, others=[weights_folder()])
    return ModelStore([settings.models or weights_folder()], settings.cache)


async def obtain_weights(
    store: ModelStore,
    entry: WeightsFile,
    settings: NodeSettings,
    *,
    patient: bool = True,
    copies: NetworkCopies | None = None,
) -> Path:
    """Return the path of a weights file, fetched from the scheduler if it is missing. See `load_models`.

    Args:
        copies: gets it from other nodes; None for a node that is not on the device list yet.
        patient: True to keep trying while the scheduler cannot be reached; False to raise its error.

    Raises:
        TerraceError: the weights cannot be found, fetched or verified.
    """
    if copies is not None and await anyio.to_thread.run_sync(store.find, entry) is None:
        path = await copies.obtain(entry.name, entry.sha256, fetch_from(settings))
        if path is not None:
            await anyio.to_thread.run_sync(store.adopt, entry, path)
    failures = 0
    while True:
        try:
            return await store.obtain(entry, fetch_from(settings))
        except (Unavailable, DeadlineExceeded, UpstreamError) as exc:
            if not patient:
                raise
            failures += 1
            if failures == 1:
                log.warning("cannot fetch model '%s' from the scheduler yet, trying on: %s", entry.name, exc)
            await pause(failures)
