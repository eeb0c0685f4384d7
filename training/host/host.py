"""The host of a run: one thread on which the run changes, in the order in which calls come, and their journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from models.data import ImageSet
from models.training.data import TrainingData
from models.training.record import FleetFacts, Reached
from tierkit.atomic import write_atomically
from tierkit.errors import BrokenExtension, Conflict, NotFound, Overloaded, SetupError, TerraceError, Unavailable
from tierkit.http.lifecycle import Lifecycle
from tierkit.types import WorkerOrder
from training.host.curves import Curves, RunPoint
from training.host.journal import Journal
from training.host.run import TrainingRun
from training.host.sharing import Sharing, drawn_from
from training.improve.base import IMPROVED, WEIGHTS, keep_weights, written
from training.learner import FlatLearner
from training.messages import (
    MOST_LOSS,
    RESULT,
    DataAnswer,
    DataReport,
    GrantedLease,
    Join,
    Progress,
    RunSpec,
    RunStatus,
    UpdateAnswer,
    UpdateHead,
    WorkerData,
    WorkerStatus,
)
from training.payloads import format_of_weights, pack, packed_bytes
from training.strategies.tournament import Score, Tournament
from training.trust.recheck import Recheck, Rechecks, is_sound
from training.units import Flat

__all__ = ["Host", "HostParts"]

log = logging.getLogger(__name__)


_MOST_WAITING = 1_000
"""Calls that wait for the run."""
_MOST_AT_ONCE = 64
"""Calls that are made lasting together."""
_MOST_UNWRITTEN = 4
"""Most of such groups that wait for the disk."""
_EVALUATION_SHARE = 0.05
"""Share of the time that evaluations during the run may take."""
_POINT_S = 1.0
"""Seconds between two points of the curves, unless the accuracy is measured more often."""
_LOOK_S = 0.5
"""Seconds between two checks for workers that have left."""
_FAREWELL_S = 10.0
"""Seconds for the workers to hear that the run has ended."""
_LOWER = (
    "lower the learning rate, in the network's configuration or the strategy's, and begin anew in another folder; "
    "where workers may have sent wild updates, judge them by [trust]"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """Weights of a run, and what was counted until then."""

    copies: tuple[Flat, Flat]
    figures: dict[str, Any]
    """The figures of the result."""
    steps: int

    def reached(self, accuracy: float) -> Reached:
        """The moment, if this accuracy was to be reached."""
        figures = self.figures
        return Reached(accuracy=accuracy, seconds=figures["seconds"], updates=figures["updates"], steps=self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """Parts of a host."""

    spec: RunSpec
    run: TrainingRun
    """Restored from the journal."""
    journal: Journal
    learner: FlatLearner
    """Measures accuracies, in a thread."""
    test: ImageSet | None
    """Test images for the accuracy at the end; None for a run in which the host has no images and measures nothing."""
    dataset: str = ""
    """Name of the data set, kept in the record of the run."""
    checker: FlatLearner | None
    """Computes units again, in its own thread; None if none are."""
    started_at: float = 0.0
    """Time on the clock of the run."""
    max_lease_wait_s: float
    sharing: Sharing | None = None
    """Gives the training images to workers that lack them; None for a host that gives none away."""
    base: bytes | None = None
    """File of the network from which workers with kept pictures start; None in other runs."""
    until: float | None = None
    """Accuracy on the held-out images that ends the run; None for a run of all its steps."""
    start_at: int | None = None
    """Workers that must be ready before the first unit is handed out; None for no waiting."""


class Host:
    """Keeps a run, and answers its workers. `TrainingRun.check` raises Forbidden, NotFound or Conflict for a caller."""

    def __init__(self, parts: HostParts) -> None:
        self.spec, self._run, self._journal = parts.spec, parts.run, parts.journal
        self._learner, self._test, self._dataset = parts.learner, parts.test, parts.dataset
        self._checker, self._sharing = parts.checker, parts.sharing
        self._base = parts.base
        self._run.rechecks = Rechecks(self._run.strategy.trust, secrets.SystemRandom().random)
        self._again: asyncio.Queue[Recheck] = asyncio.Queue()
        """Units to be computed again: never more than `MOST_KEPT` of `training.trust.recheck`."""
        self._wait_s = parts.max_lease_wait_s
        self._offset = parts.started_at - time.monotonic()
        self._calls: asyncio.Queue[tuple[Callable[[], Any], asyncio.Future[Any]]] = asyncio.Queue(_MOST_WAITING)
        self._made: asyncio.Queue[list[tuple[asyncio.Future[Any], Any]]] = asyncio.Queue(_MOST_UNWRITTEN)
        """Answers whose notes are on their way to the disk."""
        self._changed = asyncio.Event()
        """Set and replaced when there may be work for waiting workers."""
        self._learning = asyncio.Lock()
        """Held while the learner computes; it does one thing at a time."""
        self._packed: tuple[int, bytes] | None = None
        """Version and weights as they were sent last."""
        self._accuracy: float | None = None
        self._until = parts.until
        self._reached: tuple[_Moment, float] | None = None
        """The moment whose weights were good enough, and their accuracy on the held-out images."""
        self._curves = Curves(self._journal.folder, parts.run.totals.updates)
        if parts.start_at is not None or self._run.missing(self._now()) is not None:
            self._gather(parts.start_at or 0)
        self._stopped = self._draining = False
        self.error = ""
        """Reason why the run cannot continue; "" while it can."""
        self._ended = asyncio.Event()
        """Set when there is nothing left to compute."""
        self.over = asyncio.Event()
        """Set when there is nothing left to wait for: the run is finished or stopped."""
        self.farewell: Callable[[], Awaitable[None]] | None = None
        """Waited for, some seconds at most, before the service ends."""
        self.beside: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        """Loops that run as long as the host does, by their names."""
        self.result: dict[str, Any] | None = _read_result(self._journal.folder)

    def _gather(self, workers: int) -> None:
        """Grant no work before this number of workers is ready. A worker that waits asks within `_wait_s`."""
        now, silent_s = self._now(), self.spec.lease_s + self._wait_s
        self._run.gather(workers, silent_s, now)
        self._note("gather", now, workers=workers, silent_s=silent_s)
        if (missing := self._run.missing(now)) is not None:
            log.info("the first unit is handed out when %d more workers are ready", missing)

    @property
    def images(self) -> TrainingData:
        """Training data of the run."""
        return self._learner.data

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self._learner.steps

    @property
    def state(self) -> Literal["running", "finished", "stopped", "failed"]:
        if self.error:
            return "failed"
        if self.result is not None:
            return "finished"
        return "stopped" if self._stopped else "running"

    # --- what workers ask ---

    async def join(self, join: Join, caller: str = "") -> None:
        """Let a worker in.

        Args:
            caller: see `TrainingRun.join`.

        Raises:
            Forbidden: it is barred from this run.
            Conflict: its images differ from the run's.
            NotFound: it fetches its images, and this host gives none away.
            Overloaded: there are too many workers.
        """
        if join.data_sha256 != self.spec.data_sha256:
            raise Conflict(
                f"the training images of {join.name!r} are not this run's (their digests differ): "
                "give it the same data set"
            )

        def call() -> None:
            now = self._now()
            given = {**join.model_dump(include={"name", "incarnation", "fetches"}), "caller": caller}
            self._run.join(now=now, **given)
            self._note("join", now, **given)

        if join.fetches and self._sharing is None:
            raise self._nothing_shared()
        await self._call(call)
        log.info("%s has joined", join.name)
        self._tell()

    async def lease(self, name: str, incarnation: str) -> tuple[GrantedLease, bytes] | None:
        """The next unit of a worker and the weights to start from; None where there is none for some seconds, or the
        run has ended.
        """
        deadline = self._now() + self._wait_s
        while True:
            changed = self._changed
            granted = None if self.finished else await self._call(lambda: self._grant(name, incarnation))
            left_s = 0.0 if self._draining else deadline - self._now()
            if granted is not None or self.finished or left_s <= 0:
                return granted
            try:
                async with asyncio.timeout(min(left_s, await self._call(self._until_change))):
                    await changed.wait()
            except TimeoutError:
                continue

    @property
    def shared(self) -> Sharing:
        """Gives the training images to workers.

        Raises:
            NotFound: this host gives none away.
        """
        if self._sharing is None:
            raise self._nothing_shared()
        return self._sharing

    @property
    def base(self) -> bytes:
        """File of the network that the run starts from.

        Raises:
            NotFound: this run starts from no file.
        """
        if self._base is None:
            raise NotFound("this run trains on a data set, so it starts from no network of a release")
        return self._base

    def copies(self) -> list[WorkerData]:
        """Training images that each worker has; empty if this host gives none away."""
        return [] if self._sharing is None else self._sharing.view()

    def _nothing_shared(self) -> NotFound:
        return NotFound(
            "this host gives no training images away: give the worker the data set, or start the host with --share-data"
        )

    async def check(self, name: str, incarnation: str) -> None:
        """Raises NotFound or Conflict unless this worker has joined. See `TrainingRun.check`."""
        await self._call(lambda: self._run.check(name, incarnation))

    async def data(self, report: DataReport) -> DataAnswer:
        """Take a worker's report on its training images, and return instructions about them.

        Raises:
            NotFound, Conflict: see `TrainingRun.check` and `shared`.
            TooLarge: no segment fits on its disk.
        """
        sharing = self.shared

        def known() -> tuple[list[int] | None, int]:
            self._run.check(report.worker, report.incarnation)
            return self._run.held(report.worker)

        held, steps = await self._call(known)
        wanted = sharing.told(report, steps)
        usable = drawn_from(held, wanted, sharing.held_by(report.worker), report.keeps)
        if usable != held:

            def hold() -> None:
                now, name, incarnation = self._now(), report.worker, report.incarnation
                self._run.hold(name, incarnation, usable, now)
                self._note("hold", now, name=name, incarnation=incarnation, segments=usable)

            await self._call(hold)
            self._tell()
        return await sharing.answer(report, ended=lambda: self.finished or self._draining)

    async def renew(self, lease: int, progress: Progress) -> bool:
        """A worker shows progress; whether the lease is still its own."""

        def call() -> bool:
            now, name, incarnation = self._now(), progress.worker, progress.incarnation
            held = self._run.renew(name, incarnation, lease, progress.shown, now)
            self._note("renew", now, name=name, incarnation=incarnation, lease=lease, shown=progress.shown)
            return held

        return await self._call(call)

    def expect(self, head: UpdateHead) -> bool:
        """True if an update is worth reading, because its steps are due. They may not be any more when it has come."""
        self._run.check(head.worker, head.incarnation)
        return self._run.expects(head, self._now())

    async def take(self, head: UpdateHead, body: bytes, size: int) -> UpdateAnswer:
        """Apply an update to the weights. It is on disk when this returns.

        Args:
            body: the output of `training.payloads.pack`.
            size: its bytes on the network.

        Raises:
            MalformedMessage: the body is not an update of this network.
            Forbidden, NotFound, Conflict: see `TrainingRun.check`.
        """

        def call() -> tuple[UpdateAnswer, bool]:
            version = self._run.strategy.version
            self._run.check(head.worker, head.incarnation)
            began = time.perf_counter()
            now = self._now()
            update = self._run.update(head, body, self.spec, now)
            times = dict(head.times)
            verdict = self._run.take(head.incarnation, update, size, times, now)
            if verdict == "taken":
                self._note("take", now, body, head=head.model_dump(), size=size)
                if (chosen := self._run.rechecks.taken(update)) is not None:
                    # Whether or not its worker waits for the answer.
                    loop.call_soon_threadsafe(self._again.put_nowait, chosen)
            elif verdict in ("stale", "refused"):
                self._note("drop", now, name=head.worker, refused=verdict == "refused")
            self._run.spend({"apply": time.perf_counter() - began})
            answer = UpdateAnswer(verdict=verdict, version=self._run.strategy.version, finished=self.finished)
            return answer, self._run.is_news(verdict, version)

        loop = asyncio.get_running_loop()
        answer, news = await self._call(call)
        if self._run.doubtful:
            await self._doubt(head.first)
            answer = answer.model_copy(update={"finished": self.finished})
        if news:
            self._tell()
        return answer

    async def leave(self, name: str, incarnation: str) -> None:
        """A worker goes."""

        def call() -> None:
            now = self._now()
            self._run.leave(name, incarnation, now)
            self._note("leave", now, name=name, incarnation=incarnation)

        await self._call(call)
        log.info("%s has left", name)
        if self._sharing is not None:
            self._sharing.left(name)
        self._tell()

    async def order(self, name: str, order: WorkerOrder) -> WorkerStatus:
        """Do what an operator wants with a worker; how that stands then.

        Raises:
            NotFound: there is none of this name.
            Overloaded: too many others must be remembered.
        """

        def call() -> WorkerStatus:
            now = self._now()
            self._run.order(name, order, now)
            self._note("order", now, name=name, order=order)
            return self._run.worker(name, now)

        found = await self._call(call)
        log.info("an operator says of %s: %s", name, order)
        self._tell()
        return found

    async def weights(self) -> tuple[int, bytes]:
        """The present version, and its weights in fp32."""

        def call() -> tuple[int, bytes]:
            strategy = self._run.strategy
            return strategy.version, pack(strategy.weights, strategy.buffers, "fp32")

        return await self._call(call)

    def stop(self) -> None:
        """End the run as it is now. A host with the same folder can continue it.

        Raises:
            Conflict: it has ended.
        """
        if self.finished:
            raise Conflict(f"the run is {self.state}")
        self._stopped = True
        self._tell()

    async def status(self) -> RunStatus:
        """Return the current state of the run."""

        def call() -> RunStatus:
            run = self._run
            return RunStatus(
                id=self.spec.id,
                network=self.spec.network.name,
                strategy=self.spec.choice,
                state=self.state,
                done=run.strategy.leases.done,
                steps=self.steps,
                version=run.strategy.version,
                accuracy=self._accuracy if self.result is None else self.result["accuracy"],
                workers=run.workers(self._now()),
                result=self.result,
                error=self.error or None,
                computed=self.finished,
                missing=run.missing(self._now()),
                **run.counted(),
            )

        return await self._call(call)

    # --- what it owns ---

    @contextlib.asynccontextmanager
    async def running(self, lifecycle: Lifecycle) -> AsyncIterator[None]:
        """Make the calls, measure accuracies, and drain the service when the run has ended."""
        with ThreadPoolExecutor(1, thread_name_prefix="run") as thread:
            tasks = [
                lifecycle.own(self._work(thread), name="run"),
                lifecycle.own(self._write(), name="journal"),
                lifecycle.own(self._attend(lifecycle), name="accuracy and end"),
                lifecycle.own(self._drain(lifecycle), name="drain"),
                *([lifecycle.own(self._recheck(self._checker), name="recheck")] if self._checker is not None else []),
            ]
            if isinstance(self._run.strategy, Tournament):
                tasks.append(lifecycle.own(self._meet(self._run.strategy), name="meetings"))
            if self._sharing is not None:
                tasks.append(lifecycle.own(self._sharing.watch(), name="copies of the data"))
            tasks += [lifecycle.own(loop(), name=name) for name, loop in self.beside.items()]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._journal.close()

    async def _call(self, call: Callable[[], T]) -> T:
        """Call `call` on the run's thread after all earlier calls, and return its result once its notes are on disk."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            self._calls.put_nowait((call, future))
        except asyncio.QueueFull:
            raise Overloaded("too many requests wait for the run; try again in a second") from None
        try:
            return await future
        except BrokenExtension as error:
            # A rule has failed. The weights may have changed in part, so the run cannot continue.
            self.error = self.error or str(error)
            self._tell()
            raise

    async def _work(self, thread: ThreadPoolExecutor) -> None:
        """Make the calls. While what they have noted is written to disk, the next ones are made."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._calls.get()]
            while len(batch) < _MOST_AT_ONCE and not self._calls.empty():
                batch.append(self._calls.get_nowait())
            with self._noting([future for _, future in batch]):
                outcomes = await loop.run_in_executor(thread, self._make, [call for call, _ in batch])
                await self._made.put([(future, outcome) for (_, future), outcome in zip(batch, outcomes, strict=True)])

    async def _write(self) -> None:
        """Give the answers, once what they rest on is on disk."""
        while True:
            answers = await self._made.get()
            while not self._made.empty():
                answers += self._made.get_nowait()
            with self._noting([future for future, _ in answers]):
                await asyncio.to_thread(self._journal.sync)
            for future, outcome in answers:
                if future.done():
                    continue  # nobody waits any more
                if isinstance(outcome, TerraceError):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    @contextlib.contextmanager
    def _noting(self, waiting: Sequence[asyncio.Future[Any]]) -> Iterator[None]:
        """Answer the waiting callers with an error if the run could not be written, and end the service."""
        try:
            yield
        except OSError as exc:
            for future in waiting:
                if not future.done():
                    future.set_exception(Unavailable("the host cannot write the run to its disk", retry_after_s=10.0))
            raise SetupError(
                f"the run cannot be written to {self._journal.folder}: {exc.strerror}; make room there, and start the "
                "host again: it continues with what it has acknowledged"
            ) from exc
        except BaseException:
            for future in waiting:
                future.cancel()
            raise

    def _make(self, calls: list[Callable[[], Any]]) -> list[Any]:
        outcomes: list[Any] = []
        for call in calls:
            try:
                outcomes.append(call())
            except TerraceError as exc:
                outcomes.append(exc)
        for name in self._run.strategy.scores.put_out():
            log.warning("%s is in quarantine, and takes no part any more", name)
        if self._journal.long:
            self._journal.begin(self._state())
        else:
            self._journal.flush()
        return outcomes

    def _state(self) -> tuple[dict[str, Flat], dict[str, Any]]:
        vectors, figures = self._run.state()
        return vectors, figures | {"now": self._now()}

    def _grant(self, name: str, incarnation: str) -> tuple[GrantedLease, bytes] | None:
        strategy, now, form = self._run.strategy, self._now(), format_of_weights(self.spec.wire)
        size = packed_bytes(self.spec.values, self.spec.buffers, form)
        lease = self._run.grant(name, incarnation, size, now)  # which may change the weights
        self._note("grant", now, name=name, incarnation=incarnation, size=size)
        if lease is None:
            return None
        if self._packed is None or self._packed[0] != lease.unit.version:
            self._packed = lease.unit.version, pack(*strategy.start_of(lease), form)
        return GrantedLease.of(lease), self._packed[1]

    def _now(self) -> float:
        """Current time on the run's clock."""
        return self._offset + time.monotonic()

    def _until_change(self) -> float:
        now = self._now()
        change = self._run.strategy.leases.next_change(now)
        return self._wait_s if change is None else max(0.01, change - now)

    def _note(self, do: str, now: float, body: bytes = b"", **given: Any) -> None:
        # A lease that a dead machine has forgotten costs its unit, as one that expires does.
        self._journal.add({"do": do, "now": now, **given}, body, lasting=do in ("take", "drop", "order", "rechecked"))

    @property
    def finished(self) -> bool:
        """True if there is nothing left to compute."""
        ended = self._reached is not None or self.result is not None
        return self._stopped or ended or bool(self.error) or self._run.finished

    def _tell(self) -> None:
        """Wake who waits for work, or for the end."""
        if self.finished:
            self._ended.set()
            if self._sharing is not None:
                self._sharing.wake()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- units that are computed again ---

    async def _recheck(self, checker: FlatLearner) -> None:
        """Compute the chosen units again, one after the other, in parallel to the run's thread."""
        while True:
            chosen = await self._again.get()
            name, segments = chosen.lease.worker, chosen.lease.unit.segments
            right: bool | None = None
            if not segments or self._sharing is not None:  # else of a former process, which gave images away
                checker.draw_from(await asyncio.to_thread(self._drawn, segments))
                sends, masking = self.spec.strategy.sends, self.spec.strategy.masking
                again = self._run.rechecks.is_right
                right = await asyncio.to_thread(again, chosen, checker, sends, self.spec.wire, masking)

            def call(chosen: Recheck = chosen, name: str = name, right: bool | None = right) -> None:
                now = self._now()
                self._run.rechecks.done(chosen)
                if right is not None:
                    self._run.rechecked(name, right, now)
                    self._note("rechecked", now, name=name, right=right)

            await self._call(call)
            if right is False:
                log.warning("an update of %s is not what its steps give", name)
                self._tell()

    def _drawn(self, segments: tuple[int, ...]) -> TrainingData:
        """Return the training data that a unit's batches come from."""
        return self.shared.images_of(segments, self.spec.network) if segments else self.images

    # --- lineages that meet ---

    async def _meet(self, tournament: Tournament) -> None:
        """Measure the lineages of a tournament when they are to meet, and rank them at the end."""

        def due() -> dict[int, tuple[Flat, Flat]]:
            return {each: tournament.lineage(each) for each in tournament.to_measure()}

        while True:
            changed = self._changed
            lineages = await self._call(due)
            if not lineages:
                await changed.wait()
                continue
            async with self._learning:
                scores = [await asyncio.to_thread(self._learner.measured, *each) for each in lineages.values()]

            def call(numbers: list[int] = [*lineages], scores: list[Score] = scores) -> None:  # noqa: B006
                now = self._now()
                self._run.met(numbers, scores, now)
                self._note("met", now, lineages=numbers, scores=scores)

            await self._call(call)
            found = ", ".join(f"{number}: {right:.4f}" for number, (right, _) in zip(lineages, scores, strict=True))
            log.info("accuracy of lineages on the held-out images: %s", found)
            self._tell()

    # --- accuracy, and the end ---

    async def _train(self) -> None:
        """Measure the accuracy on the held-out images now and then while there is work, and on the test images at the
        end.
        """
        while not self.finished:
            await self._changed.wait()
            if self.finished or self._test is None:
                continue
            began = time.monotonic()
            await self._look()
            if self.finished:
                self._tell()
            await self._pass((time.monotonic() - began) / _EVALUATION_SHARE)
        if (self._run.finished or self._reached is not None) and self.result is None:
            if self._reached is None and self._test is not None:
                await self._look()
            # The last update may have its weights in, and not yet be counted: only the run's thread knows.
            end = await self._call(self._moment) if self._reached is None else self._reached[0]
            accuracy = None if self._test is None else await self._measured(end.copies, self._test)
            result = {**end.figures, "accuracy": accuracy}
            if self._until is not None:
                reached = None if self._reached is None else self._reached[0].reached(self._reached[1])
                result |= {"until": self._until, "reached": reached and reached.model_dump()}
            self.error = self.error or self._run.strategy.failure
            if not self.error:
                await asyncio.to_thread(self._keep, end, result)
                self.result = result

    async def _look(self) -> None:
        """Measure the present weights on the held-out images, and see whether they are good enough."""
        moment = await self._call(self._moment)
        self._accuracy = found = await self._measured(moment.copies, self._learner.data.held_out)
        self._curves.add(_point(moment.figures, moment.steps, found))
        if self._until is not None and found >= self._until and not self.error:
            self._reached = moment, found
            log.info("the accuracy on the held-out images is %.4f, which was to be reached", found)
        await asyncio.to_thread(self._curves.write)

    async def _pass(self, seconds: float) -> None:
        """Let time pass, but not beyond the end; the curves get their points meanwhile."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0 and not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _POINT_S)):
                    await self._ended.wait()
            self._curves.add(await self._call(lambda: _point(self._figures(), self._run.strategy.leases.done)))

    async def _attend(self, lifecycle: Lifecycle) -> None:
        """Train; then let the workers go, and drain the service."""
        await self._train()
        self.over.set()
        if self.error:
            log.error("the run has failed: %s", self.error)
        log.info("the run is %s", self.state)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                if self.farewell is not None:
                    await self.farewell()
                while not self._run.deserted(self._now(), self.spec.lease_s):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await self._changed.wait()
        lifecycle.drain()

    async def _drain(self, lifecycle: Lifecycle) -> None:
        """Answer all requests that wait for work when the host is ending."""
        await lifecycle.wait_draining()
        self._draining = True
        self._tell()

    def _moment(self) -> _Moment:
        """The present state of the run; on its thread."""
        return _Moment(copies=self._run.copies(), figures=self._figures(), steps=self._run.strategy.leases.done)

    async def _measured(self, copies: tuple[Flat, Flat], images: ImageSet) -> float:
        """The accuracy. Weights that give no loss which means something are the end of the run."""
        async with self._learning:
            accuracy, loss = await asyncio.to_thread(self._learner.evaluated, *copies, images)
        if not loss <= MOST_LOSS:
            self.error = f"the loss of the weights is {loss:.3g}, which is not finite or above {MOST_LOSS:g}: {_LOWER}"
        return accuracy

    async def _doubt(self, first: int) -> None:
        """Compute these steps here from the current weights, after several updates were refused in a row. If the
        numbers are not finite here either, the workers are not at fault, and the run has failed.
        """
        first = min(first, self.steps - 1)
        steps = range(first, min(first + self.spec.strategy.period, self.steps))
        async with self._learning:
            if not self._run.doubtful or self.finished:
                return
            start, strategy = await self._call(self._run.copies), self.spec.strategy
            rate = self._run.strategy.leases.rate
            good = await asyncio.to_thread(is_sound, self._learner, start, steps, strategy.sends, rate)
        if good:
            await self._call(self._run.believe)
        else:
            self.error = f"the updates, and the host's own one from these weights, are not finite: {_LOWER}"

    def _figures(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "strategy": spec.choice,
            "network": spec.network.name,
            "workers": spec.workers,
            "seed": spec.network.seed,
            "epochs": spec.network.all_epochs,
            "staleness": self._run.staleness,
            **self._run.counted(),
            **self._run.strategy.results(),
        }

    def _keep(self, end: _Moment, result: dict[str, Any]) -> None:
        folder = self._journal.folder
        if self._base is not None:
            weights = end.copies[0]
            keep_weights(folder / WEIGHTS, weights)
            assert self.spec.own is not None
            write_atomically(folder / IMPROVED, written(self._base, self.spec.own.layers, weights))
            write_atomically(folder / RESULT, json.dumps(result, indent=1).encode())
            return
        fleet = FleetFacts.model_validate({name: result[name] for name in FleetFacts.model_fields if name in result})
        self._learner.keep(end.copies, folder, dataset=self._dataset, seconds=result["seconds"], fleet=fleet)
        self._curves.draw(f"{result['network']} with {result['strategy']}, {result['workers']} workers")
        write_atomically(folder / RESULT, json.dumps(result, indent=1).encode())


def _point(figures: Mapping[str, Any], steps: int, accuracy: float | None = None) -> RunPoint:
    """A moment on the curves.

    Args:
        figures: figures in the form of the result.
    """
    names = ("seconds", "updates", "loss", "bytes_sent", "bytes_received", "staleness")
    return RunPoint(steps=steps, accuracy=accuracy, **{name: figures[name] for name in names})


def _read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that has finished."""
    try:
        found: dict[str, Any] = json.loads((folder / RESULT).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found
