"""An end node with sources: it answers each picture at once, and its spool keeps whatever is to leave the device."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, get_args

import numpy as np
from prometheus_client import Counter, Gauge, Histogram
from pydantic import TypeAdapter, ValidationError

from end_node.answers import NoNumbers
from end_node.keeping import Keeping
from end_node.node import EndNode, Task
from end_node.personal import PersonalHead
from end_node.reporting import device_status, report_of, reported_sources
from end_node.settings import EndSettings, SourceSettings
from end_node.sources.keeper import SourceKeeper, SourceState as KeeperState
from end_node.sources.picture import TakenPicture
from end_node.spool import Draft, Held, Spool, SpoolStats
from end_node.spooling import SpoolThread
from end_node.uplink.budget import lease_s
from end_node.uplink.pace import Pace
from end_node.uplink.rules import Amendment, fate_of, is_audited, outcome_of
from end_node.uplink.sending import Uplink
from models.escalation import margin
from models.manifest import Fit
from models.pictures import decoder
from tierkit.errors import Conflict, Forbidden, NotFound, Overloaded, SpoolUnavailable
from tierkit.inference.files import Decoded
from tierkit.inference.holding import UNKNOWN
from tierkit.inference.versions import Version
from tierkit.pacing import TokenBucket
from tierkit.spans import Span, new_root
from tierkit.tensors import Array
from tierkit.wire.events import CoarseEvent
from tierkit.wire.learning import KeptState, LabelOfPerson
from tierkit.wire.messages import DeviceRoute, Registration, Stage
from tierkit.wire.observations import DeviceStatus, FinerAnswer, LocalAnswer, Observation, ReportedSource
from tierkit.wire.sources import SeenPicture, SourcesReport, seen_picture

__all__ = ["ObservingNode"]

log = logging.getLogger(__name__)

_SOURCES: TypeAdapter[list[SourceSettings]] = TypeAdapter(list[SourceSettings])

_ADDED, _PAUSED = "sources", "paused"
"""Names under which the spool keeps the sources that operators have added, and the names of those they paused."""
_MOST_SOURCES = 64
_DAMAGED_MARGIN = 1.0
_MOST_SAID = 500
_SHOW_S = 5.0

_seconds = Histogram(
    "terrace_observation_seconds",
    "From a picture in hand to its local answer, stored.",
    ["source"],
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
_spool_bytes = Gauge("terrace_spool_bytes", "Size of the spool on the disk.")
_waiting = Gauge("terrace_spool_waiting", "Answers and pictures in the spool that are to leave this device.", ["what"])
_dropped = Gauge(
    "terrace_spool_dropped",
    "Dropped because the spool was full, since it began: sure_picture, unsure_picture or answer.",
    ["what"],
)
_spent = Gauge("terrace_uplink_day_bytes", "Bytes sent and received in the last 24 hours.")
_sources = Gauge("terrace_sources", "Sources of this node by their state.", ["state"])
_pictures = Gauge(
    "terrace_source_pictures", "Pictures of a source since the node started: taken or skipped.", ["source", "fate"]
)
_damaged = Counter("terrace_damaged_pictures_total", "Pictures of sources that could not be read.", ["source"])


class ObservingNode(EndNode):
    """End node that answers the pictures of its sources, and tasks like every end node.

    It takes the arguments of `EndNode`.
    """

    def __init__(self, settings: EndSettings, *others: Any, **options: Any) -> None:
        super().__init__(settings, *others, **options)
        self.fit: Fit | None = None
        """The pixels in which images travel; None if they travel as files. Set it before the node runs."""
        limits = settings.uplink
        if settings.scheduler is None:  # nobody says where pictures may go
            limits = limits.model_copy(update={"escalate": "nothing", "pictures_to_scheduler": "none"})
        self._limits = limits
        self.pace = Pace(limits, tls=any(url.startswith("https") for url in settings.scheduler or ()))
        self.keepers: dict[str, SourceKeeper] = {}
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._rates: dict[str, TokenBucket] = {}
        learn = settings.learn
        self.keeping = None if learn is None else Keeping(settings.kept_folder, learn.size, self.hierarchy)
        """The kept sample; None if this device keeps nothing."""
        self.personal = PersonalHead(self, settings.kept_folder) if learn is not None and learn.personal else None
        """The personal head; None if the settings want none."""
        self.spool: SpoolThread
        self.uplink: Uplink

    # --- within the node ------------------------------------------------------------------------------------------

    @property
    def meter(self) -> Callable[[int, int], None]:
        return self.pace.count

    def heard(self, headers: Mapping[str, str]) -> None:
        super().heard(headers)
        self.uplink.heard(headers)

    def registration(self, scheduler: str) -> Registration:
        asked_s = lease_s(self.settings.uplink.bytes_per_day, tls=scheduler.startswith("https"))
        return super().registration(scheduler).model_copy(update={"spool": self.spool.id, "lease_s": asked_s})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        folder, size_bytes = self.settings.spool_folder, self.settings.spool.size
        self.spool = SpoolThread(await asyncio.to_thread(Spool.open, folder, size_bytes=size_bytes))
        try:
            async with super().running():
                self.uplink = Uplink(self.settings, self.spool, self, self.scheduler, self.pace)
                await self.uplink.load()
                await self.pace.load(self.spool)
                loops = {**self.uplink.loops(), "uplink: bytes": self.pace.run(self.spool), "gauges": self._show()}
                if self.personal is not None:
                    await self.personal.look()  # before the first picture
                    loops["personal head"] = self.personal.run()
                self._loops = {name: self.lifecycle.own(loop, name=name) for name, loop in loops.items()}
                paused = await self.spool.do(lambda spool: spool.get(_PAUSED)) or ()
                for source in (*self.settings.source, *await self._added()):
                    self._start(source, paused=source.name in paused and self.settings.remote_sources)
                try:
                    yield
                finally:
                    for task in self._loops.values():
                        task.cancel()
                    await asyncio.gather(*self._loops.values(), return_exceptions=True)
                    if self.personal is not None:
                        await self.personal.close()
                    with contextlib.suppress(SpoolUnavailable):
                        await self.pace.note(self.spool)
        finally:
            if self.keeping is not None:
                await self.keeping.close()
            await self.spool.close()

    # --- pictures -------------------------------------------------------------------------------------------------

    async def take(self, source: SourceSettings, picture: TakenPicture) -> Observation:
        """Answer a picture with the local network, before any job, and store the answer.

        Raises:
            SpoolUnavailable: the disk is full or broken; the picture has not been taken.
            TerraceError: the network cannot answer now.
        """
        with Span("observation", new_root()) as span:
            release, read, coarse, probabilities = await self._local(picture.content, source.name, span)
            local, reason, sure = None, "", _DAMAGED_MARGIN
            if read.damaged:
                reason = read.damaged[0][:_MOST_SAID]
                _damaged.labels(source.name).inc()
            else:
                local = LocalAnswer(
                    model=coarse.model,
                    sha256=coarse.sha256,
                    label=coarse.labels[0],
                    confidence=coarse.confidences[0],
                    ms=coarse.queue_ms + coarse.compute_ms,
                )
                sure = float(margin(probabilities)[0])
            fate = fate_of(sure, self.uplink.route, source, self._limits)
            audit = not read.damaged and self._audits(source, sure)
            age_s = max(0.0, time.monotonic() - picture.taken_s)
            draft = Draft(
                source=source.name,
                age_s=age_s,
                taken_at=self.pace.wall_of(age_s),
                name=picture.name[-_MOST_SAID:],
                local=local,
                release=0 if local is None else release,
                unsure=fate.unsure,
                waits=(fate.waits or audit) and not read.damaged,
                audit=audit,
                reason=reason,
                margin=sure,
                picture=picture.content,
                keeps=fate.keeps,
                to_scheduler=fate.to_scheduler and not read.damaged,
                mark=picture.mark,
            )
            stored = await self.spool.do(lambda spool: spool.add(draft))
            span.says(source=source.name, sequence=stored.sequence)
        _seconds.labels(source.name).observe(max(0.0, time.monotonic() - picture.taken_s))
        self.uplink.stored()
        self.announce(stored)
        return stored

    def _audits(self, source: SourceSettings, sure: float) -> bool:
        """True if a picture with this margin goes up to compare the answers."""
        learn = self.settings.learn
        if learn is None or not source.learn or self._limits.escalate == "nothing":
            return False
        return is_audited(self.uplink.route, margin=sure, share=learn.audit_share, chance=random.random())

    async def learn_from(self, held: Held, content: bytes, finer: FinerAnswer) -> None:
        """Keep a picture to learn from, if the device, its source and the fleet allow it. See `Keeping.keep`."""
        keeper, route = self.keepers.get(held.observation.source), self.uplink.route
        wanted = keeper is not None and keeper.settings.learn and route is not None and route.learn
        if self.keeping is not None and wanted:
            await self.keeping.keep(held, content, finer)

    async def labelled(self, labels: Sequence[LabelOfPerson]) -> None:
        if self.keeping is not None:
            await self.keeping.label(labels)

    async def renumbered(self, source: str, first: int) -> None:
        if self.keeping is not None:
            await self.keeping.forget(source, first)

    async def _local(self, content: bytes, source: str, span: Span) -> tuple[int, Decoded, CoarseEvent, Array]:
        """Release, pixels, coarse answer and probabilities for a picture. If a network gives NaN, the next one answers:
        the personal head comes before its release, and that before the next release.

        Raises:
            NoNumbers: the next release gives NaN as well, or the node holds no other.
            TerraceError: the network cannot answer now.
        """
        broken: NoNumbers | None = None
        for release, version in self._answering():
            with version.uses:
                images, read = await self._open(content, version)
                task = self._task(images, read, version, f"{source}-{secrets.token_hex(8)}", span)
                try:
                    return (max(0, release), read, *await self.coarse(task))
                except NoNumbers as exc:
                    broken = exc
                    if self.personal is not None:
                        self.personal.set_aside(version, str(exc))
        assert broken is not None
        raise broken

    def _answering(self) -> Iterator[tuple[int, Version]]:
        """Releases and versions, the first choice first. A personal head has no release, because guards compare the
        networks of releases."""
        for place, release in enumerate(dict.fromkeys(self.usable_releases)):
            version = self.version_of(release)
            head = self.personal.version_for(version) if self.personal is not None and not place else None
            if head is not None:
                yield UNKNOWN, head
            yield release, version

    async def _open(self, content: bytes, version: Version) -> tuple[Array, Decoded]:
        """A picture as it goes up, `[1, ...]`, and as a version of the node's own network takes it."""
        (spec,) = version.runner.model.inputs
        files = np.empty(1, object)
        files[0] = content
        if self.fit is None:
            return files, await self.read(files, version)
        read = await self.files.decode(dataclasses.replace(spec, decode=decoder(self.fit)), files)
        return read.rows, read

    def _task(self, images: Array, read: Decoded, version: Version, task_id: str, span: Span, **route: Any) -> Task:
        return Task(
            task_id=task_id,
            version=version,
            images=images,
            read=read,
            positions=range(0 if read.damaged else 1),
            deadline=self.clock() + self.settings.task_budget_s,
            request_id=task_id,
            span=span,
            urgent=True,
            **{"upstreams": (), **route},
        )

    async def ask_up(self, content: bytes, route: DeviceRoute, stages: tuple[Stage, ...]) -> Amendment:
        version = self.versions.default
        with version.uses:
            images, read = await self._open(content, version)
        with Span("escalation", new_root()) as span:
            tiers = {stage.tier for stage in stages}
            upstreams = tuple(each for each in route.upstreams if not stages or each.tier in tiers)
            task = self._task(images, read, version, secrets.token_hex(8), span, upstreams=upstreams, stages=stages)
            event = await self.finer(task, None)
            span.says(answer=event.event)
        return outcome_of(event)

    async def _show(self) -> None:
        """Set the gauges from time to time, until cancelled."""
        if self.keeping is not None:
            await self.keeping.open()
        while True:
            with contextlib.suppress(SpoolUnavailable):
                stats = await self.spool.do(Spool.stats)
                _spool_bytes.set(stats.bytes_used)
                _waiting.labels("answer").set(stats.undelivered)
                _waiting.labels("picture").set(stats.waiting + stats.owed)
                for what, count in (
                    ("sure_picture", stats.dropped_sure),
                    ("unsure_picture", stats.dropped_unsure),
                    ("answer", stats.lost),
                ):
                    _dropped.labels(what).set(count)
            _spent.set(self.pace.spent_bytes)
            statuses = [keeper.status for keeper in self.keepers.values()]
            for state in get_args(KeeperState):
                _sources.labels(state).set(sum(status.state == state for status in statuses))
            for status in statuses:
                _pictures.labels(status.name, "taken").set(status.taken)
                _pictures.labels(status.name, "skipped").set(status.skipped)
            await asyncio.sleep(_SHOW_S)

    def announce(self, observation: Observation) -> None:
        """Wake the readers of events."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def changed(self) -> asyncio.Event:
        """The event that the next change sets. Take it before reading what has changed so far."""
        return self._changed

    def seen(self, observation: Observation) -> SeenPicture:
        """An observation with the names of its classes."""
        node_id, classes = self.settings.node_id, self.hierarchy
        return seen_picture(observation, node=node_id, taken_at=observation.taken_at, classes=classes)

    # --- sources --------------------------------------------------------------------------------------------------

    def keeper(self, name: str) -> SourceKeeper:
        """The keeper of a source. Raises NotFound."""
        if name not in self.keepers:
            known = ", ".join(self.keepers) or "none"
            raise NotFound(f"this node has no source {name[:64]!r}; it has {known}")
        return self.keepers[name]

    def check_push(self, name: str) -> None:
        """Raise an error if programs may not post pictures to this source now.

        Raises:
            NotFound: there is none of this name.
            Conflict: it has another kind, or is paused.
            Overloaded: more pictures have come than its rate allows.
        """
        keeper = self.keeper(name)
        status, rate = keeper.status, keeper.settings.rate
        if status.kind != "push":
            raise Conflict(
                f"the source {name!r} is of the kind {status.kind or 'unknown'}: only 'push' takes pictures by POST"
            )
        if status.state == "paused":
            raise Conflict(f"the source {name!r} is paused")
        if rate is not None:
            bucket = self._rates.setdefault(name, TokenBucket(rate, burst=max(1.0, rate)))
            if (wait_s := bucket.wait_s(self.clock())) > 0:
                raise Overloaded(f"the source {name!r} takes {rate:g} pictures a second", retry_after_s=wait_s)
            bucket.take(self.clock())

    async def push(self, name: str, picture: TakenPicture) -> Observation:
        """Answer a picture that a program has posted; see `take`."""
        keeper = self.keeper(name)
        observation = await self.take(keeper.settings, picture)
        keeper.count()
        return observation

    async def report(self) -> SourcesReport:
        """The state of the sources, of the spool and of the uplink."""
        return self._report(await self.spool.do(Spool.stats))

    def _report(self, stats: SpoolStats) -> SourcesReport:
        return report_of(self.keepers.values(), stats, self.uplink, self.settings.uplink.bytes_per_day)

    def states(self) -> tuple[ReportedSource, ...]:
        return reported_sources(self.keepers.values())

    def status(self, stats: SpoolStats, *, in_batch: int) -> DeviceStatus:
        return device_status(self._report(stats), self.kept, in_batch=in_batch)

    @property
    def kept(self) -> KeptState | None:
        """The kept sample and the personal head; None if this device keeps nothing."""
        if self.keeping is None or self.personal is None:
            return None if self.keeping is None else self.keeping.state
        head = {"personal": self.personal.in_use, "personal_reason": self.personal.reason}
        return self.keeping.state.model_copy(update=head)

    def _start(self, source: SourceSettings, *, paused: bool = False) -> None:
        keeper = SourceKeeper(source, _Taker(self, source), tls_ca=self.settings.tls_ca, clock=self.clock)
        keeper.changed = self.uplink.source_changed
        self.keepers[source.name] = keeper
        if paused:
            keeper.pause()
        self._loops[f"source {source.name}"] = self.lifecycle.own(keeper.run(), name=f"source {source.name}")

    def _check_remote(self) -> None:
        if not self.settings.remote_sources:
            raise Forbidden(
                f"{self.settings.node_id} does not let its sources be changed over the network: set remote_sources "
                "on the device to allow it"
            )

    async def add_source(self, source: SourceSettings) -> None:
        """Add a source for an operator, and remember it.

        Raises:
            Forbidden: the device does not allow it.
            Conflict: it has one of this name.
        """
        self._check_remote()
        if source.name in self.keepers:
            raise Conflict(f"this node has a source {source.name!r} already")
        if len(self.keepers) >= _MOST_SOURCES:
            raise Conflict(f"this node has {_MOST_SOURCES} sources, and takes no more")
        await self._keep([*await self._added(), source])
        self._start(source)

    async def remove_source(self, name: str) -> None:
        """Stop and forget a source that an operator has added. Its observations stay.

        Raises:
            NotFound: there is none of this name.
            Conflict: the settings of the device name it.
        """
        self._check_remote()
        self.keeper(name)
        if any(name == source.name for source in self.settings.source):
            raise Conflict(f"the settings of the device name the source {name!r}: pause it, or remove it there")
        await self._keep([source for source in await self._added() if source.name != name])
        del self.keepers[name]
        self._rates.pop(name, None)
        task = self._loops.pop(f"source {name}")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.uplink.source_changed()

    async def pause_source(self, name: str, *, paused: bool) -> None:
        """Pause a source, even across restarts, or let it continue.

        Raises:
            NotFound: there is none of this name.
        """
        self._check_remote()
        keeper = self.keeper(name)
        before = await self.spool.do(lambda spool: spool.get(_PAUSED)) or ()
        after = sorted({*before, name} if paused else {*before} - {name})
        await self.spool.do(lambda spool: spool.put(_PAUSED, after))
        if paused:
            keeper.pause()
        else:
            keeper.resume()

    async def _added(self) -> list[SourceSettings]:
        """Sources that operators have added."""
        stored = await self.spool.do(lambda spool: spool.get(_ADDED))
        if stored is None or not self.settings.remote_sources:
            return []
        try:
            found = _SOURCES.validate_python(stored)
        except ValidationError:
            log.error("the sources that were added over the network cannot be read: add them again")
            return []
        own = {source.name for source in self.settings.source}
        return [source for source in found if source.name not in own]

    async def _keep(self, sources: list[SourceSettings]) -> None:
        document = _SOURCES.dump_python(sources, mode="json")
        await self.spool.do(lambda spool: spool.put(_ADDED, document))


class _Taker:
    """The intake of one source."""

    def __init__(self, node: ObservingNode, source: SourceSettings) -> None:
        self._node = node
        self._source = source

    async def take(self, picture: TakenPicture) -> None:
        await self._node.take(self._source, picture)

    async def known(self, marks: Collection[str]) -> Collection[str]:
        return await self._node.spool.do(lambda spool: spool.known(self._source.name, marks))
