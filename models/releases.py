"""The releases of a scheduler, as a node loads them: manifests fetched, kept in the cache, and pruned."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import anyio

from models.manifest import Manifest
from models.source import (
    GivenSet,
    chosen_entries,
    from_scheduler,
    given_now,
    given_release,
    kept_releases,
    read_copy,
    remember,
    sets_folder,
)
from tierkit.atomic import write_atomically
from tierkit.errors import (
    NeedsRestart,
    SetupError,
    TerraceError,
    UpstreamUnavailable,
    WeightsError,
    WeightsMissing,
)
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.holding import Told
from tierkit.inference.served import Loaded, ReleaseParts
from tierkit.settings import NodeSettings
from tierkit.types import Tier

__all__ = ["FleetReleases", "follow"]

log = logging.getLogger(__name__)

Build = Callable[[Manifest, Loaded], Awaitable[ReleaseParts]]
"""Loads what a node serves of a model set, but for what is loaded already."""

_MOST_KEPT = 16
"""Earlier releases whose copies stay in the cache."""

_PRUNED = "pruned"
"""File that holds how often the scheduler had pruned its releases when the cache was last pruned."""


def follow(settings: NodeSettings, lifecycle: Lifecycle, given: GivenSet, build: Build) -> FleetReleases | None:
    """Open the releases that a node follows; None if it has its own networks.

    Args:
        given: model set that it starts with.
        build: loads the networks that it serves from a release.
    """
    if not from_scheduler(settings):
        return None
    releases = FleetReleases(settings, given, build)
    lifecycle.is_current = partial(releases.is_current, lifecycle.is_current)
    return releases


class FleetReleases:
    """Implements `tierkit.inference.holding.ReleaseSource`. Arguments as for `follow`."""

    def __init__(self, settings: NodeSettings, given: GivenSet, build: Build) -> None:
        self._settings = settings
        self._build = build
        self._given = given
        self._manifests = {given.release: given.manifest}
        """Manifests of the releases that the node holds."""
        self._registering: Callable[[Told], None] = lambda _: None

    @property
    def started_with(self) -> int:
        """See `ReleaseSource`."""
        return self._given.release

    def listen(self, registering: Callable[[Told], None]) -> None:
        """See `ReleaseSource`."""
        self._registering = registering

    async def is_current(self, without_releases: Callable[[], Awaitable[bool]]) -> bool:
        """True unless the node must start again before it registers.

        Args:
            without_releases: answers the same for a scheduler that knows no releases.
        """
        try:
            _, told = await given_now(self._settings, known=next(iter(self._manifests.values())))
        except TerraceError as exc:
            log.debug("the release in force cannot be found out: %s", exc)
            return True
        if told is None:
            return await without_releases()
        self._registering(told)
        return True

    async def load(self, number: int, loaded: Loaded) -> ReleaseParts:
        """See `ReleaseSource`.

        Raises:
            NeedsRestart: it has other classes, or pictures travel in another form.
            SetupError: a network cannot be loaded.
        """
        kept = await anyio.to_thread.run_sync(read_copy, sets_folder(self._settings) / f"{number}.json")
        try:
            manifest = await given_release(self._settings, number, known=kept)
        except WeightsMissing as exc:
            raise UpstreamUnavailable(f"the scheduler has no release {number} now") from exc
        self._check_form(manifest)
        parts = await self._build(manifest, loaded)
        self._manifests[number] = manifest
        given = GivenSet(manifest, number)
        await anyio.to_thread.run_sync(partial(remember, self._settings, given, last=False))
        return parts

    def _check_form(self, manifest: Manifest) -> None:
        present = self._given.manifest
        if manifest.hierarchy.classes != present.hierarchy.classes:
            raise NeedsRestart("it has other classes than the present release")
        if manifest.fit != present.fit:
            raise NeedsRestart("pictures travel in another form than for the present release")
        for held in self._manifests.values():
            _check_same_files(held, manifest)

    async def is_same(self, number: int) -> bool:
        """See `ReleaseSource`."""
        known = self._manifests.get(number)
        if known is None:
            return False
        try:
            return (await given_release(self._settings, number, known=known)).digest == known.digest
        except WeightsMissing:
            return False
        except TerraceError as exc:
            log.debug("a release cannot be compared with the one held: %s", exc)
            return True

    async def keep(self, numbers: Sequence[int]) -> None:
        """See `ReleaseSource`."""
        kept = {number: self._manifests[number] for number in numbers if number in self._manifests}
        if not kept:
            return
        self._manifests = kept
        first, manifest = next(iter(kept.items()))
        await anyio.to_thread.run_sync(remember, self._settings, GivenSet(manifest, first))
        copies = await anyio.to_thread.run_sync(kept_releases, self._settings)
        await self._delete([number for number in copies if number not in kept][_MOST_KEPT:])

    async def prune(self, prunes: int) -> None:
        """See `ReleaseSource`."""
        mark = sets_folder(self._settings) / _PRUNED
        if await anyio.to_thread.run_sync(_read, mark) == str(prunes):
            return
        kept = await anyio.to_thread.run_sync(kept_releases, self._settings)
        gone = [
            number
            for number, manifest in kept.items()
            if number not in self._manifests and not await self._exists(number, manifest)
        ]
        await self._delete(gone)
        with contextlib.suppress(SetupError):
            await anyio.to_thread.run_sync(write_atomically, mark, str(prunes).encode())

    async def _delete(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        used = list(self._manifests.values())
        removed = await anyio.to_thread.run_sync(partial(_delete_releases, self._settings, numbers, used=used))
        log.info("cache pruned", extra={"releases": ",".join(map(str, numbers)), "files": removed})

    async def _exists(self, number: int, manifest: Manifest) -> bool:
        """False if the scheduler says that it has no such release."""
        try:
            await given_release(self._settings, number, known=manifest)
        except WeightsMissing:
            return False
        return True

    async def may_restart(self, numbers: Sequence[int]) -> bool:
        """See `ReleaseSource`."""
        settings = self._settings
        try:
            manifest, told = await given_now(settings)
            chosen_entries(manifest, settings.model, Tier(settings.service), gpu=settings.provider == "cuda")
        except TerraceError as exc:
            log.debug("the release after a restart cannot be found out: %s", exc)
            return False
        return told is not None and told.numbers[0] in numbers


def _check_same_files(held: Manifest, manifest: Manifest) -> None:
    """Refuse a release that reads the files of an encoder in another way than one that is held: on the wire the two
    are the same."""
    for encoder in manifest.encoders:
        other = next((each for each in held.encoders if each.name == encoder.name), None)
        if other is None or (other.head.sha256, other.tail.sha256) != (encoder.head.sha256, encoder.tail.sha256):
            continue
        if _wire_form(other) != _wire_form(encoder):
            raise WeightsError(
                f"the encoder {encoder.name!r} has the same files as in the present release, and other settings: "
                "give it another name"
            )


def _wire_form(encoder: object) -> object:
    names = ("scale", "zero_point", "bits", "noise", "temperature", "feature_shape")
    return [getattr(encoder, name) for name in names]


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _files_of(manifests: Iterable[Manifest]) -> set[tuple[str, str]]:
    """sha256 and name of the files that manifests name."""
    files: set[tuple[str, str]] = set()
    for manifest in manifests:
        files |= {(entry.sha256, entry.file) for entry in manifest.models}
        files |= {(side.sha256, side.file) for encoder in manifest.encoders for side in (encoder.head, encoder.tail)}
    return files


def _delete_releases(settings: NodeSettings, numbers: Sequence[int], *, used: Sequence[Manifest]) -> int:
    """Delete the copies of releases, and their files unless another manifest in the cache names them, of whichever
    fleet. Returns the number of files that were deleted.

    Args:
        used: manifests whose files stay.
    """
    gone: list[Manifest] = []
    for number in numbers:
        path = sets_folder(settings) / f"{number}.json"
        with contextlib.suppress(OSError):
            if (manifest := read_copy(path)) is not None:
                path.unlink()
                gone.append(manifest)
    others = (settings.cache / "sets").rglob("*.json")
    needed = _files_of([*used, *(manifest for path in others if (manifest := read_copy(path)) is not None)])
    removed = 0
    for sha256, file in _files_of(gone) - needed:
        path = settings.cache / sha256 / file
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
            path.parent.rmdir()
    return removed
