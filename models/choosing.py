"""A node's choice among the networks of its tier, if its model set has several."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from pathlib import Path

import anyio

from models.fitting import WITHIN_MS, Capacity, judge, last_resort, to_measure
from models.manifest import Manifest, ModelEntry
from models.serving import obtain_weights, open_store
from models.session import load_model
from tierkit import memory
from tierkit.errors import NotFound
from tierkit.inference.background import in_background
from tierkit.inference.served import NOTHING_LOADED, Loaded
from tierkit.settings import NodeSettings
from tierkit.types import Tier

__all__ = ["measure_ms", "with_choice"]

log = logging.getLogger(__name__)

_IMAGES_PER_CORE = 4
"""Fewer images would leave cores without work; see `models.session.OnnxModel`."""

_MOST_MEASURED = 256
_measured: dict[tuple[str, str, int], float] = {}
"""Milliseconds per image by sha256, provider and cores, the latest: releases share networks."""


async def with_choice(
    settings: NodeSettings, tier: Tier, manifest: Manifest, loaded: Loaded = NOTHING_LOADED
) -> Manifest:
    """The manifest with the network that this node chooses as the default of its tier.

    Nothing is measured without a choice: if the settings name the networks, or if only one suits the processor, or has
    tuned thresholds. The choice is the same at each call of this process.

    Raises:
        SetupError: see `models.serving.load_models`.
    """
    candidates = _candidates(settings, tier, manifest)
    if not candidates:
        return manifest
    entry = candidates[0] if len(candidates) == 1 else await _chosen(settings, tier, manifest, candidates, loaded)
    return manifest.preferring(entry)


def measure_ms(
    entry: ModelEntry, folder: Path, *, provider: str, cores: int, labels: Sequence[str] | None = None
) -> float:
    """Milliseconds per image of a network on this machine, with all of these cores at work.

    Raises:
        SetupError: see `models.session.load_model`.
    """
    from models.speed import least_ms_per_image, probe_images  # needs memory that a node without a choice does not take

    model = load_model(entry, folder, provider=provider, threads=cores, labels=labels)
    try:
        return least_ms_per_image(
            lambda batch: model.run({"images": batch}, ["logits"]),
            probe_images(entry.input_shape),
            _IMAGES_PER_CORE * cores,
        )
    finally:
        model.unload()


def _candidates(settings: NodeSettings, tier: Tier, manifest: Manifest) -> tuple[ModelEntry, ...]:
    """The networks to choose from; none if there is nothing to choose."""
    if settings.model:
        return ()
    try:
        candidates = manifest.candidates(tier, gpu=settings.provider == "cuda")
    except NotFound:  # said by those that load the network
        return ()
    if getattr(settings, "only_features", False):
        encoded = {encoder.network for encoder in manifest.encoders}
        candidates = tuple(entry for entry in candidates if entry.name in encoded)
    return candidates


async def _chosen(
    settings: NodeSettings, tier: Tier, manifest: Manifest, candidates: tuple[ModelEntry, ...], loaded: Loaded
) -> ModelEntry:
    capacity = Capacity(free_bytes=_free_at_start(), within_ms=WITHIN_MS[tier])
    store = open_store(settings)

    def known() -> dict[str, float]:
        return {entry.name: _measured[key] for entry in candidates if (key := _key(entry, settings)) in _measured}

    while (entry := to_measure(candidates, capacity, known())) is not None:
        path = await obtain_weights(store, entry, settings, patient=not loaded.serving, copies=loaded.copies)
        measure = partial(
            measure_ms,
            entry,
            path.parent,
            provider=settings.provider,
            cores=settings.cores,
            labels=manifest.labels(entry),
        )
        run = in_background if loaded.serving else anyio.to_thread.run_sync
        if len(_measured) >= _MOST_MEASURED:
            del _measured[next(iter(_measured))]
        _measured[_key(entry, settings)] = await run(measure)
    judged = judge(candidates, capacity, known())
    best = next((each for each in judged if each.outcome == "chosen"), None)
    _log_once(tuple((each.name, each.reason) for each in judged), None if best is None else best.name)
    name = (best or last_resort(judged)).name
    return next(entry for entry in candidates if entry.name == name)


def _key(entry: ModelEntry, settings: NodeSettings) -> tuple[str, str, int]:
    return entry.sha256, settings.provider, settings.cores


@cache
def _free_at_start() -> int | None:
    """Memory that was free before the first network was loaded: what is loaded later does not change the choice."""
    return memory.free_bytes()


@lru_cache(maxsize=_MOST_MEASURED)
def _log_once(judged: tuple[tuple[str, str], ...], chosen: str | None) -> None:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in judged)
    if chosen is None:
        log.warning("no network of the tier suits this machine, so the nearest one is served: %s", reasons)
    else:
        log.info("network chosen", extra={"network": chosen, "why": reasons})
