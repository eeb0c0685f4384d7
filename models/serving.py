"""The networks that a node serves: found, fetched from the scheduler where they are missing, loaded."""

from __future__ import annotations

import asyncio
import difflib
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

import aiohttp
import anyio
from pydantic import ValidationError

from models.manifest import (
    Manifest,
    ModelEntry,
    WeightsFile,
    checked_manifest,
    load_manifest,
    weights_folder,
)
from models.session import OnnxModel, load_model
from models.store import Fetch, ModelStore
from tierkit.documents import faults
from tierkit.errors import (
    DeadlineExceeded,
    NotFound,
    SetupError,
    Standby,
    TerraceError,
    Unavailable,
    UpstreamError,
    WeightsError,
)
from tierkit.http.client import authorization, calling, open_client, read_at_most
from tierkit.http.errors import error_of
from tierkit.http.ring import Ring, Round
from tierkit.inference.model import Decode
from tierkit.pacing import backoff_s
from tierkit.settings import NodeSettings
from tierkit.types import Tier

__all__ = ["chosen_entries", "decode_of", "load_models", "obtain_manifest", "obtain_weights", "open_store"]

log = logging.getLogger(__name__)

_STALL_S = 10.0
"""A download that brings nothing for so long is begun again."""

_SHOWN = 200
"""Characters of a refusal that a message repeats."""
_REFUSAL_BYTES = 4096
_MANIFEST_BYTES = 64 * 1024**2
"""Of a manifest, at most: one of a hundred thousand classes has a few million."""


async def obtain_manifest(settings: NodeSettings) -> Manifest:
    """The manifest of the model set that the node serves from: that of `models`; else the scheduler's, so that all of a
    fleet answers the same classes; else, or where the scheduler cannot be reached, the bundled one. While there are
    schedulers and none of them leads this goes on trying, and says so once.

    Raises:
        SetupError: it cannot be read, or is wrong; or the scheduler gives none.
    """
    if settings.models is not None or settings.scheduler is None:
        return load_manifest(settings.models)
    failures, content = 0, None
    while content is None:
        try:
            async with _asked(settings, "/v1/models", what="the model set") as (scheduler, answer):
                content = await read_at_most(answer, _MANIFEST_BYTES)
        except Standby as exc:
            failures += 1
            if failures == 1:
                log.warning("no model set from the scheduler yet, trying on: %s", exc)
            await _pause(failures)
        except (Unavailable, DeadlineExceeded, UpstreamError) as exc:
            log.warning("no model set from the scheduler, so this node serves the bundled one: %s", exc)
            return load_manifest()
    source = f"of {scheduler}"
    try:
        return checked_manifest(Manifest.model_validate_json(content), source)
    except ValidationError as exc:
        raise WeightsError(f"the manifest {source} is wrong: {faults(exc, Manifest)}") from exc


async def load_models(settings: NodeSettings, tier: Tier, manifest: Manifest) -> list[OnnxModel]:
    """The networks that the node is told to serve, or the manifest's default for its tier, ready to run.

    Weights that are neither in the weights folder nor in the cache are fetched from the scheduler, and kept in the
    cache. While the scheduler cannot be reached this goes on trying, and says so once.

    Raises:
        SetupError: a name that the manifest does not have; weights that are missing with no scheduler to ask, that the
            scheduler does not have either, or that are not those of the manifest; or what `load_model` finds missing.
    """
    store = open_store(settings)
    loaded = []
    for entry in chosen_entries(manifest, settings.model, tier, gpu=settings.provider == "cuda"):
        path = await obtain_weights(store, entry, settings)
        load = partial(
            load_model,
            entry,
            path.parent,
            provider=settings.provider,
            threads=settings.cores,
            labels=manifest.labels(entry),
            decode=decode_of(manifest, entry),
        )
        loaded.append(await anyio.to_thread.run_sync(load))
    return loaded


def decode_of(manifest: Manifest, entry: ModelEntry) -> Decode | None:
    """How a network gets images that come as files; None where they come as pixels."""
    if manifest.fit is not None:
        return None
    from models.pictures import decoder  # needs memory and time that other nodes have no use for

    return decoder(entry.fit)


def open_store(settings: NodeSettings) -> ModelStore:
    """Where a node's weights are looked for, and kept."""
    if settings.models is None and settings.scheduler is not None:
        # The set is the scheduler's (`obtain_manifest`), and may be another than the bundled one.
        return ModelStore([], settings.cache, others=[weights_folder()])
    return ModelStore([settings.models or weights_folder()], settings.cache)


def chosen_entries(manifest: Manifest, names: tuple[str, ...], tier: Tier, *, gpu: bool = False) -> list[ModelEntry]:
    """The networks of these names, or the default of the tier; see `Manifest.default_for`.

    Raises:
        SetupError: a name that the manifest does not have, or none for this tier.
    """
    if not names:
        try:
            return [manifest.default_for(tier, gpu=gpu)]
        except NotFound as exc:
            raise SetupError(
                f"{exc}: 'terrace models import FILE.onnx --models SET --tier {tier} --labels labels.txt' enters one, "
                "--model names one of another tier"
            ) from exc
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
            await _pause(failures)


async def _pause(failures: int) -> None:
    await asyncio.sleep(backoff_s(failures, first_s=0.2, cap_s=5.0, chance=random.random()))


def _fetch_from(settings: NodeSettings) -> Fetch:
    async def fetch(name: str, sha256: str) -> AsyncIterator[bytes]:
        if settings.scheduler is None:
            raise WeightsError(
                f"the weights of model '{name}' are not here; give the folder that has them with --models, or a "
                "scheduler to fetch them from with --scheduler"
            )
        path, what = f"/v1/models/{quote(name, safe='')}/file", f"the weights of model '{name}' ({sha256})"
        async with _asked(settings, path, what=what, params={"sha256": sha256}) as (scheduler, answer):
            log.info("fetching weights", extra={"model": name, "scheduler": scheduler})
            async for block in answer.content.iter_any():
                yield block

    return fetch


@asynccontextmanager
async def _asked(
    settings: NodeSettings, path: str, *, what: str, params: dict[str, str] | None = None
) -> AsyncIterator[tuple[str, aiohttp.ClientResponse]]:
    """The URL of the scheduler that leads, and its answer to a GET, of which the body is still to come; `what` names
    it in messages.

    Raises:
        SetupError: it refuses this node's token.
        WeightsError: it has no such thing.
        Standby: none leads at the moment.
        TerraceError: as `calling`.
    """
    ring = Ring(settings.scheduler or ())
    asked = Round(ring)
    async with open_client(tls_ca=settings.tls_ca) as http:
        while True:
            scheduler = ring.current
            try:
                answer = await _ask(http, scheduler + path, settings, what=what, params=params)
                break
            except TerraceError as exc:
                trouble = asked.failed(scheduler, exc)
            if trouble is not None:
                raise trouble
        async with calling("the scheduler", budget_s=None), answer:
            yield scheduler, answer


async def _ask(
    http: aiohttp.ClientSession, url: str, settings: NodeSettings, *, what: str, params: dict[str, str] | None
) -> aiohttp.ClientResponse:
    async with calling("the scheduler", budget_s=None):
        answer = await http.get(
            url,
            params=params,
            headers=authorization(settings.own_token()()),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_STALL_S, sock_read=_STALL_S),
            allow_redirects=False,
        )
        if answer.status == 200:
            return answer
        async with answer:
            said = await read_at_most(answer, _REFUSAL_BYTES)
    if answer.status in (401, 403):
        shown = said.decode("utf-8", "replace")[:_SHOWN]
        raise SetupError(f"the scheduler gives this node no weights: {answer.status} {shown}; see --token-file")
    if answer.status == 404:
        raise WeightsError(f"neither this node nor the scheduler has {what}")
    error = error_of("the scheduler", answer.status, said)
    if isinstance(error, Standby):
        raise error
    raise UpstreamError(f"the scheduler answered {answer.status}", status_code=answer.status)
