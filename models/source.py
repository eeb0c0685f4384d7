"""Sources of a node's model set: a folder, the scheduler, or the set that the scheduler gave last time."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

import aiohttp
import anyio

from models.manifest import Manifest, ModelEntry, load_manifest, parse_manifest
from tierkit.atomic import write_atomically
from tierkit.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidAnswer,
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
from tierkit.inference.holding import UNKNOWN, Told, read_releases
from tierkit.pacing import backoff_s
from tierkit.settings import NodeSettings
from tierkit.types import Tier
from tierkit.wire.messages import RELEASES_HEADER

__all__ = [
    "FetchFrom",
    "GivenSet",
    "chosen_entries",
    "fetch_from",
    "from_scheduler",
    "given_now",
    "given_release",
    "kept_releases",
    "load_set",
    "obtain_set",
    "pause",
    "read_copy",
    "remember",
    "sets_folder",
]

log = logging.getLogger(__name__)

T = TypeVar("T")


class FetchFrom(Protocol):
    """Yields the bytes of a weights file, from `start` on."""

    def __call__(self, name: str, sha256: str, start: int = 0) -> AsyncIterator[bytes]: ...


_STALL_S = 10.0
"""A download that brings nothing for this long is started again."""
_SHOWN = 200
"""Characters of a refusal that a message repeats."""
_REFUSAL_BYTES = 4096
_CONTENT_TYPES = ("application/json", "application/octet-stream")
"""Content types of a manifest and of weights; the page of a captive portal has another one."""
_MANIFEST_BYTES = 64 * 1024**2
"""Upper bound for a manifest: one of a hundred thousand classes has a few million bytes."""


@dataclass(frozen=True, slots=True)
class GivenSet:
    """The model set that a node serves from."""

    manifest: Manifest
    release: int = UNKNOWN
    """Number of its release; `UNKNOWN` if the set belongs to no release, or the scheduler names no number."""


async def load_set(settings: NodeSettings, lifecycle: Lifecycle, load: Callable[[GivenSet], Awaitable[T]]) -> T:
    """Load the node's networks. If the scheduler has replaced its set meanwhile, start over with the new one. If the
    new one cannot be loaded, load an earlier one from the cache.

    Args:
        lifecycle: lifecycle of the node, which restarts when the set is replaced later.
        load: loads what the node serves from a model set.

    Raises:
        SetupError: the set cannot be obtained or loaded.
    """
    failures = 0
    while True:
        given = await obtain_set(settings)
        lifecycle.is_current = partial(_is_current, settings, given.manifest)
        try:
            loaded = await load(given)
            if given.release != UNKNOWN:
                await anyio.to_thread.run_sync(remember, settings, given)
            return loaded
        except WeightsMissing as exc:
            if not from_scheduler(settings):
                raise
            failures += 1
            if failures == 1:
                log.warning("asking the scheduler for its model set again: %s", exc)
            await pause(failures)
        except SetupError as exc:
            if not from_scheduler(settings):
                raise
            for kept in await anyio.to_thread.run_sync(kept_sets, settings):
                if kept.manifest.digest != given.manifest.digest:
                    with contextlib.suppress(SetupError):
                        loaded = await load(kept)
                        log.warning("serving an earlier model set, since the present one cannot be loaded: %s", exc)
                        return loaded
            raise


async def obtain_set(settings: NodeSettings) -> GivenSet:
    """Return the model set that the node serves from.

    It is the folder `models`, if the node has one. Otherwise it is the scheduler's, so that the whole fleet answers
    with the same networks. A copy stays in the cache and is used while the scheduler is away. Without a copy the node
    waits. A node without a scheduler serves the bundled set.

    Raises:
        SetupError: the manifest of the folder cannot be read or is wrong; or the scheduler refuses this node's token,
            and there is no copy.
    """
    if not from_scheduler(settings):
        return GivenSet(load_manifest(settings.models))
    failures = 0
    while True:
        try:
            manifest, told = await given_now(settings)
        except (Unavailable, DeadlineExceeded, UpstreamError, SetupError) as exc:
            kept = [] if isinstance(exc, Standby) else await anyio.to_thread.run_sync(kept_sets, settings)
            if kept:
                log.warning("no model set from the scheduler, so this node serves the one it had last: %s", exc)
                return kept[0]
            if isinstance(exc, SetupError) and not isinstance(exc, WeightsError):
                raise  # its token is refused: a person must act
            failures += 1
            if failures == 1:
                log.warning("no model set from the scheduler yet, trying again: %s", exc)
            await pause(failures)
        else:
            given = GivenSet(manifest, UNKNOWN if told is None else told.numbers[0])
            # A release is the last one served once it is loaded; until then another one may have to do.
            last = given.release == UNKNOWN or not _last_set(settings).exists()
            await anyio.to_thread.run_sync(partial(remember, settings, given, last=last))
            return given


async def _is_current(settings: NodeSettings, served: Manifest) -> bool:
    """True if the node would load the same set again. Also true if that cannot be found out, or if the other set has no
    network for this node: then it keeps what it has, and the scheduler refuses it.

    Args:
        served: manifest of the networks that the node has loaded.
    """
    try:
        if not from_scheduler(settings):
            found = await anyio.to_thread.run_sync(load_manifest, settings.models)
        else:
            found, _ = await given_now(settings, known=served)
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


def from_scheduler(settings: NodeSettings) -> bool:
    """True if the scheduler gives the node its networks."""
    return settings.models is None and settings.scheduler is not None


async def given_now(settings: NodeSettings, known: Manifest | None = None) -> tuple[Manifest, Told | None]:
    """Return the manifest of the current release and its number. A scheduler without releases gives no number.

    Args:
        known: a manifest that is returned, instead of downloaded again, if it is still current.

    Raises:
        WeightsError: it is wrong.
        TerraceError: the scheduler refuses, has no such set, or cannot be reached.
    """
    return await _manifest(settings, "/v1/models", "the model set", known)


async def given_release(settings: NodeSettings, number: int, known: Manifest | None = None) -> Manifest:
    """The manifest of a release. Arguments and errors as for `given_now`.

    Raises:
        WeightsMissing: the scheduler has no such release.
    """
    manifest, _ = await _manifest(settings, f"/v1/releases/{number}/manifest", f"release {number}", known)
    return manifest


async def _manifest(
    settings: NodeSettings, path: str, what: str, known: Manifest | None
) -> tuple[Manifest, Told | None]:
    headers = {} if known is None else {"If-None-Match": f'"{known.digest}"'}
    async with _asked(settings, path, what=what, headers=headers) as (scheduler, answer):
        told = read_releases(answer.headers.get(RELEASES_HEADER))
        if known is not None and answer.status == 304:
            return known, told
        content = await read_at_most(answer, _MANIFEST_BYTES)
    return parse_manifest(content, f"of {scheduler}"), told


def sets_folder(settings: NodeSettings) -> Path:
    """Folder with the manifests of these schedulers' releases, by number; nodes of several fleets may share a
    cache. A file of the same name with `.json` holds the last one that the node served."""
    schedulers = " ".join(sorted(settings.scheduler or ()))
    return settings.cache / "sets" / hashlib.sha256(schedulers.encode()).hexdigest()[:16]


def _last_set(settings: NodeSettings) -> Path:
    return sets_folder(settings).with_suffix(".json")


def remember(settings: NodeSettings, given: GivenSet, *, last: bool = True) -> None:
    """Keep a copy for a start without the scheduler. Without a place for it the node works all the same.

    Args:
        last: True if that start serves it.
    """
    paths = [_last_set(settings)] if last else []
    if given.release != UNKNOWN:
        paths.append(sets_folder(settings) / f"{given.release}.json")
    content = given.manifest.as_json()
    try:
        for path in paths:
            if not path.is_file() or path.read_bytes() != content:
                write_atomically(path, content)
    except (SetupError, OSError) as exc:
        log.warning("no copy of the model set is kept, so this node cannot start without its scheduler: %s", exc)


def kept_releases(settings: NodeSettings) -> dict[int, Manifest]:
    """Manifests of releases whose copies can be used, by number, the newest first."""
    found: dict[int, Manifest] = {}
    for path in sets_folder(settings).glob("*.json"):
        if path.stem.isascii() and path.stem.isdigit() and (manifest := read_copy(path)) is not None:
            found[int(path.stem)] = manifest
    return dict(sorted(found.items(), reverse=True))


def kept_sets(settings: NodeSettings) -> list[GivenSet]:
    """Copies that can be used, beginning with the set that was served last."""
    releases = kept_releases(settings)
    kept = [GivenSet(manifest, number) for number, manifest in releases.items()]
    last = read_copy(_last_set(settings))
    if last is not None:
        number = next((number for number, one in releases.items() if one.digest == last.digest), UNKNOWN)
        kept = [GivenSet(last, number), *(one for one in kept if one.release != number)]
    return kept


def read_copy(path: Path) -> Manifest | None:
    """A manifest in the cache; None if it is missing or cannot be used."""
    try:
        return parse_manifest(path.read_bytes(), f"in {path}")
    except FileNotFoundError:
        return None
    except (OSError, WeightsError) as exc:
        log.warning("a copy of a model set cannot be used: %s", exc)
        return None


async def pause(failures: int) -> None:
    """Wait before the next try."""
    await asyncio.sleep(backoff_s(failures, first_s=0.2, cap_s=5.0, chance=random.random()))


def fetch_from(settings: NodeSettings) -> FetchFrom:
    """Return a function that fetches weights from the scheduler, all or those from a byte on."""

    async def fetch(name: str, sha256: str, start: int = 0) -> AsyncIterator[bytes]:
        if settings.scheduler is None:
            raise WeightsError(
                f"the weights of model '{name}' are not here; give the folder that has them with --models, or a "
                "scheduler to fetch them from with --scheduler"
            )
        path, what = f"/v1/models/{quote(name, safe='')}/file", f"the weights of model '{name}' ({sha256})"
        headers = {"Range": f"bytes={start}-"} if start else {}
        asked = _asked(settings, path, what=what, params={"sha256": sha256}, headers=headers)
        async with asked as (scheduler, answer):
            if start and answer.status != 206:
                raise InvalidAnswer(f"the scheduler at {scheduler} sends no part of a file")
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
    """Send a GET to the scheduler that leads, and yield its URL and its answer before the body. `what` names the answer
    in messages.

    Raises:
        SetupError: it refuses this node's token.
        WeightsMissing: it has no such thing.
        Standby: none leads at the moment.
        TerraceError: the call fails. See `calling`.
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
        if answer.status == 304 or (answer.status in (200, 206) and answer.content_type in _CONTENT_TYPES):
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
