"""Where a node's model set comes from: a folder, the scheduler, or what the scheduler gave last time."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import anyio

from models.manifest import Manifest, ModelEntry, load_manifest, parse_manifest
from models.store import Fetch
from tierkit.atomic import write_atomically
from tierkit.errors import (
    DeadlineExceeded,
    Forbidden,
    NotFound,
    NotTerrace,
    SetupError,
    Standby,
    TerraceError,
    Unauthenticated,
    Unavailable,
    UpstreamError,
    WeightsError,
    WeightsMissing,
)
from tierkit.http.client import authorization, calling, open_client, read_at_most
from tierkit.http.errors import error_of
from tierkit.http.failover import Ring, Round
from tierkit.http.lifecycle import Lifecycle
from tierkit.pacing import backoff_s
from tierkit.settings import NodeSettings
from tierkit.types import Tier

__all__ = ["chosen_entries", "fetch_from", "load_set", "obtain_manifest", "pause"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_STALL_S = 10.0
"""A download that brings nothing for this long is started again."""
_SHOWN = 200
"""Characters of a refusal that a message repeats."""
_REFUSAL_BYTES = 4096
_CONTENT_TYPES = ("application/json", "application/octet-stream")
"""Of a manifest and of weights; the page of a captive portal is something else."""
_MANIFEST_BYTES = 64 * 1024**2
"""Upper bound for a manifest: one of a hundred thousand classes has a few million bytes."""


async def load_set(settings: NodeSettings, lifecycle: Lifecycle, load: Callable[[Manifest], Awaitable[T]]) -> T:
    """Load the node's networks. If the set is the scheduler's and has been replaced meanwhile, start over with the new
    one.

    Args:
        lifecycle: of the node, which starts again when the set has been replaced later.
        load: loads what the node serves from a manifest.

    Raises:
        SetupError: as `obtain_manifest`, or by `load`.
    """
    failures = 0
    while True:
        manifest = await obtain_manifest(settings)
        lifecycle.is_current = partial(_is_current, settings, manifest)
        try:
            return await load(manifest)
        except WeightsMissing as exc:
            if not _from_scheduler(settings):
                raise
            failures += 1
            if failures == 1:
                log.warning("asking the scheduler for its model set again: %s", exc)
            await pause(failures)


async def obtain_manifest(settings: NodeSettings) -> Manifest:
    """Return the manifest of the model set that the node serves from.

    It is that of the folder `models`, if the node has one. Otherwise it is the scheduler's, so that the whole fleet
    answers with the same networks. A copy stays in the cache and is used while the scheduler is away. Without a copy
    the node waits. A node without a scheduler serves the bundled set.

    Raises:
        SetupError: the manifest of the folder cannot be read or is wrong; or the scheduler refuses this node's token,
            and there is no copy.
    """
    if not _from_scheduler(settings):
        return load_manifest(settings.models)
    failures = 0
    while True:
        try:
            manifest = await _given(settings)
        except (Unavailable, DeadlineExceeded, UpstreamError, SetupError) as exc:
            kept = None if isinstance(exc, Standby) else await anyio.to_thread.run_sync(_recall, settings)
            if kept is not None:
                log.warning("no model set from the scheduler, so this node serves the one it had last: %s", exc)
                return kept
            if isinstance(exc, SetupError) and not isinstance(exc, WeightsError):
                raise  # its token is refused: a person must act
            failures += 1
            if failures == 1:
                log.warning("no model set from the scheduler yet, trying again: %s", exc)
            await pause(failures)
        else:
            await anyio.to_thread.run_sync(_remember, settings, manifest)
            return manifest


async def _is_current(settings: NodeSettings, served: Manifest) -> bool:
    """True if the node would load the same set again. Also true if that cannot be found out, or if the other set has no
    network for this node: then it keeps what it has, and the scheduler refuses it.

    Args:
        served: what the node has loaded.
    """
    try:
        if not _from_scheduler(settings):
            found = await anyio.to_thread.run_sync(load_manifest, settings.models)
        else:
            found = await _given(settings, known=served)
        chosen_entries(found, settings.model, Tier(settings.service), gpu=settings.provider == "cuda")
    except TerraceError as exc:
        log.debug("the model set cannot be compared with the one served: %s", exc)
        return True
    return found.digest == served.digest


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


def _from_scheduler(settings: NodeSettings) -> bool:
    return settings.models is None and settings.scheduler is not None


async def _given(settings: NodeSettings, known: Manifest | None = None) -> Manifest:
    """The manifest of the scheduler.

    Args:
        known: is returned if it is still the scheduler's, without sending it again.

    Raises:
        WeightsError: it is wrong.
        TerraceError: as `_asked`.
    """
    headers = {} if known is None else {"If-None-Match": f'"{known.digest}"'}
    async with _asked(settings, "/v1/models", what="the model set", headers=headers) as (scheduler, answer):
        if known is not None and answer.status == 304:
            return known
        content = await read_at_most(answer, _MANIFEST_BYTES)
    return parse_manifest(content, f"of {scheduler}")


def _copy_of(settings: NodeSettings) -> Path:
    """Where the last manifest of these schedulers is kept; nodes of several fleets may share a cache."""
    schedulers = " ".join(sorted(settings.scheduler or ()))
    return settings.cache / "sets" / f"{hashlib.sha256(schedulers.encode()).hexdigest()[:16]}.json"


def _remember(settings: NodeSettings, manifest: Manifest) -> None:
    """Keep a copy for a start without the scheduler. Without a place for it the node works all the same."""
    path, content = _copy_of(settings), manifest.as_json()
    try:
        if not path.is_file() or path.read_bytes() != content:
            write_atomically(path, content)
    except (SetupError, OSError) as exc:
        log.warning("no copy of the model set is kept, so this node cannot start without its scheduler: %s", exc)


def _recall(settings: NodeSettings) -> Manifest | None:
    """The copy; None if there is none that can be used."""
    path = _copy_of(settings)
    try:
        return parse_manifest(path.read_bytes(), f"in {path}")
    except FileNotFoundError:
        return None
    except (OSError, WeightsError) as exc:
        log.warning("the copy of the model set cannot be used: %s", exc)
        return None


async def pause(failures: int) -> None:
    """Wait before the next try."""
    await asyncio.sleep(backoff_s(failures, first_s=0.2, cap_s=5.0, chance=random.random()))


def fetch_from(settings: NodeSettings) -> Fetch:
    """Return a function that fetches weights from the scheduler."""

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
    settings: NodeSettings,
    path: str,
    *,
    what: str,
    params: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
) -> AsyncIterator[tuple[str, aiohttp.ClientResponse]]:
    """The URL of the scheduler that leads, and its answer to a GET, of which the body is still to come; `what` names
    it in messages.

    Raises:
        SetupError: it refuses this node's token.
        WeightsMissing: it has no such thing.
        Standby: none leads at the moment.
        TerraceError: as `calling`.
    """
    ring = Ring(settings.scheduler or ())
    asked = Round(ring)
    async with open_client(tls_ca=settings.tls_ca) as http:
        while True:
            scheduler = ring.current
            try:
                answer = await _ask(http, scheduler + path, settings, what=what, params=params, headers=headers or {})
                break
            except TerraceError as exc:
                trouble = asked.failed(scheduler, exc)
            if trouble is not None:
                raise trouble
        async with calling("the scheduler", budget_s=None), answer:
            yield scheduler, answer


async def _ask(
    http: aiohttp.ClientSession,
    url: str,
    settings: NodeSettings,
    *,
    what: str,
    params: dict[str, str] | None,
    headers: dict[str, str],
) -> aiohttp.ClientResponse:
    async with calling("the scheduler", budget_s=None):
        answer = await http.get(
            url,
            params=params,
            headers={**authorization(settings.own_token()()), **headers},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_STALL_S, sock_read=_STALL_S),
            allow_redirects=False,
        )
        if answer.status == 304 or (answer.status == 200 and answer.content_type in _CONTENT_TYPES):
            return answer
        async with answer:
            said = await read_at_most(answer, _REFUSAL_BYTES)
    if answer.status == 200:
        raise NotTerrace(f"no scheduler answers at {url}: it sent {answer.content_type[:_SHOWN]}", status_code=200)
    error = error_of(f"the scheduler at {url}", answer.status, said)
    if isinstance(error, Unauthenticated | Forbidden):
        raise SetupError(f"the scheduler gives this node no weights: {str(error)[:_SHOWN]}; see --token-file")
    if isinstance(error, NotFound):
        raise WeightsMissing(f"neither this node nor the scheduler has {what}")
    if isinstance(error, Standby | NotTerrace):
        raise error
    raise UpstreamError(f"{url} answered {answer.status}: {str(error)[:_SHOWN]}", status_code=answer.status)
