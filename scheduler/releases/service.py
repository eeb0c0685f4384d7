"""The releases of a fleet: the release in force, and the change from one to another."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from models.escalation import Tuning
from models.manifest import Manifest, WeightsFile
from scheduler.core.device import Device
from scheduler.core.fleet import Ledger
from scheduler.core.outbox import release_event
from scheduler.core.release import (
    FleetProgress,
    LiveReleases,
    NetworkSet,
    Release,
    ReleaseChange,
    advance,
    check_live,
    chosen,
    digest_of,
    named_like,
    number_of,
    state_of,
    wanted,
    with_both_sides,
)
from scheduler.metrics import count_rollout
from scheduler.placement.routes import Placement
from scheduler.releases.figures import TrialRecord
from scheduler.releases.files import NetworkFiles, files_of
from scheduler.releases.probes import Prober, known_answers
from scheduler.store.releases import ReleaseStore
from tierkit.errors import Conflict, InvalidInput, NotFound, TerraceError, Unavailable
from tierkit.types import Health, Scheme, Tier
from tierkit.wire.releases import GuardNow, ReleaseState, RolloutState, StartRequest

__all__ = ["Releases", "Uses"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.25
_SAVE_S = 5.0
_MOST_HISTORY = 50
_MOST_RELEASES = 1000
_BUNDLED = "bundled"
_UPPER = {
    Scheme.END: (),
    Scheme.END_EDGE: (Tier.EDGE,),
    Scheme.END_CLOUD: (Tier.CLOUD,),
}
_UNUSABLE = "unusable"


@dataclass(slots=True)
class Uses:
    """Actions of the rest of the scheduler for releases."""

    busy: Callable[[], Iterable[int]] = tuple
    """Releases of unfinished jobs."""
    move_jobs: Callable[[int, Release], None] = lambda number, to: None
    """Let the jobs of a release that have no answers belong to another one."""
    restart: Callable[[str], None] = lambda why: None
    """Start the scheduler again: other classes are in force."""


class Releases:
    """All releases, the one in force, and the change under way.

    Args:
        store: their rows.
        files: of their networks.
        devices: the fleet.
        placement: gets the networks that answer.
        prober: gets the answers to the probe pictures.
        elapsed: seconds of elapsed time.
        clock: monotonic seconds.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        store: ReleaseStore,
        files: NetworkFiles,
        devices: Ledger,
        placement: Placement,
        prober: Prober,
        *,
        elapsed: Callable[[], float],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._store = store
        self.files = files
        self._devices = devices
        self._placement = placement
        self.prober = prober
        self._elapsed = elapsed
        self._clock = clock
        self._wall = wall
        self.uses = Uses()
        self.rows: dict[int, Release] = {}
        """Releases by number, in order."""
        self.accuracies: dict[str, float] = {}
        """Accuracy of the fine answers of each network, by sha256."""
        self.in_force = 0
        self.change: ReleaseChange | None = None
        """The change under way."""
        self.history: list[tuple[ReleaseChange, tuple[GuardNow, ...]]] = []
        """Changes that are over with their guards, the newest first."""
        self.trial = TrialRecord()
        """Figures and guards of the change under way."""
        self.busy: frozenset[int] = frozenset()
        self.pruned = 0
        """Time at which releases were last removed: another number each time, so that nodes notice."""
        self._live: frozenset[int] = frozenset()
        self._placed = 0
        """The releases that placement knows, and which of them it takes for the one in force."""
        self._no_thresholds: dict[int, TerraceError] = {}
        self._turn = asyncio.Lock()
        self._moved = asyncio.Event()

    # --- what answers -----------------------------------------------------------------------------------------------

    @property
    def current(self) -> Release:
        """The release in force."""
        return self.rows[self.in_force]

    def tuning(self, number: int) -> Tuning | TerraceError:
        """The thresholds of a release, or why it has none."""
        release = self.rows[number]
        if release.tuning is not None:
            return release.tuning
        missing = NotFound(f"the release {release.ref} has no tuned thresholds: make a release of a set that has some")
        return self._no_thresholds.get(number, missing)

    @property
    def live(self) -> frozenset[int]:
        """Releases that answer: in force, of the change under way, or of unfinished jobs."""
        return self._live

    def ref_of(self, number: int) -> str:
        """NAME@NUMBER; only the number if the release was removed, and "" for none."""
        release = self.rows.get(number)
        return release.ref if release is not None else str(number or "")

    def names(self, sha256: str) -> bool:
        """True if a file of this digest is here, as part of a release."""
        for release in self.rows.values():
            file = files_of(release.manifest).get(sha256)
            if file is not None:
                return self.files.has(file)
        return False

    def trial_s(self, change: ReleaseChange) -> float:
        """Seconds of the trial of a change so far; 0 of one that is over."""
        return 0.0 if change.state.final else change.trial_s(self._elapsed())

    def find(self, ref: str) -> Release:
        """The release of this name or number. Raises NotFound."""
        number, name = number_of(ref)
        release = self.rows.get(number)
        if release is None or name not in (None, release.name):
            last = ", ".join(each.ref for each in list(self.rows.values())[-5:])
            raise NotFound(f"no release {ref!r}; the latest are {last}")
        return release

    def for_work(self, asked: str | None, site: str | None, scheme: Scheme) -> Release:
        """The release to which a new job or request belongs.

        Raises:
            InvalidInput: the release that is asked for does not answer now.
        """
        change = self.change
        if asked is not None:
            live = [self.in_force, *([change.release] if change is not None else [])]
            with suppress(NotFound):
                if (release := self.find(asked)).number in live:
                    return release
            known = " and ".join(self.rows[number].ref for number in live)
            raise InvalidInput(f"release: {asked} does not answer now, only {known}")
        if change is not None and random.random() < self._share_now(change, site, scheme):
            return self.rows[change.release]
        return self.current

    def _share_now(self, change: ReleaseChange, site: str | None, scheme: Scheme) -> float:
        """The share of new work for the new release: what the change says, as far as nodes hold the networks."""
        now = self._clock()
        ends = self._devices.alive(Tier.END, now, site)
        holding = len(self._placement.holders(ends, change.release))
        parts = [holding / len(ends) if ends else 0.0]
        for tier in _UPPER.get(scheme, (Tier.EDGE, Tier.CLOUD)):
            if nodes := self._devices.alive(tier, now):
                parts.append(len(self._placement.holders(nodes, change.release)) / len(nodes))
        if change.state is RolloutState.CANARY:
            return change.share if all(parts) else 0.0
        return min(change.share, *parts)

    def header(self, device: Device) -> str:
        """Value of `Terrace-Releases` for a node."""
        live = LiveReleases(in_force=self.in_force, change=self.change, busy=self.busy, tried=self._tried)
        numbers = wanted(live, device.node_id, device.tier)
        return f"{','.join(map(str, numbers))};{self.pruned}"

    @property
    def _tried(self) -> dict[int, ReleaseChange]:
        """Return, by release, its last change if that failed."""
        last = {change.release: change for change, _ in reversed(self.history)}
        return {number: change for number, change in last.items() if _failed(change)}

    def first_of(self, device: Device) -> int:
        """The release with which a device answers its own pictures, if it holds it; else the one in force."""
        change = self.change
        if change is None or device.tier is not Tier.END or not chosen(change, device.node_id):
            return self.in_force
        return self.in_force if self._placement.held(device, change.release) is None else change.release

    # --- at the start -----------------------------------------------------------------------------------------------

    async def load(self, manifest: Manifest, tuning: Tuning | TerraceError, folder: Path | None, memory: Path) -> None:
        """Take up what the scheduler before this one has left, and the model set of the own folder.

        The set becomes a release if its content is new. It comes into force at once where none is, where the folder is
        another one than at the last start, and where the files of the release in force are gone.

        Args:
            manifest, tuning: of the folder.
            folder: None for the bundled set.
            memory: file that keeps the name of the folder until the next start.
        """
        for release, probes in await self._store.load():
            self._know(release)
            if probes is not None:
                self.prober.learn(release.manifest, probes)
        for change, notes in await self._store.changes(_MOST_HISTORY):
            guards = tuple(GuardNow.model_validate(each) for each in notes.get("guards", ()))
            if not change.state.final and not self.history:
                self.change = change
                self.trial.begin(change, notes)
            else:
                self.history.append((change, guards))
        self.in_force = next((c.release for c, _ in self.history if c.state is RolloutState.DONE), 0)
        if self.in_force not in self.rows:
            self.in_force = 0
        thresholds = tuning if isinstance(tuning, Tuning) else None
        if self.in_force:
            manifest = named_like(manifest, self.current.manifest)
        origin = _BUNDLED if folder is None else str(await asyncio.to_thread(folder.resolve))
        digest = digest_of(manifest, thresholds)
        own = next((each for each in reversed(self.rows.values()) if each.digest == digest), None)
        if own is None:
            name = _BUNDLED if folder is None else _name_of(folder)
            own = await self._add(name, manifest, thresholds, origin=origin, by="")
        if isinstance(tuning, TerraceError):
            self._no_thresholds[own.number] = tuning
        before = await asyncio.to_thread(_read, memory)
        renamed = before not in ("", origin)
        gone = bool(self.in_force) and not await asyncio.to_thread(self._is_whole, self.current)
        if not self.in_force or (own.number != self.in_force and (renamed or gone)):
            why = "the scheduler was started with another model set" if renamed else ""
            await self._switch(own, "first" if not self.in_force else "promote", why or "its files are gone" * gone)
        elif own.number != self.in_force:
            _log.warning(
                "the model set %s is the release %s, and %s stays in force: 'terrace models release start %s' tries it",
                origin,
                own.ref,
                self.current.ref,
                own.ref,
            )
        await asyncio.to_thread(memory.write_text, origin)
        self._use()

    def _is_whole(self, release: Release) -> bool:
        return all(self.files.has(file) for file in files_of(release.manifest).values())

    async def _switch(self, release: Release, kind: Literal["first", "promote", "rollback"], reason: str) -> None:
        """Put a release in force at once."""
        if self.change is not None:
            await self._end(replace(self.change, state=RolloutState.STOPPED, reason=reason))
        change = self._new_change(release, kind, by="", share=1.0)
        await self._end(replace(change, state=RolloutState.DONE, reason=reason))

    async def _add(self, name: str, manifest: Manifest, tuning: Tuning | None, *, origin: str, by: str) -> Release:
        if len(self.rows) >= _MOST_RELEASES:
            raise Conflict(f"{_MOST_RELEASES} releases are stored: 'terrace models release prune' removes old ones")
        numbers = [*self.rows, *(change.release for change, _ in self.history)]
        release = Release(
            number=max(numbers, default=0) + 1,
            name=name,
            manifest=manifest,
            tuning=tuning,
            created_at=self._wall(),
            created_by=by,
            origin=origin,
        )
        await self._store.add(release)
        self._know(release)
        return release

    def _know(self, release: Release) -> None:
        self.rows[release.number] = release
        for entry in release.manifest.models:
            self.accuracies[entry.sha256] = entry.fine_accuracy or 0.0

    async def prepare(self) -> None:
        """Keep the files of the scheduler's own folder, and work out the answers to the probe pictures, as far as that
        was not done. Takes a while."""
        for release in list(self.rows.values()):
            if release.origin and release.origin != _BUNDLED:
                with suppress(Unavailable):
                    await self.files.keep(release.manifest)
            if all(self.prober.knows(entry.sha256) for entry in release.manifest.models):
                continue
            try:
                answers = await known_answers(release.manifest, self.files)
                self.prober.learn(release.manifest, answers, in_use=True)
                if answers:
                    await self._store.save_probes(release.number, answers)
            except (InvalidInput, NotFound, Unavailable) as exc:
                _log.warning("no probe pictures for %s, or they are not stored: %s", release.ref, exc)

    # --- what operators want ----------------------------------------------------------------------------------------

    async def create(self, name: str, manifest: Manifest, tuning: Tuning | None, by: str) -> tuple[Release, bool]:
        """A release of networks whose files are here; and whether it is new.

        Raises:
            InvalidInput: a network cannot be used, or the thresholds are of other networks.
            Conflict: a file is missing; or there are too many releases.
        """
        if tuning is not None:
            try:
                tuning.check(manifest)
            except TerraceError as exc:
                raise InvalidInput(str(exc)) from exc
        async with self._turn:
            manifest = named_like(manifest, self.current.manifest)
            digest = digest_of(manifest, tuning)
            for each in self.rows.values():
                if (each.name, each.digest) == (name, digest):
                    return each, False
            for file in files_of(manifest).values():
                try:
                    await self.files.find(file)
                except NotFound as exc:
                    raise Conflict(f"{exc}: send it first, with PUT /v1/networks/{file.sha256}") from exc
            answers = await known_answers(manifest, self.files)
            release = await self._add(name, manifest, tuning, origin="", by=by)
            await self.files.keep(manifest)
            if answers:
                self.prober.learn(manifest, answers)
                await self._store.save_probes(release.number, answers)
            return release, True

    async def start(self, ref: str, request: StartRequest, by: str) -> ReleaseChange:
        """Try a release on a part of the fleet.

        Raises:
            NotFound: no such release.
            Conflict: another change is under way, the release is in force, its classes differ, it lacks a tier, or too
                many releases answer.
        """
        async with self._turn:
            release = self._startable(ref)
            if not release.fits_beside(self.current):
                raise Conflict(
                    f"{release.ref} has other classes than {self.current.ref}, or takes pictures of another size, so "
                    f"the two cannot be compared: 'terrace models release promote {release.ref}' once no jobs run"
                )
            change = self._new_change(release, "canary", by=by, share=request.canary)
            present = [view for view in self._devices.present(self._clock()) if _is_end(view.device)]
            alive = [view.device.node_id for view in present if view.health is Health.ALIVE]
            change = replace(change, state=RolloutState.CANARY, guards=dict(request.guards), for_s=request.for_s)
            change = with_both_sides(change, alive or [view.device.node_id for view in present])
            self.trial.begin(change, {})
            await self._begin(change)
            return change

    async def promote(self, ref: str, by: str) -> ReleaseChange:
        """Give a release to everyone, without guards.

        Raises:
            NotFound: no such release.
            Conflict: another change is under way, it is in force, it lacks a tier, or jobs of other classes run.
        """
        async with self._turn:
            release = self.find(ref)
            if self.change is not None and self.change.release == release.number:
                changes = {"kind": "promote", "state": RolloutState.ROLLING, "share": 1.0, "guards": {}, "for_s": 0.0}
                await self._begin(replace(self.change, stepped=self._elapsed(), by=by, **changes))
                assert self.change is not None
                return self.change
            release = self._startable(ref)
            return await self._to_everyone(release, "promote", by)

    async def stop(self, ref: str, by: str) -> ReleaseChange:
        """End the trial or the roll-out of a release. Raises NotFound, Conflict."""
        async with self._turn:
            change = self._under_way(ref)
            return await self._end(replace(change, state=RolloutState.STOPPED, reason=f"stopped{_by(by)}"))

    async def roll_back(self, ref: str, by: str) -> ReleaseChange:
        """Leave a release for the one before it.

        Raises:
            NotFound: no such release.
            Conflict: it does not answer, or there is none before it.
        """
        async with self._turn:
            release = self.find(ref)
            if self.change is not None and self.change.release == release.number:
                return await self._end(
                    replace(self.change, state=RolloutState.ROLLED_BACK, reason=f"rolled back{_by(by)}")
                )
            if release.number != self.in_force:
                raise Conflict(f"{release.ref} is not in force, so there is nothing to roll back")
            if self.change is not None:
                raise Conflict(f"{self.rows[self.change.release].ref} is being tried: stop that first")
            if self.previous is None:
                raise Conflict(f"no release was in force before {release.ref}, or it was pruned")
            self._check_whole(self.previous)
            return await self._to_everyone(self.previous, "rollback", by)

    @property
    def previous(self) -> Release | None:
        """The release to which a roll-back returns."""
        last = next((change for change, _ in self.history if change.state is RolloutState.DONE), None)
        return None if last is None or last.kind not in ("canary", "promote") else self.rows.get(last.previous)

    async def prune(self, *, dry_run: bool) -> tuple[list[Release], dict[str, int]]:
        """Remove releases that are over and to which nothing refers, and files that no release names. Returns both,
        with the size of each file."""
        async with self._turn:
            kept = {
                self.in_force,
                max(self.rows),
                *self.busy,
                *([] if self.previous is None else [self.previous.number]),
            }
            if self.change is not None:
                kept |= {self.change.release, self.change.previous}
            over = (ReleaseState.RETIRED, ReleaseState.ROLLED_BACK, ReleaseState.STOPPED)
            old = [each for each in self.rows.values() if each.number not in kept and self.state(each.number) in over]
            named = {sha for each in self.rows.values() if each not in old for sha in files_of(each.manifest)}
            files = await asyncio.to_thread(self.files.unused, named)
            if dry_run:
                return old, files
            if old:
                await self._store.remove([each.number for each in old])
            for each in old:
                del self.rows[each.number]
            for sha256 in files:
                await asyncio.to_thread(self.files.remove, sha256)
            self.prober.keep_only({entry.sha256 for each in self.rows.values() for entry in each.manifest.models})
            self.pruned = int(self._wall()) % 10**9  # the header has nine digits
            return old, files

    def state(self, number: int) -> ReleaseState:
        """The state of a release now."""
        ended = [change for change, _ in self.history]
        return state_of(number, in_force=self.in_force, change=self.change, ended=ended)

    def _startable(self, ref: str) -> Release:
        release = self.find(ref)
        if self.change is not None:
            by = f"; {self.change.by} started that" if self.change.by else ""
            raise Conflict(f"{self.rows[self.change.release].ref} is being tried or rolled out now{by}: stop it first")
        if release.number == self.in_force:
            raise Conflict(f"{release.ref} is in force already")
        if why := check_live(self._live | {release.number}):
            raise Conflict(why)
        self._check_whole(release)
        have = {Tier(entry.tier) for entry in release.manifest.models}
        for view in self._devices.present(self._clock()):
            tier = view.device.tier
            if tier not in have and not view.health.gone:
                raise Conflict(
                    f"{release.ref} has no network for the tier {tier}, to which {view.device.node_id} belongs"
                )
        return release

    def _check_whole(self, release: Release) -> None:
        if not self._is_whole(release):
            raise Conflict(f"a file of {release.ref} is not here any more: send it with PUT /v1/networks/SHA256")

    def _under_way(self, ref: str) -> ReleaseChange:
        release = self.find(ref)
        if self.change is None or self.change.release != release.number:
            raise Conflict(f"{release.ref} is not being tried or rolled out")
        return self.change

    def _new_change(self, release: Release, kind: Any, *, by: str, share: float) -> ReleaseChange:
        now = self._elapsed()
        last = max((change.id for change, _ in self.history), default=0)
        return ReleaseChange(
            id=max(last, 0 if self.change is None else self.change.id) + 1,
            release=release.number,
            previous=self.in_force,
            kind=kind,
            state=RolloutState.ROLLING,
            share=share,
            canary=share,
            begun=now,
            stepped=now,
            started_at=self._wall(),
            by=by,
        )

    async def _to_everyone(self, release: Release, kind: Literal["promote", "rollback"], by: str) -> ReleaseChange:
        change = self._new_change(release, kind, by=by, share=1.0)
        if release.fits_beside(self.current):
            await self._begin(change)
            return change
        self.busy = frozenset(self.uses.busy())
        if self.busy:
            raise Conflict(
                f"{release.ref} has other classes than {self.current.ref}, or takes pictures of another size, and "
                "unfinished jobs need the old ones: wait for them, or cancel them"
            )
        done = await self._end(replace(change, state=RolloutState.DONE))
        self.uses.restart(f"the release {release.ref} has other classes or takes other pictures")
        return done

    # --- the change under way ---------------------------------------------------------------------------------------

    async def _save(self, change: ReleaseChange) -> None:
        before = self.change if self.change is not None and self.change.id == change.id else None
        new, old = self.ref_of(change.release), self.ref_of(change.previous)
        await self._store.save(change, self.trial.notes(), release_event(change, before, new=new, old=old))

    async def _begin(self, change: ReleaseChange) -> None:
        await self._save(change)
        self.change = change
        if change.kind != "canary":
            self.trial.begin(change, {})
        _log.info("release %s: %s", self.rows[change.release].ref, change.state)
        self._use()
        self._moved.set()

    async def _end(self, change: ReleaseChange) -> ReleaseChange:
        """A change is over."""
        change = replace(change, ended_at=self._wall())
        await self._save(change)
        self.history.insert(0, (change, self.trial.guards))
        last = next((each for each in self.history if each[0].state is RolloutState.DONE), None)
        if last not in self.history[:_MOST_HISTORY]:
            self.history[_MOST_HISTORY - 1 :] = [] if last is None else [last]
        del self.history[_MOST_HISTORY:]
        self.change = None
        self.trial.goes_on(None)
        self.busy = frozenset(self.uses.busy())
        new, old = self.rows[change.release], self.rows.get(change.previous)
        if change.state is RolloutState.DONE:
            self.in_force = change.release
            _log.info("release %s is in force%s", new.ref, f": {change.reason}" if change.reason else "")
        else:
            _log.warning("release %s: %s: %s", new.ref, change.state, change.reason)
        self._use()
        if change.state is not RolloutState.DONE and old is not None:
            self.uses.move_jobs(change.release, old)
        count_rollout(change.state)
        return change

    def _use(self) -> None:
        """Let placement know which releases answer."""
        live = {self.in_force, *self.busy} & self.rows.keys()
        if self.change is not None:
            live |= {self.change.release, self.change.previous} & self.rows.keys()
        if live != self._live or self.in_force != self._placed:
            self._live, self._placed = frozenset(live), self.in_force
            self._placement.use({number: NetworkSet(self.rows[number].manifest) for number in live}, self.in_force)

    async def run(self) -> None:
        """Carry changes on, until cancelled."""
        await self.prepare()
        saved_at = 0.0
        while True:
            self.busy = frozenset(self.uses.busy())
            self._use()
            # Also after a restart between the end of a trial and the move of its jobs.
            for number in self.busy & self._tried.keys():
                if self.change is None or self.change.release != number:
                    self.uses.move_jobs(number, self.current)
            if self.change is not None:
                saved_at = await self._carry_on(saved_at)
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._moved.wait()

    async def _carry_on(self, saved_at: float) -> float:
        async with self._turn:
            change, now = self.change, self._elapsed()
            if change is None:
                return saved_at
            step, reason = self.trial.conclusion(change, now)
            after = advance(change, self.fleet_of(change), now=now, conclusion=step, reason=reason)
            try:
                if after.state.final:
                    await self._end(after)
                elif after != change or now - saved_at > _SAVE_S:
                    await self._save(after)
                    self.change, saved_at = after, now
                    self.trial.goes_on(after)
                    if after.state is not change.state or after.share != change.share:
                        _log.info(
                            "release %s: %s for %.0f %%", self.rows[after.release].ref, after.state, 100 * after.share
                        )
            except Unavailable as exc:
                _log.warning("the change to %s waits: %s", self.rows[change.release].ref, exc)
        return saved_at

    def file(self, name: str, sha256: str | None) -> WeightsFile:
        """The file of this name in a release, the one in force first. Raises NotFound."""
        entry = self.current.manifest.weights(name) if sha256 is None else None
        for release in (self.current, *reversed(self.rows.values())):
            with suppress(NotFound):
                found = release.manifest.weights(name)
                entry = found if found.sha256 == sha256 else entry
            if entry is not None:
                return entry
        there = self.current.manifest.weights(name).sha256
        raise NotFound(f"no release has the model {name!r} with sha256 {sha256}; the one in force has {there}")

    def fleet_of(self, change: ReleaseChange) -> FleetProgress:
        """The progress of the fleet with a change."""
        now, to_hold, ready, ends, unusable, trouble = self._clock(), 0, 0, 0, "", ""
        for view in self._devices.present(now):
            device = view.device
            if view.health is not Health.ALIVE or (device.tier is Tier.END and not chosen(change, device.node_id)):
                continue
            held = self._placement.held(device, change.release) is not None
            if not (held or device.registration.follows):
                continue
            to_hold += 1
            ready += held
            ends += held and device.tier is Tier.END
            for each in () if device.load is None else device.load.troubles:
                if each.release == change.release:
                    trouble = f"{device.node_id} cannot use it: {each.detail}"
                    unusable = unusable or (trouble if each.kind == _UNUSABLE else "")
        return FleetProgress(wanted=to_hold, ready=ready, ends_ready=ends, unusable=unusable, trouble=trouble)


def _failed(change: ReleaseChange) -> bool:
    return change.state in (RolloutState.ROLLED_BACK, RolloutState.STOPPED)


def _is_end(device: Device) -> bool:
    return device.tier is Tier.END


def _by(name: str) -> str:
    return f" by {name or 'an operator'}"


def _name_of(folder: Path) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("-._")[:63]
    return name or "models"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
