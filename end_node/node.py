"""Behaviour of an end node: the coarse answer from its own model, the fine one from an upstream node."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Histogram

from encryption.heads import Encoded, Encoders
from encryption.sending import (
    Call,
    FeatureClient,
    MaySeePixels,
    PixelClient,
    Reply,
    TakesFeatures,
    ThroughRelay,
    destination,
)
from end_node.answers import (
    NoNumbers,
    UpperAnswer,
    check_probabilities,
    coarse_event,
    fine_event,
    finer_in_place,
    in_place,
    nothing_to_answer,
    stage_answer,
)
from end_node.escalation import Below, going_up
from end_node.settings import EndSettings
from models.hierarchy import Hierarchy
from tierkit.errors import SetupError, TerraceError, UpstreamTimeout, UpstreamUnavailable
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.files import Decoded, are_files
from tierkit.inference.model import Model
from tierkit.inference.node import InferenceNode
from tierkit.inference.oip_client import OipClient
from tierkit.inference.served import NO_SUBSTITUTES, ServedModels, Substitutes
from tierkit.inference.upstreams import forbidden_url
from tierkit.inference.versions import Version
from tierkit.spans import Span
from tierkit.tensors import Array
from tierkit.wire.events import (
    CoarseEvent,
    FallbackEvent,
    FallbackReason,
    FineEvent,
    RoutedEvent,
    StageAnswer,
    StageLoss,
    WrongAnswer,
)
from tierkit.wire.messages import Encoding, Stage, Upstream

__all__ = ["EndNode", "Task"]

log = logging.getLogger(__name__)

_OUTPUT = "probabilities"
_NONE: Array = np.zeros((0, 1), np.float32)
"""Probabilities of no images."""

_MOST_SAID = 2000
"""Characters of what went wrong with upstream nodes that are passed on."""

_DIGEST = 64
"""Characters of a sha256."""

_CLASS_BYTES = 8
"""Most bytes of a probability."""

_MAX_REMEMBERED = 256
"""Upstream nodes whose failure is remembered: their names come from outside."""

_escalation_duration = Histogram(
    "terrace_escalation_duration_seconds",
    "Requests to upstream nodes; outcome: fine, upstream_unavailable, upstream_timeout, upstream_error or cancelled.",
    ["to", "outcome"],
    buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
_escalations = cache(_escalation_duration.labels)  # to find the metric of a label takes longer than to count


class Task(Struct, frozen=True, kw_only=True):
    """One batch of images to answer."""

    task_id: str
    version: Version
    """Version of the node's network that gives the coarse answer."""
    images: Array
    """The images in the form that goes up: UINT8 `[n, h, w, 3]`, or files `[n]`."""
    read: Decoded
    """The images in the form that the node's own model takes, UINT8 `[n, h, w, 3]`, and the faults of unreadable
    images."""
    positions: Sequence[int]
    """Positions of the images in the task as it came, rising; unreadable images are left out."""
    upstreams: tuple[Upstream, ...]
    """Upstream nodes to ask for the fine answer, in this order; none if the coarse answer is all that is wanted."""
    stages: tuple[Stage, ...] = ()
    """Tiers to which the unsure images go, one after the other; none if all images go to one node together."""
    deadline: float
    """Time on the node's clock (`time.monotonic`) after which no answer is useful."""
    request_id: str
    span: Span
    """Span of the node's work on the task."""
    urgent: bool = False
    """True if it overtakes the tasks that wait, here and above."""


class EndNode(InferenceNode):
    """Answers tasks, in addition to the work of every node. Keeps no state between tasks: a task that comes twice is
    computed twice.

    Args:
        models: the first one gives the coarse answers.
        hierarchy: hierarchy of the labels.
        encoders: encoders that it holds. They are used for upstream nodes that must not see pixels.
        clock: Returns monotonic seconds.

    Raises:
        SetupError: the first model gives neither superclass nor class probabilities.
    """

    settings: EndSettings

    def __init__(
        self,
        settings: EndSettings,
        models: Sequence[Model] | ServedModels,
        lifecycle: Lifecycle,
        hierarchy: Hierarchy,
        encoders: Encoders | None = None,
        *,
        substitutes: Substitutes = NO_SUBSTITUTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoders = encoders or Encoders((), settings)
        super().__init__(settings, models, lifecycle, self._encoders, substitutes=substitutes)
        self.clock = clock
        self._hierarchy = hierarchy
        self._superclasses = len(hierarchy.coarse)
        self._failing: dict[str, FallbackReason] = {}
        self._check_classes(self.default_runner.model)

    def check_model(self, model: Model) -> None:
        """Check the network of a release that is loaded later; see `EndNode`."""
        self._check_classes(model)

    def _check_classes(self, model: Model) -> None:
        hierarchy = self._hierarchy
        classes = next((spec.shape[-1] for spec in model.outputs if spec.name == _OUTPUT), None)
        if classes not in (len(hierarchy.coarse), len(hierarchy.fine)):
            raise SetupError(
                f"the model '{model.name}' has {classes or 'no'} probabilities; an end node needs one that tells the "
                f"{len(hierarchy.coarse)} superclasses or the {len(hierarchy.fine)} classes apart"
            )

    def version_for(self, network: str | None, *, coarse: bool = True) -> Version:
        """Version of the node's network that a task asks for.

        Args:
            network: value of `NETWORK_HEADER`; None for the one of its first release.
            coarse: False if the task wants no coarse answer, so that any version will do.

        Raises:
            Unavailable: it is not here now.
        """
        return self.versions.default if network is None or not coarse else self.versions.of_network(network)

    @property
    def hierarchy(self) -> Hierarchy:
        """The labels of its answers, and of those from above."""
        return self._hierarchy

    @property
    def allowed_upstreams(self) -> tuple[str, ...]:
        return self.settings.allowed_upstreams

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with super().running():
            client = OipClient(self.http, row_bytes=_CLASS_BYTES * len(self._hierarchy.fine))
            self._pixels, self._features = PixelClient(client), FeatureClient(client, self.settings.node_id)
            yield

    async def read(self, images: Array, version: Version) -> Decoded:
        """Return the pixels of a task's readable images, in the form that a version of the node's own model takes.

        Raises:
            InvalidInput: it is neither a tensor of pixels that the model takes, nor a tensor of files for a model that
                takes files.
        """
        (spec,) = version.runner.model.inputs
        if are_files(spec, images):
            return await self.files.decode(spec, images)
        version.runner.check_request({spec.name: images})
        return Decoded(images, {})

    async def coarse(self, task: Task, *, alone: bool = False) -> tuple[CoarseEvent, Array]:
        """Return the coarse answer of the node's own model, and its probabilities, `[n, superclasses]`.

        Args:
            alone: see `ModelRunner.infer`.

        Raises:
            NoNumbers: the network gave NaN. Its release is not served any more, if there is another one.
            TerraceError: see `ModelRunner.infer`.
        """
        runner = task.version.runner
        model = runner.model
        if not task.positions:
            return in_place(nothing_to_answer(task.task_id, self.settings.node_id, model), (), task.read.damaged), _NONE
        (images,) = model.inputs
        rows, left_s = task.read.rows, task.deadline - self.clock()
        result = await runner.answer(
            {images.name: rows}, [_OUTPUT], len(rows), budget_s=left_s, alone=alone, urgent=task.urgent
        )
        task.span.took(queue=result.queue_s, compute=result.compute_s)
        probabilities = result.outputs[_OUTPUT]
        if probabilities.shape[1] != self._superclasses:
            probabilities = self._hierarchy.coarse_probabilities(probabilities)
        try:
            event = coarse_event(
                task.task_id,
                self.settings.node_id,
                model,
                probabilities,
                task.read.charged(result),
                below=task.stages[0].below if task.stages else None,
            )
        except NoNumbers as exc:
            self.give_up(task.version, str(exc))
            raise
        return in_place(event, task.positions, task.read.damaged) if task.read.damaged else event, probabilities

    async def finer(self, task: Task, coarse: Array | None) -> FineEvent | FallbackEvent | RoutedEvent:
        """Return the upstream nodes' answers about the images, with their positions in the task as it came.

        Args:
            coarse: see `escalated`.
        """
        if not task.positions:
            if task.stages:
                return RoutedEvent(task_id=task.task_id, answers=(), losses=())
            return FallbackEvent(task_id=task.task_id, reason="damaged", detail="no image can be read", tried=())
        event = await (self.escalated(task, coarse) if task.stages else self.fine(task))
        images = len(task.positions) + len(task.read.damaged)
        return finer_in_place(event, task.positions, images) if task.read.damaged else event

    async def fine(self, task: Task) -> FineEvent | FallbackEvent:
        """Return the fine answer of the first upstream node that gives one, or the reason for keeping the coarse
        answer.

        Each attempt may take an equal share of the time that is left for it and the later ones, so that a hanging node
        does not use up the time of the others. The last one has all the remaining time.
        """
        got = await self._ask_in_turn(task, task.images, task.upstreams, later=0)
        return got if isinstance(got, FallbackEvent) else fine_event(task.task_id, got, self._hierarchy)

    async def escalated(self, task: Task, coarse: Array | None) -> RoutedEvent:
        """Return the finer answers of the unsure images, tier after tier in the order of the task's stages.

        Args:
            coarse: probabilities of the coarse answer, `[n, superclasses]`; None if only the sender knows it.
        """
        answers: list[StageAnswer] = []
        losses: list[StageLoss] = []
        below = Below.of_all(len(task.images), coarse)
        for number, stage in enumerate(task.stages):
            going = going_up(stage, below)
            if not len(going):
                break  # nothing goes further up
            nodes = [upstream for upstream in task.upstreams if upstream.tier is stage.tier]
            above = {after.tier for after in task.stages[number + 1 :]}
            later = sum(upstream.tier in above for upstream in task.upstreams)
            got = await self._ask_in_turn(task, task.images[going], nodes, later=later)
            if isinstance(got, UpperAnswer):
                answers.append(stage_answer(going, got, self._hierarchy))
                below = Below(answered=going, probabilities=got.probabilities, lost=going[:0])
                continue
            loss = StageLoss(
                tier=stage.tier,
                indices=tuple(going.tolist()),
                reason=got.reason,
                detail=got.detail if nodes else f"there was no {stage.tier} node to ask",
                tried=got.tried,
                wrong=got.wrong,
            )
            losses.append(loss)
            below = Below(answered=going[:0], probabilities=None, lost=going)
        return RoutedEvent(task_id=task.task_id, answers=tuple(answers), losses=tuple(losses))

    async def _ask_in_turn(
        self, task: Task, images: Array, upstreams: Sequence[Upstream], *, later: int
    ) -> UpperAnswer | FallbackEvent:
        """Ask these nodes until one answers; those that `allowed_upstreams` leaves out are skipped.

        Args:
            later: number of further nodes that may have to be asked after them.
        """
        tried: list[str] = []
        failures: list[str] = []
        wrong: list[WrongAnswer] = []
        allowed: list[Upstream] = []
        for upstream in upstreams:
            url = forbidden_url(upstream, self.allowed_upstreams)
            if url is None:
                allowed.append(upstream)
                continue
            why = f"not asked, for --allowed-upstreams of {self.settings.node_id} leaves out {url}"
            failures.append(f"{upstream.node_id}: {why}")
            self._tell(upstream.node_id, "forbidden", why)
        reason: FallbackReason = "deadline" if allowed else "forbidden" if upstreams else "no_upstream"
        encoded: dict[Encoding, Encoded] = {}
        for index, upstream in enumerate(allowed):
            remaining_s = task.deadline - self.clock()
            if remaining_s <= 0:
                break
            tried.append(upstream.node_id)
            budget_s = remaining_s / (len(allowed) + later - index)
            try:
                got = await self._ask(task, images, upstream, budget_s, encoded)
            except TerraceError as exc:
                reason = _reason(exc)
                failures.append(f"{upstream.node_id}: {exc}")
                if reason == "upstream_error":
                    wrong.append(WrongAnswer(node_id=upstream.node_id, detail=str(exc)[:_MOST_SAID]))
                self._tell(upstream.node_id, reason, str(exc))
            else:
                self._tell(upstream.node_id, None, "")
                return replace(got, wrong=tuple(wrong))
        if reason == "deadline":
            failures.append("the budget was spent before an upstream node could be asked")
        detail = "; ".join(failures)[:_MOST_SAID]
        return FallbackEvent(task_id=task.task_id, reason=reason, detail=detail, tried=tuple(tried), wrong=tuple(wrong))

    def _tell(self, upstream: str, reason: FallbackReason | None, why: str) -> None:
        """Log when an upstream node begins to fail, fails in another way, or is well again; not for each task."""
        if self._failing.get(upstream) == reason:
            return
        if reason is None:
            del self._failing[upstream]
            log.info("the upstream node answers again", extra={"upstream": upstream})
            return
        if len(self._failing) >= _MAX_REMEMBERED:
            self._failing.clear()
        self._failing[upstream] = reason
        log.warning("no fine answers from an upstream node", extra={"upstream": upstream, "reason": reason, "why": why})

    async def _ask(
        self, task: Task, images: Array, upstream: Upstream, budget_s: float, encoded: dict[Encoding, Encoded]
    ) -> UpperAnswer:
        """`encoded`: the images in the forms that they have been encoded in so far."""
        started = self.clock()
        outcome = "cancelled"
        try:
            reply = await self._send(task, images, upstream, started + budget_s, encoded)
            probabilities = check_probabilities(reply.response, images=len(images), classes=len(self._hierarchy.fine))
            outcome = "fine"
        except TerraceError as exc:
            outcome = _reason(exc)
            raise
        finally:
            round_trip_s = self.clock() - started
            _escalations(upstream.tier, outcome).observe(round_trip_s)
        return UpperAnswer(
            upstream=upstream,
            probabilities=probabilities,
            round_trip_s=round_trip_s,
            sha256=reply.response.model_version[:_DIGEST],
            timing=reply.response.timing,
            sent=reply.sent,
        )

    async def _send(
        self, task: Task, images: Array, upstream: Upstream, until: float, encoded: dict[Encoding, Encoded]
    ) -> Reply:
        """Send the images in the form that the route asks for; where it cannot be had, nothing is sent."""
        to = destination(upstream)
        if isinstance(to, TakesFeatures) and to.encoding not in encoded:
            try:
                encoded[to.encoding] = await self._encoders.encode(images, to.encoding, budget_s=until - self.clock())
            except TerraceError as exc:
                # Its own trouble: nothing that the upstream node has answered.
                raise UpstreamUnavailable(f"nothing was sent, since the images could not be encoded: {exc}") from exc
        call = Call(
            outputs=(_OUTPUT,),
            request_id=task.request_id,
            trace=task.span.trace,
            budget_s=until - self.clock(),
            urgent=task.urgent,
        )
        match to:
            case MaySeePixels():
                return await self._pixels.infer(to, images, call)
            case ThroughRelay():
                return await self._pixels.relay(to, images, call)
            case TakesFeatures():
                found = encoded[to.encoding]
                return await self._features.infer(to, found.features, call, encode_s=found.encode_s)


def _reason(error: TerraceError) -> FallbackReason:
    match error:
        case UpstreamUnavailable():
            return "upstream_unavailable"
        case UpstreamTimeout():
            return "upstream_timeout"
        case _:
            return "upstream_error"
