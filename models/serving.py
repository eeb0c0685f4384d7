"""The networks that a node serves: found, fetched from the scheduler where they are missing, loaded."""

from __future__ import annotations

import asyncio
import difflib
import logging
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

import aiohttp
import anyio

from models.manifest import Manifest, ModelEntry, WeightsFile, load_manifest, weights_folder
from models.session import OnnxModel, load_model
from models.store import Fetch, ModelStore
from tierkit.errors import DeadlineExceeded, NotFound, SetupError, Unavailable, UpstreamError, WeightsError
from tierkit.http.client import authorization, calling, open_client, read_at_most
from tierkit.pacing import backoff_s
from tierkit.settings import NodeSettings
from tierkit.types import Tier

__all__ = ["chosen_entries", "load_models", "obtain_weights", "open_store"]

log = logging.getLogger(__name__)

_STALL_S = 10.0
"""A download that brings nothing for so long is begun again."""

_SHOWN_BYTES = 200


async def load_models(settings: NodeSettings, tier: Tier) -> list[OnnxModel]:
    """The networks that the node is told to serve, or the manifest's default for its tier, ready to run.

    Weights that are neither in the weights folder nor in the cache are fetched from the scheduler, and kept in the
    cache. While the scheduler cannot be reached this goes on trying, and says so once.

    Raises:
        SetupError: a name that the manifest does not have; weights that are missing with no scheduler to ask, that the
            scheduler does not have either, or that are not those of the manifest; or what `load_model` finds missing.
    """
    manifest = load_manifest(settings.weights)
    store = open_store(settings)
    loaded = []
    for entry in chosen_entries(manifest, settings.models, tier):
        path = await obtain_weights(store, entry, settings)
        load = partial(
            load_model,
            entry,
            path.parent,
            provider=settings.provider,
            threads=settings.cores,
            labels=manifest.labels(entry),
        )
        loaded.append(await anyio.to_thread.run_sync(load))
    return loaded


def open_store(settings: NodeSettings) -> ModelStore:
    """Where a node's weights are looked for, and kept."""
    return ModelStore([settings.weights or weights_folder()], settings.cache)


def chosen_entries(manifest: Manifest, names: tuple[str, ...], tier: Tier) -> list[ModelEntry]:
    """The networks of these names, or the one that the manifest names first for the tier.

    Raises:
        SetupError: a name that the manifest does not have, or none for this tier.
    """
    if not names:
        try:
            return [manifest.default_for(tier)]
        except NotFound as exc:
            raise SetupError(f"{exc}; name a model with --models") from exc
    known = {entry.name: entry for entry in manifest.models}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
            raise SetupError(f"the manifest has no model '{name}'; {hint}")
    return [known[name] for name in dict.fromkeys(names)]


async def obtain_weights(
    store: ModelStore, entry: WeightsFile, settings: NodeSettings, *, patient: bool = True
) -> Path:
    """The path of a weights file, fetched from the scheduler where it is missing; see `load_models`.

    Args:
        patient: whether to go on trying while the scheduler cannot be reached; else that is raised.

    Raises:
        TerraceError: as `load_models`.
    """
    failures = 0
    while True:
        try:
            return await store.obtain(entry, _fetch_from(settings))
        except (Unavailable, DeadlineExceeded, UpstreamError) as exc:
            if not patient:
                raise
            failures += 1
            if failures == 1:
                log.warning("cannot fetch model '%s' from the scheduler yet, trying on: %s", entry.name, exc)
            await asyncio.sleep(backoff_s(failures, first_s=0.2, cap_s=5.0, chance=random.random()))


def _fetch_from(settings: NodeSettings) -> Fetch:
    scheduler = settings.scheduler

    async def fetch(name: str, sha256: str) -> AsyncIterator[bytes]:
        if scheduler is None:
            raise WeightsError(
                f"the weights of model '{name}' are not here; give the folder that has them with --weights, or a "
                "scheduler to fetch them from with --scheduler"
            )
        log.info("fetching weights", extra={"model": name, "scheduler": scheduler})
        target = f"{scheduler}/v1/models/{quote(name, safe='')}/file"
        async with (
            open_client(tls_ca=settings.tls_ca) as http,
            calling("the scheduler", budget_s=None),
            http.get(
                target,
                params={"sha256": sha256},
                headers=authorization(settings.own_token()),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_STALL_S, sock_read=_STALL_S),
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status in (401, 403):
                said = (await read_at_most(answer, _SHOWN_BYTES)).decode("utf-8", "replace")
                raise SetupError(f"the scheduler gives this node no weights: {answer.status} {said}; see --token-file")
            if answer.status == 404:
                raise WeightsError(f"neither this node nor the scheduler has the weights of model '{name}' ({sha256})")
            if answer.status != 200:
                raise UpstreamError(f"the scheduler answered {answer.status}", status_code=answer.status)
            async for block in answer.content.iter_any():
                yield block

    return fetch
