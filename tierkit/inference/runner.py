"""Dynamic batching: a bounded queue (backpressure: what does not fit is refused), and one inference thread.

    async with ModelRunner(model) as runner:
        await runner.warm_up()
        result = await runner.infer({"images": pixels}, ["probabilities"], budget_s=0.5)

The thread takes what waits, up to `max_batch_size` images, joins it to one batch, runs the model and gives each
request its own rows. No request waits for others unless `max_queue_delay_s` says so: batches form because requests
arrive while the batch before them is computed.

There is one shortcut: a short batch is computed on the event loop if no other request is under way, because handing it
to the thread and back takes as long as a small inference. In a process with a single core, a short batch is always
computed on the event loop, after reading the waiting requests: there each new request would interrupt the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
from msgspec import Struct

from tierkit.errors import (
    DeadlineExceeded,
    Draining,
    InvalidInput,
    Overloaded,
    TerraceError,
    TooLarge,
    Unavailable,
    WeightsError,
)
from tierkit.inference.model import CORES, WANTED_UNTIL, Divisible, Model, Steady
from tierkit.inference.sharing import OTHERS, FairQueue, has_room
from tierkit.inference.statistics import BatchRecord, ModelRun, ModelStatistics
from tierkit.inference.thread import InferenceThread
from tierkit.tensors import Array, TensorSpec
from tierkit.wire.oip.datatypes import datatype_of, dtype_of

__all__ = ["ModelRunner", "RunResult", "examine"]

_RATE_HALF_LIFE_IMAGES = 128
"""Half-life of `ms_per_image`, in images."""

_FRESH_S = 1.0
"""Seconds for which `check` trusts a batch that succeeded."""

_MARGIN_S = 0.005
"""Part of a request's budget left for waking up and for sending the answer."""

_STALL_S = 30.0
"""Seconds after which a batch counts as hanging."""

_LOOP_S = 0.02
"""Longest batch on the event loop, by the measured rate: everything else on the loop waits meanwhile."""

_FEW = 8
"""Fewer images may all run on one core, whatever the cores of the model."""

_TURNS = 4
"""Turns of the event loop before a batch is computed on it. A connection is accepted in one turn, its request is read
in the next, and the answer is made in the one or two turns after that."""

_OVERTAKEN_S = 2.0
"""A request that has waited this long is not overtaken any more."""

_EXAMINED_IMAGES = 4

_WARM_UP_IMAGES = 50
_WARM_UP_S = 0.4
"""Largest batch of the speed measurement, and its approximate duration limit for a slow network, in seconds."""


class RunResult(Struct, frozen=True, kw_only=True):
    """One request's answer and what it cost."""

    outputs: dict[str, Array]
    """Outputs by name, with the first axis of the request's inputs. They may view arrays that other requests view too:
    read only."""
    queue_s: float
    """Time from arrival to the start of its batch; longer if the batch shares the cores."""
    compute_s: float
    """Time in the model for the whole batch, as if it had all cores of the node."""
    batch_images: int
    """Images in the batch."""


@dataclass(slots=True, eq=False)
class _Job:
    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    images: int
    arrived: float
    waits_until: float
    """Latest start of its batch while it waits for others to join."""
    deadline: float
    urgent: bool
    own: bool
    """True for the runner's own images, which no client sent. They are computed in a separate batch, and neither
    metrics nor statistics count them."""
    share: str
    """The scheduler from which it comes; see `tierkit.inference.sharing`."""
    done: asyncio.Future[RunResult] | None = None
    """Gets the outcome once, on the event loop; None from then on, if the request is cancelled, and if it needs no
    future."""
    timer: asyncio.TimerHandle | None = None
    """Ends it when its budget is spent."""

    def end(self, outcome: RunResult | Exception) -> None:
        done, self.done = self.done, None
        if self.timer is not None:
            self.timer.cancel()
        if done is None or done.done():  # cancelled, and its task has not been told yet
            return
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)


class ModelRunner:
    """A model with its queue and the thread that serves it.

    Args:
        model: what to run.
        max_batch_size: most images in one call of the model; a larger request is computed in pieces.
        max_queue_delay_s: longest wait of the first request of a batch for others to join it; shorter if the budget of
            one of them requires it.
        max_queue_images: most images that may wait; more are refused at once. Each share has an equal part of them
            that no other share can use up.
        thread: inference thread to share with other runners; None for a new one.
        observe: called on the event loop after each batch.
        trouble: returns why the model cannot be run now; "" if it can.
        elsewhere: another program computes the model and may never answer, so a request ends with its budget even while
            its batch runs.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_batch_size: int = 64,
        max_queue_delay_s: float = 0.0,
        max_queue_images: int = 4096,
        thread: InferenceThread | None = None,
        observe: Callable[[BatchRecord], None] | None = None,
        trouble: Callable[[], str] = str,
        elsewhere: bool = False,
    ) -> None:
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_queue_delay_s = max_queue_delay_s
        self.max_queue_images = max_queue_images
        self.statistics = ModelStatistics()
        self.paused = ""
        """Reason why an operator lets it take no requests now; "" if it may."""
        self._trouble = trouble
        self._elsewhere = elsewhere
        self._thread = thread or InferenceThread()
        self._observe = observe
        self._queue: FairQueue[_Job] = FairQueue(self._thread.turns, overtaken_s=_OVERTAKEN_S)
        shares = self._thread.turns.shares
        self.answered_images, self.refused_requests = dict.fromkeys(shares, 0), dict.fromkeys(shares, 0)
        """Counts by share."""
        self._running_images = 0
        self._open = False
        self._batches: dict[int, float] = {}
        """Batches under way, and when they began."""
        self._last_success = -math.inf
        self._proofs = 0
        self._s_per_image = 0.0
        self._best_s_per_image = 0.0
        self._steady = isinstance(model, Steady) and model.steady
        self.divisible = isinstance(model, Divisible)
        """True if several batches may be computed at a time."""
        self._about_to_run = False
        """True if the event loop will come to compute what waits."""
        self._output_names = tuple(spec.name for spec in model.outputs)
        self._float_inputs = tuple(
            spec.name
            for spec in model.inputs
            if any(dtype_of(datatype).kind == "f" for datatype in (spec.datatype, *spec.also))
        )
        self._several_types = any(spec.also for spec in model.inputs)

    # --- on the event loop ---

    @property
    def not_served(self) -> str:
        """Reason why no requests are taken now; "" if they are."""
        return self.paused or self._trouble()

    @property
    def queued_images(self) -> int:
        """Images that wait for their batch."""
        return self._queue.images

    def queued_images_of(self, share: str) -> int:
        """Images of one share that wait for their batch."""
        return self._queue.images_of(share)

    @property
    def running_images(self) -> int:
        """Images of the batch that is being computed."""
        return self._running_images

    @property
    def images_done(self) -> int:
        """Images answered since the runner was warm."""
        return self.statistics.images

    @property
    def images_computed(self) -> int:
        """Number of images answered since the runner was warm and images of `prove`: it grows even if there are no
        requests."""
        return self.statistics.images + self._proofs

    @property
    def ms_per_image(self) -> float:
        """Measured compute time, moving average; 0 before `warm_up`."""
        return self._s_per_image * 1000.0

    @property
    def backlog_s(self) -> float:
        """Estimated time to compute all that waits and runs."""
        return (self._queue.images + self._running_images) * self._s_per_image

    @property
    def running_s(self) -> float:
        """Estimated time to compute the batch that is being computed."""
        return self._running_images * self._s_per_image

    def queued_s(self, share: str) -> float:
        """Estimated time to compute the requests of one share that wait."""
        return self._queue.images_of(share) * self._s_per_image

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._thread.attach(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Refuse new requests and those that still wait; the batch under way is finished and answered."""
        if not self._open:
            return
        self._open = False
        with self._thread.lock:
            left = self._queue.clear()
        for job in left:
            job.end(Draining("the node is shutting down"))
        await self._thread.detach(self)

    async def warm_up(self, longest_s: float = _WARM_UP_S) -> None:
        """Let the model allocate what it needs, and measure `ms_per_image` on the way that requests take.

        Args:
            longest_s: time for the measurement, in which other requests wait.
        """
        await self._probe(1)
        one = await self._probe(1)
        most = min(_WARM_UP_IMAGES, self.max_batch_size, self.max_queue_images)
        images = max(1, min(most, int(longest_s / 2 / max(one.compute_s, 1e-6))))
        runs = [await self._probe(images) for _ in range(2)]
        self._s_per_image = self._best_s_per_image = min(run.compute_s for run in runs) / images

    async def prove(self) -> None:
        """Compute an image that no client sent, after all that waits and runs now. Raises any error of the model."""
        await self._probe(1)
        self._proofs += 1

    async def examine(self) -> None:
        """Compute a few made-up images, and look at the answers.

        Raises:
            WeightsError: they hold NaN or infinity.
            Exception: any error of the model.
        """
        result = await self._own(_made_up(self.model.inputs), self._output_names, _EXAMINED_IMAGES)
        _check_numbers(self.model.name, result.outputs)

    async def pause(self, why: str) -> None:
        """Refuse new requests from now on, and return when those that came before have ended.

        Args:
            why: becomes `paused`; "" takes it back.
        """
        self.paused = why
        await self.drained()

    async def drained(self) -> None:
        """Return at a moment when no request waits or is computed."""
        while True:
            with self._thread.lock:
                busy = bool(self._queue or self._batches)
            if not busy:
                return
            with contextlib.suppress(Exception):  # how the model fails is for those who have asked it
                await self.prove()

    async def _probe(self, images: int) -> RunResult:
        """A batch of the runner's own, which waits for no company."""
        return await self._own(_blank(self.model.inputs, images), self._output_names[:1], images)

    async def _own(self, inputs: Mapping[str, Array], outputs: Sequence[str], images: int) -> RunResult:
        self._check_open()
        job = self._job(inputs, outputs, images, own=True)
        done = self._enqueue(job)
        self._thread.wake()
        return await done

    async def check(self) -> None:
        """Prove that the model still answers, through its own thread; costs nothing while it is at work.

        Raises:
            Unavailable: the model is not served, or the batch under way takes longer than any should.
            Exception: any error of the model.
        """
        self.check_served()
        now = time.perf_counter()
        if now - min(self._batches.values(), default=now) > _STALL_S:
            raise Unavailable(f"the model '{self.model.name}' has computed one batch for over {_STALL_S:g} s")
        if self._thread.work_s == 0 and now - self._last_success > _FRESH_S:
            await self.prove()

    async def infer(
        self,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        *,
        budget_s: float | None = None,
        alone: bool = False,
        urgent: bool = False,
    ) -> RunResult:
        """Compute one request, possibly in one batch with others. Cancelling it takes it out of the queue.

        Args:
            inputs: one array for each of the model's inputs, all with the same first axis n >= 1. They are read until
                the answer is there.
            outputs: names of the outputs wanted; none for all.
            budget_s: seconds within which the answer is useful; None for no limit.
            alone: no other request is under way on this event loop. Then a request that takes at most 20 ms, by the
                measured rate of a `steady` model, is computed on the loop while the inference thread is idle.
            urgent: it overtakes waiting requests, except urgent ones and those that have waited for 2 s.

        Raises:
            InvalidInput: inputs or outputs that the model does not have, or values that are not finite (NaN, infinity).
            TooLarge: more images than the whole queue may hold.
            Overloaded: the queue is full, or too long for this budget. Another node may have time for it.
            DeadlineExceeded: the model is too slow for this budget, or the budget was spent while it waited.
            Draining: the runner is closed or closes before the request's turn.
            Unavailable: it is not served.
        """
        images = self.check_request(inputs, outputs)
        return await self.answer(inputs, outputs, images, budget_s=budget_s, alone=alone, urgent=urgent)

    async def answer(
        self,
        inputs: Mapping[str, Array],
        outputs: Sequence[str],
        images: int,
        *,
        budget_s: float | None = None,
        alone: bool = False,
        urgent: bool = False,
        share: str = OTHERS,
    ) -> RunResult:
        """Compute a request that `check_request` has accepted. See `infer`.

        Args:
            images: the number that `check_request` returned.
            share: the scheduler from which it comes.
        """
        self._admit(images, budget_s, urgent=urgent, share=share)
        job = self._job(inputs, outputs, images, budget_s=budget_s, urgent=urgent, share=share)
        if alone and self._runs_here(images):
            return self._run_alone(job)
        done = self._enqueue(job)
        if budget_s is not None and self._elsewhere:
            job.timer = self._loop.call_later(budget_s, self._give_up, job)
        if self._thread.shares_core and self._is_short():
            self._run_soon()
        else:
            self._thread.wake()
        try:
            return await done
        except asyncio.CancelledError:
            self._forget(job)
            raise

    def _runs_here(self, images: int) -> bool:
        """True if a request may be computed on the event loop, provided that no other one is under way."""
        idle = not (self._queue or self._thread.at_work)
        return idle and images <= self.max_batch_size and self._takes_a_moment(images)

    def _run_alone(self, job: _Job) -> RunResult:
        try:
            (result,), record = self._compute([job], self._thread.cores)
        except Exception:
            self.statistics.add_failure(time.perf_counter() - job.arrived)
            raise
        self._learn(record)
        self._count(record)
        self.answered_images[job.share] += job.images
        return result

    def _enqueue(self, job: _Job) -> asyncio.Future[RunResult]:
        job.done = done = self._loop.create_future()
        with self._thread.lock:
            self._queue.add(job)
        return done

    def _job(
        self,
        inputs: Mapping[str, Array],
        outputs: Sequence[str],
        images: int,
        *,
        budget_s: float | None = None,
        urgent: bool = False,
        own: bool = False,
        share: str = OTHERS,
    ) -> _Job:
        now = time.perf_counter()
        return _Job(
            inputs=inputs,
            outputs=outputs or self._output_names,
            images=images,
            arrived=now,
            waits_until=now if urgent or own else now + self.max_queue_delay_s,
            deadline=math.inf if budget_s is None else now + budget_s,
            urgent=urgent,
            own=own,
            share=share,
        )

    def _is_short(self) -> bool:
        """True if the next batch may be computed on the event loop; not if the thread has taken it."""
        with self._thread.lock:
            fits = bool(self._queue) and self._queue.first().images <= self.max_batch_size
            images = min(self._queue.images, self.max_batch_size)
        return fits and self._takes_a_moment(images)

    def _takes_a_moment(self, images: int) -> bool:
        # The rate was measured on all cores, and a few images run on one.
        longest_s = max(images, min(images, _FEW) * self._thread.cores) * self._s_per_image
        return 0 < longest_s <= _LOOP_S and self._steady and not self.max_queue_delay_s

    def _run_soon(self) -> None:
        """Compute a batch when the event loop has come around a few times and has read what else has come."""
        if not self._about_to_run:
            self._about_to_run = True
            self._loop.call_soon(self._run_here, _TURNS)

    def _run_here(self, turns: int) -> None:
        if turns:
            self._loop.call_soon(self._run_here, turns - 1)
            return
        self._about_to_run = False
        if not self._queue:
            return
        if self._thread.at_work or not self._is_short():
            self._thread.wake()
            return
        self._run_now()
        if self._queue:
            self._run_soon()

    def _run_now(self) -> None:
        self._run(lambda callback, *args: callback(*args), self._thread.cores)

    def check_room(self, images: int = 1, *, share: str = OTHERS) -> None:
        """Refuse early: before a request's body is read, if there is no room for `images` now.

        Raises:
            Draining, Unavailable, TooLarge, Overloaded: see `infer`.
        """
        self._admit(images, None, share=share)

    def check_served(self) -> None:
        """Raises Unavailable while no requests are taken."""
        if why := self.not_served:
            raise Unavailable(f"the model '{self.model.name}' is not served: {why}")

    def check_request(self, inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> int:
        """Number of images, if the request fits the model. Raises InvalidInput."""
        specs = self.model.inputs
        if len(inputs) != len(specs) or any(spec.name not in inputs for spec in specs):
            raise InvalidInput(
                f"model '{self.model.name}' takes the inputs {[spec.name for spec in specs]}, not {list(inputs)}"
            )
        for spec in specs:
            array = inputs[spec.name]
            datatype = datatype_of(array)
            if (datatype != spec.datatype and datatype not in spec.also) or not spec.accepts(array):
                allowed = " or ".join([spec.datatype, *spec.also])
                files = "" if spec.decode is None else ", or files as BYTES [n]"
                raise InvalidInput(
                    f"input '{spec.name}' of model '{self.model.name}' is {allowed} {list(spec.shape)}{files}, "
                    f"not {datatype_of(array)} {list(array.shape)}"
                )
        counts = {len(inputs[spec.name]) for spec in specs}
        if len(counts) != 1 or 0 in counts:
            raise InvalidInput(f"all inputs need the same number of rows, at least 1; got {sorted(counts)}")
        for name in outputs:
            if name not in self._output_names:
                raise InvalidInput(
                    f"model '{self.model.name}' has the outputs {list(self._output_names)}, not {name[:64]!r}"
                )
        return counts.pop()

    def _admit(self, images: int, budget_s: float | None, *, urgent: bool = False, share: str) -> None:
        try:
            self._check_admission(images, budget_s, urgent=urgent, share=share)
        except TerraceError:
            self.statistics.add_failure(0.0)
            self.refused_requests[share] += 1
            raise

    def _check_admission(self, images: int, budget_s: float | None, *, urgent: bool, share: str) -> None:
        self._check_open()
        self.check_served()
        most, own, total = self.max_queue_images, self._queue.images_of(share), self._queue.images
        if images > most:
            raise TooLarge(f"{images} images in one request; at most {most} are accepted")
        if not has_room(images, own=own, total=total, most=most, shares=len(self.answered_images)):
            raise Overloaded(f"{total} images wait, at most {most} may", retry_after_s=self._thread.backlog_s(share))
        if budget_s is None:
            return
        # By the best rate ever measured: a moving average that one slow batch has spoilt must not refuse everything,
        # for then nothing would ever correct it. The backlog may use the average: while there is one, batches run.
        if images * self._best_s_per_image >= budget_s:
            raise DeadlineExceeded(
                f"{'1 image takes' if images == 1 else f'{images} images take'} "
                f"{_ms(images * self._best_s_per_image)} here, {_ms(max(budget_s, 0.0))} are left"
            )
        overtaken = 0
        if urgent:
            with self._thread.lock:
                overtaken = self._queue.overtaken(share, time.perf_counter())
        takes_s = images * self._s_per_image
        backlog_s = self._thread.backlog_s(share, more_s=takes_s, overtaken_s=overtaken * self._s_per_image)
        if backlog_s and backlog_s + takes_s > budget_s:
            raise Overloaded(
                f"about {_ms(backlog_s)} of work wait here, {_ms(budget_s)} are left",
                retry_after_s=backlog_s,
            )

    def _check_open(self) -> None:
        if not self._open:
            raise Draining("the node is shutting down")

    def _give_up(self, job: _Job) -> None:
        self._fail_all([job], DeadlineExceeded("the time budget was spent before the answer came"))
        self._forget(job)

    def _forget(self, job: _Job) -> None:
        job.done = None
        if job.timer is not None:
            job.timer.cancel()
        with self._thread.lock:
            self._queue.remove(job)

    # --- on the inference thread; `_run` and what it calls also on the event loop ---

    def due(self) -> float:
        """Time at which the next batch must start (`time.perf_counter`); infinity with an empty queue. Under the
        lock."""
        if not self._queue:
            return math.inf
        job = self._queue.first()
        if job.urgent:
            return 0.0  # before the other runners' batches, too
        first = job.arrived
        if self._queue.images >= self.max_batch_size or not self.max_queue_delay_s:
            return first
        # Company is worth no missed deadline. Twice the expected time: the rate is an average, and half of all batches
        # take longer.
        needs_s = 2 * self._queue.images * self._s_per_image + _MARGIN_S
        return max(first, min(min(job.waits_until, job.deadline - needs_s) for job in self._queue))

    def start(self) -> float:
        """Start of the share whose request is next. Only with a request that waits. Under the lock."""
        return self._queue.start

    def has_several(self) -> bool:
        """True if more than one request waits. Under the lock."""
        return len(self._queue) > 1

    def run_batch(self, cores: int) -> None:
        """Take the next batch from the queue, compute it and hand the answers to the event loop."""
        self._run(self._loop.call_soon_threadsafe, cores)

    def _run(self, post: Callable[..., object], cores: int) -> None:
        """`run_batch`; `post` calls a function with its arguments on the event loop."""
        jobs, expired = self._take(cores)
        if expired:
            post(self._expire, expired)
        if jobs:
            self._answer(jobs, post, cores)
            with self._thread.lock:
                del self._batches[id(jobs[0])]

    def _answer(self, jobs: list[_Job], post: Callable[..., object], cores: int) -> None:
        try:
            outcome = partial(self._deliver, jobs, *self._compute(jobs, cores))
        except (Unavailable, DeadlineExceeded) as exc:  # of what computes the model elsewhere, whatever the content
            outcome = partial(self._fail_all, jobs, exc)
        except Exception as exc:
            if len(jobs) > 1:
                # One request's content may have broken the batch; the others shall not fail with it.
                for job in jobs:
                    self._answer([job], post, cores)
                return
            outcome = partial(self._fail_all, jobs, exc)
        # Before the answer: its reader must not find its own work still in the backlog.
        with self._thread.lock:
            self._running_images -= sum(job.images for job in jobs)
        post(outcome)

    def _take(self, cores: int) -> tuple[list[_Job], list[_Job]]:
        jobs: list[_Job] = []
        expired: list[_Job] = []
        images = 0
        now = time.perf_counter()
        with self._thread.lock:
            # What is left goes to the cores that are free.
            share = -(-self._queue.images * cores // (cores + self._thread.free))
            most = min(self.max_batch_size, share)
            while self._queue:
                job = self._queue.first()
                if jobs:
                    if images + job.images > most or jobs[0].own or job.own:
                        break
                    if self._several_types and _types(jobs[0]) != _types(job):
                        break  # arrays of different types do not join
                if job.deadline <= now:
                    expired.append(self._queue.take(0.0))
                else:
                    jobs.append(self._queue.take(self._s_per_image))
                    images += job.images
            if jobs:
                self._running_images += images
                self._batches[id(jobs[0])] = now
        return jobs, expired

    def _compute(self, jobs: list[_Job], cores: int) -> tuple[list[RunResult], BatchRecord]:
        started = time.perf_counter()
        images, latest = 0, 0.0
        wanted: set[str] = set()
        for job in jobs:
            if self._float_inputs:
                self._check_finite(job.inputs)
            images += job.images
            latest = max(latest, job.deadline)
            wanted.update(job.outputs)
        inputs = self._join(jobs)
        joined = time.perf_counter()
        WANTED_UNTIL.set(latest)
        CORES.set(cores)
        outputs, runs = self._run_model(inputs, [name for name in self._output_names if name in wanted], images)
        infer_s = 0.0
        for run in runs:
            infer_s += run.seconds
        # A batch that shares the cores with another one counts as one that waited for them, and then had all.
        compute_s = infer_s * cores / self._thread.cores
        results: list[RunResult] = []
        start = 0
        for job in jobs:
            end = start + job.images
            results.append(
                RunResult(
                    outputs={name: outputs[name][start:end] for name in job.outputs},
                    queue_s=started - job.arrived + infer_s - compute_s,
                    compute_s=compute_s,
                    batch_images=images,
                )
            )
            start = end
        record = BatchRecord(
            queue_s=[started - job.arrived for job in jobs],
            input_s=joined - started,
            runs=runs,
            output_s=time.perf_counter() - joined - infer_s,
            images=images,
            infer_s=infer_s,
            compute_s=compute_s,
        )
        return results, record

    def _check_finite(self, inputs: Mapping[str, Array]) -> None:
        """Here and not in `check_request`: a look at megabytes of features would hold the loop up."""
        for name in self._float_inputs:
            array = inputs[name]
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise InvalidInput(f"input '{name}' holds NaN or infinity")

    def _join(self, jobs: list[_Job]) -> Mapping[str, Array]:
        if len(jobs) == 1:
            return jobs[0].inputs
        return {spec.name: np.concatenate([job.inputs[spec.name] for job in jobs]) for spec in self.model.inputs}

    def _run_model(
        self, inputs: Mapping[str, Array], names: Sequence[str], images: int
    ) -> tuple[dict[str, Array], list[ModelRun]]:
        """Return the outputs of all images, computed in runs of at most `max_batch_size` images."""
        step = self.max_batch_size
        pieces: list[dict[str, Array]] = []
        runs: list[ModelRun] = []
        for at in range(0, images, step):
            piece = inputs if images <= step else {name: array[at : at + step] for name, array in inputs.items()}
            begun = time.perf_counter()
            pieces.append(self.model.run(piece, names))
            runs.append(ModelRun(min(step, images - at), time.perf_counter() - begun))
        outputs = pieces[0]
        if len(pieces) > 1:
            outputs = {name: np.concatenate([piece[name] for piece in pieces]) for name in names}
        for name in names:
            if len(outputs[name]) != images:
                raise RuntimeError(f"model '{self.model.name}' returned {len(outputs[name])} rows for {images} images")
        return outputs, runs

    # --- back on the event loop ---

    def _deliver(self, jobs: list[_Job], results: list[RunResult], record: BatchRecord) -> None:
        self._learn(record)
        own = jobs[0].own
        if not own:
            self._count(record)
        for job, result in zip(jobs, results, strict=True):
            if not own:
                self.answered_images[job.share] += job.images
            job.end(result)

    def _learn(self, record: BatchRecord) -> None:
        self._last_success = time.perf_counter()
        weight = 0.5 ** (record.images / _RATE_HALF_LIFE_IMAGES)
        measured = record.compute_s / record.images
        self._s_per_image = weight * self._s_per_image + (1 - weight) * measured if self._s_per_image else measured
        self._best_s_per_image = min(self._best_s_per_image, measured)

    def _count(self, record: BatchRecord) -> None:
        self.statistics.add_batch(record)
        if self._observe is not None:
            self._observe(record)

    def _fail_all(self, jobs: list[_Job], exc: Exception) -> None:
        for job in jobs:
            if not job.own and job.done is not None:
                self.statistics.add_failure(time.perf_counter() - job.arrived)
            job.end(exc)

    def _expire(self, jobs: list[_Job]) -> None:
        self._fail_all(jobs, DeadlineExceeded("the time budget was spent while the request waited"))


def _types(job: _Job) -> list[np.dtype[Any]]:
    return [array.dtype for array in job.inputs.values()]


def _ms(seconds: float) -> str:
    """A duration in milliseconds, with as many digits as tell it from nothing."""
    ms = seconds * 1000
    return f"{ms:.0f} ms" if ms == 0 or ms >= 10 else f"{ms:.2g} ms"


def _blank(specs: Sequence[TensorSpec], images: int) -> dict[str, Array]:
    """Zeros of the given shapes, `images` rows each."""
    return {
        spec.name: np.zeros([images if size == -1 else size for size in spec.shape], dtype_of(spec.datatype))
        for spec in specs
    }


def examine(model: Model) -> None:
    """Compute a few made-up images, and look at the answers; blocks meanwhile.

    Raises:
        WeightsError: they hold NaN or infinity.
        Exception: any error of the model.
    """
    _check_numbers(model.name, model.run(_made_up(model.inputs), [spec.name for spec in model.outputs]))


def _check_numbers(model: str, outputs: Mapping[str, Array]) -> None:
    for name, values in outputs.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise WeightsError(f"the model '{model}' answers with NaN or infinity in '{name}'")


def _made_up(specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """A black image, a white one, and noise that is the same each time."""
    made = _blank(specs, _EXAMINED_IMAGES)
    noise = np.random.default_rng(0)
    for array in made.values():
        if array.dtype.kind == "u":
            array[1:2] = np.iinfo(array.dtype).max
            array[2:] = noise.integers(0, np.iinfo(array.dtype).max, array[2:].shape, array.dtype, endpoint=True)
        elif array.dtype.kind == "f":
            array[1:2] = 1.0
            array[2:] = noise.random(array[2:].shape)
    return made
