"""One attempt of a task on one end device over HTTP: sends the body, checks each line of the answer as it arrives.

No answer is trusted. An `UpstreamError` is raised for an answer to another task, with a wrong number of labels, with an
unknown label, or from a node that was not asked. So is one for a stream that breaks off or does not end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from encryption.sending import PIXELS, kind_of
from scheduler.core.escalation import check_routed
from tierkit.errors import (
    DeadlineExceeded,
    InvalidAnswer,
    Overloaded,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tierkit.http.client import ask, authorization, calling, read_at_most
from tierkit.tensors import Array
from tierkit.wire.events import (
    CoarseEvent,
    ErrorEvent,
    FallbackEvent,
    FineEvent,
    RoutedEvent,
    Sent,
    StageLoss,
    TaskEvent,
    UpstreamAnswer,
    read_event,
)
from tierkit.wire.messages import (
    BUDGET_HEADER,
    ESCALATION,
    ESCALATION_HEADER,
    INTERACTIVE,
    NETWORK_HEADER,
    PRIORITY_HEADER,
    REQUEST_ID_HEADER,
    STAGE_HEADER,
    UPSTREAM_HEADER,
    UPSTREAMS,
    Stage,
    Upstream,
)
from tierkit.wire.oip import InferRequest, Tensor, encode_request
from tierkit.wire.trace import Trace

__all__ = ["HttpTransport", "TaskRequest", "Transport", "may_have_held"]

_MAX_LINE_BYTES = 256 * 1024
_MAX_REFUSAL_BYTES = 1000
_MOST_SAID = 500
"""Most characters of a device's text in a reason, which is repeated for each image."""
_NOT_ITS_OWN = ("no_upstream", "quarantined")
"""Reasons of a fallback that only the scheduler gives."""
_NDJSON = "application/x-ndjson"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """A task for one end device."""

    task_id: str
    request_id: str
    trace: Trace | None
    node_id: str
    url: str
    model: str
    """Model that the device has registered for its coarse answers."""
    sha256: str
    """Digest of that model's weights."""
    reading: str = ""
    """`ModelOffer.reading` of that version; "" if the digest identifies it."""
    images: Array
    """UINT8 pixels `[n, h, w, 3]`, or files `[n]`."""
    upstreams: tuple[Upstream, ...]
    coarse_classes: int
    fine_classes: int
    stages: tuple[Stage, ...] = ()
    """Tiers to which the unsure images go up; none if all images go up together."""
    coarse_known: bool = False
    """True if only the fine answer is wanted; this needs `upstreams`."""
    damaged: frozenset[int] = frozenset()
    """Positions of the images that cannot be read, where the coarse answer is known."""
    interactive: bool = False
    """True if a user waits, so that the task overtakes batch work in the nodes' queues."""
    key: str = field(default="", repr=False)
    """Token that the device accepts."""


class Transport(Protocol):
    """The way to the end devices."""

    def send(self, request: TaskRequest, *, budget_s: float) -> AsyncGenerator[tuple[TaskEvent, str], None]:
        """Send a task and yield the lines of the answer, read and as they came: coarse, then fine or fallback where
        upstreams were named. Ends with the answer's end, which frees the connection for the next task.

        Total time is for the caller to bound (`asyncio.timeout`); `budget_s` is what the device is told.

        Raises:
            UpstreamUnavailable: the connection was refused or broke.
            Overloaded: the device takes no work now; `retry_after_s` is what it asks for.
            DeadlineExceeded: it says that `budget_s` is too short for it.
            InvalidAnswer: no proper answer, so what has come of it is void.
            UpstreamError: an error.
        """

    async def acknowledged(self, node_id: str, url: str, *, budget_s: float) -> None:
        """Ask a device whether it is there, before it gets a task.

        Raises:
            UpstreamUnavailable: the connection was refused or broke, or there was no answer of any kind within
                `budget_s`.
            UpstreamError: it has no usable address.
        """


@dataclass(frozen=True, slots=True)
class HttpTransport:
    """HTTP on real sockets."""

    http: aiohttp.ClientSession

    async def send(self, request: TaskRequest, *, budget_s: float) -> AsyncGenerator[tuple[TaskEvent, str], None]:
        # Views of the mapped input file go down to the transport as they are.
        chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", request.images),)))
        headers = {
            **headers,
            REQUEST_ID_HEADER: request.request_id,
            **({} if request.trace is None else request.trace.headers),
            BUDGET_HEADER: str(max(1, int(budget_s * 1000))),
            NETWORK_HEADER: f"{request.sha256}.{request.reading}" if request.reading else request.sha256,
            **authorization(request.key),
        }
        if request.upstreams:
            headers[UPSTREAM_HEADER] = UPSTREAMS.dump_json(request.upstreams).decode()
            if request.stages:
                headers[ESCALATION_HEADER] = ESCALATION.dump_json(request.stages).decode()
        if request.interactive:
            headers[PRIORITY_HEADER] = INTERACTIVE
        if request.coarse_known:
            headers[STAGE_HEADER] = "fine"
        url = f"{request.url}/v1/tasks/{request.task_id}"
        async with calling(request.node_id, budget_s=None), ask(self.http, "POST", url, chunks, headers) as answer:
            if answer.status != 200:
                raise await _refusal(answer, request)
            if answer.content_type != _NDJSON:
                raise UpstreamError(f"{request.node_id} answered with something else than {_NDJSON}")
            expected, lines = _Expected(request), _Lines(request.node_id)
            async for piece in answer.content.iter_any():
                for line in lines.of(piece):
                    if expected.complete:
                        return  # it goes on after the end; leaving closes the connection
                    yield expected.check(line), line
            for line in lines.rest() if not expected.complete else ():
                yield expected.check(line), line
            if not expected.complete:
                raise InvalidAnswer(f"{request.node_id} broke off its answer after {expected.stage}")

    async def acknowledged(self, node_id: str, url: str, *, budget_s: float) -> None:
        try:
            # The head is enough: the length of the rest is unknown.
            async with calling(node_id, budget_s=budget_s), ask(self.http, "GET", f"{url}/livez"):
                pass
        except UpstreamTimeout as exc:
            raise UpstreamUnavailable(f"{node_id} did not acknowledge within {budget_s:g} s") from exc


def may_have_held(error: Exception | None) -> bool:
    """True if the connection broke while the device may have had the task; a refused connection never delivered it."""
    refused = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
    return isinstance(error, UpstreamUnavailable) and not isinstance(error.__cause__, refused)


async def _refusal(answer: aiohttp.ClientResponse, request: TaskRequest) -> Exception:
    said = (await read_at_most(answer, _MAX_REFUSAL_BYTES)).decode("utf-8", "replace")
    message = f"{request.node_id} answered {answer.status}: {said}"
    if answer.status == 503:
        try:
            wait_s = float(answer.headers.get("Retry-After", "1"))
        except ValueError:
            wait_s = 1.0
        return Overloaded(message, retry_after_s=min(30.0, max(0.1, wait_s)))
    if answer.status == 504:
        return DeadlineExceeded(message)
    return UpstreamError(message, status_code=answer.status)


class _Lines:
    """Cuts what arrives of an answer into lines, without a copy of the line that has begun for each piece of it."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._begun: list[bytes] = []
        self._idle_bytes = 0
        """Bytes since the end of the last line that is not blank."""

    def of(self, piece: bytes) -> list[str]:
        """The lines that end in this piece, without blank ones."""
        *ended, begun = piece.split(b"\n")
        if ended:
            ended[0] = b"".join([*self._begun, ended[0]])
            self._begun.clear()
        self._begun.append(begun)
        lines = [self._text(line) for line in ended if line.strip()]
        self._idle_bytes = len(begun) if lines else self._idle_bytes + len(piece)
        if self._idle_bytes > _MAX_LINE_BYTES:
            raise InvalidAnswer(f"{self._node_id} sent more than {_MAX_LINE_BYTES} bytes without a line")
        return lines

    def rest(self) -> list[str]:
        """The last line, where nothing ends it but the end of the answer."""
        line = b"".join(self._begun)
        return [self._text(line)] if line.strip() else []

    def _text(self, line: bytes) -> str:
        try:
            return line.decode()
        except UnicodeDecodeError as exc:
            raise InvalidAnswer(f"{self._node_id} sent a line that is not UTF-8") from exc


class _Expected:
    """The lines that may come next in the answer to a request."""

    def __init__(self, request: TaskRequest) -> None:
        self._request = request
        self._asked = {upstream.node_id: upstream for upstream in request.upstreams}
        self._has_coarse = request.coarse_known
        self._unsure: tuple[int, ...] | None = None
        self._damaged = request.damaged
        self.complete = False

    @property
    def stage(self) -> str:
        return "the coarse answer" if self._has_coarse else "nothing"

    def check(self, line: str) -> TaskEvent:
        request = self._request
        try:
            event = read_event(line)
        except ValueError as exc:
            raise self._wrong(f"an invalid line ({exc})") from exc
        if event.task_id != request.task_id:
            raise self._wrong(f"an answer for another task, {event.task_id!r}")
        match event:
            case ErrorEvent():
                raise UpstreamError(f"{request.node_id}: {event.error[:_MOST_SAID]}")
            case CoarseEvent():
                if self._has_coarse:
                    raise self._wrong("two coarse answers")
                if event.node_id != request.node_id:
                    raise self._wrong(f"a coarse answer in the name of {event.node_id!r}")
                if event.model != request.model:
                    raise self._wrong(
                        f"a coarse answer of the model {event.model!r}, and has registered {request.model!r}"
                    )
                if event.sha256 != request.sha256:
                    raise self._wrong(
                        f"a coarse answer of {event.model!r} with sha256 {event.sha256!r}, and has registered "
                        f"{request.sha256!r}"
                    )
                self._check_labels(event.labels, event.confidences, request.coarse_classes, len(request.images))
                self._check_unsure(event.unsure)
                self._check_damaged(event)
                self._unsure = event.unsure
                self._has_coarse = True
                self.complete = not request.upstreams
            case FineEvent() if not request.stages:
                self._need_coarse()
                self._check_fine(event, len(request.images))
                self.complete = True
            case FallbackEvent() if not request.stages:
                self._need_coarse()
                if event.reason in _NOT_ITS_OWN or (
                    event.reason == "damaged" and len(self._damaged) < len(request.images)
                ):
                    raise self._wrong(f"the reason {event.reason!r}, which no device can know")
                self._check_tried(event)
                self.complete = True
            case RoutedEvent() if request.stages:
                self._need_coarse()
                fault = check_routed(event, request.stages, len(request.images), self._unsure, self._damaged)
                if fault is not None:
                    raise self._wrong(fault)
                for answer in event.answers:
                    self._check_fine(answer, len(answer.indices))
                for loss in event.losses:
                    self._check_loss(loss)
                self.complete = True
            case _:
                raise self._wrong(f"a line {event.event!r}, which was not asked for")
        return event

    def _check_unsure(self, unsure: tuple[int, ...] | None) -> None:
        request = self._request
        if unsure is None:
            return
        if not request.stages or request.stages[0].below is None:
            raise self._wrong("which images are unsure, where there is no threshold")
        if list(unsure) != sorted(set(unsure)) or (unsure and unsure[-1] >= len(request.images)):
            raise self._wrong(f"positions of unsure images outside {len(request.images)} images")

    def _check_damaged(self, event: CoarseEvent) -> None:
        indices = [damage.index for damage in event.damaged]
        if indices != sorted(set(indices)) or (indices and indices[-1] >= len(self._request.images)):
            raise self._wrong(f"positions of damaged images outside {len(self._request.images)} images")
        self._damaged = frozenset(indices)

    def _need_coarse(self) -> None:
        if not self._has_coarse:
            raise self._wrong("a final answer before the coarse one")

    def _check_fine(self, answer: UpstreamAnswer, images: int) -> None:
        request, upstream = self._request, self._asked.get(answer.node_id)
        if upstream is None or upstream.tier is not answer.tier:
            raise self._wrong(f"a fine answer from {answer.tier} node {answer.node_id!r}, which was not asked")
        if answer.model != upstream.model:
            raise self._wrong(f"a fine answer of the model {answer.model!r}, where {upstream.model!r} was asked for")
        if answer.sha256 != upstream.sha256:
            raise self._wrong(
                f"a fine answer of {answer.model!r} with sha256 {answer.sha256!r}, where {upstream.sha256!r} was "
                "asked for"
            )
        if answer.sent is not None:
            self._check_sent(answer.sent, upstream)
        self._check_labels(answer.labels, answer.confidences, request.fine_classes, images)
        self._check_labels(answer.coarse_labels, answer.coarse_confidences, request.coarse_classes, images)

    def _check_sent(self, sent: Sent, upstream: Upstream) -> None:
        form, by = PIXELS, None
        if upstream.encoding is not None:
            form = kind_of(upstream.encoding)
            by = self._request.node_id if upstream.relay is None else upstream.relay.node_id
        if sent.form != form:
            raise self._wrong(f"what it had sent on as {sent.form!r}, where {form!r} was asked for")
        if sent.encoded_by != by:
            raise self._wrong(
                f"images encoded by {sent.encoded_by or 'no node'}, where {by or 'no node'} was to encode them"
            )

    def _check_loss(self, loss: StageLoss) -> None:
        # That there is no node to ask shows in the route; that a task kills nodes, in no route.
        there = any(upstream.tier is loss.tier for upstream in self._request.upstreams)
        if loss.reason == "quarantined" or (loss.reason == "no_upstream" and there):
            raise self._wrong(f"the reason {loss.reason!r} for the {loss.tier}, which cannot be")
        self._check_tried(loss)

    def _check_tried(self, loss: FallbackEvent | StageLoss) -> None:
        for node_id in loss.tried:
            if node_id not in self._asked:
                raise self._wrong(f"that it had tried {node_id!r}, which was not asked")

    def _check_labels(self, labels: Sequence[int], confidences: Sequence[float], classes: int, images: int) -> None:
        if len(labels) != images or len(confidences) != images:
            raise self._wrong(f"{len(labels)} labels and {len(confidences)} confidences for {images} images")
        if max(labels) >= classes:
            raise self._wrong(f"the label {max(labels)} where there are {classes} classes")

    def _wrong(self, what: str) -> InvalidAnswer:
        return InvalidAnswer(f"{self._request.node_id} sent {what[:_MOST_SAID]}")
