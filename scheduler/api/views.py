"""What the job API shows: jobs and image results as JSON. Pure.

An image's result is a plain dict on the way out, since a job has up to 100,000 of them; `ImageResult` is the same as a
schema, for the API's documentation and the tests that hold the two together.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from models.hierarchy import Hierarchy
from scheduler.dispatch.work import Answer, AttemptReport
from scheduler.jobs.policy import JobPolicy
from scheduler.placement.escalation import final_answers, without
from scheduler.store.jobs import ImageFacts, JobRow
from tierkit.types import Privacy, Scheme, Tier
from tierkit.wire.events import CoarseEvent, ErrorEvent, FallbackEvent, FineEvent, RoutedEvent, StageAnswer, TaskEvent

__all__ = [
    "CSV_COLUMNS",
    "AttemptPage",
    "AttemptView",
    "Decision",
    "Explanation",
    "ImageResult",
    "JobPage",
    "JobView",
    "Renderer",
    "attempt_view",
    "csv_lines",
    "decision",
    "job_view",
    "to_line",
]

State = Literal["queued", "running", "completed", "failed", "cancelled"]


_MOST_SAID = 500
"""Characters of what a node says of a task that went wrong; they are told for each of its images."""


class CoarseAnswer(BaseModel):
    index: int
    label: str
    confidence: float
    node: str
    ms: float


class FineAnswer(BaseModel):
    index: int
    label: str
    confidence: float
    coarse_index: int = Field(description="The superclass that the fine probabilities add up to.")
    coarse_label: str
    node: str
    tier: Tier
    ms: float


class ImageResult(BaseModel):
    """One image. `coarse` and `fine` are null until they are there; `ms` counts from the dispatch of its task."""

    index: int = Field(description="Position in the upload, from 0.")
    name: str | None = Field(description="File name, where there is one.")
    coarse: CoarseAnswer | None
    fine: FineAnswer | None
    answered_by: Tier | None = Field(description="The tier whose answer stands; null while that is open.")
    not_escalated: bool = Field(description="Whether it stands because it was sure: the image was not sent further up.")
    fallback: str | None = Field(description="Why the coarse (or a lower tier's) answer stands for a finer one.")
    error: str | None = Field(description="Why there is no answer.")
    resized_from: tuple[int, int] | None = Field(description="Height and width as sent, where they were others.")
    true_fine: str | None
    true_coarse: str | None
    request_id: str | None = Field(description="Under which id this image stands in all services' logs.")


class SentShare(BaseModel):
    tasks: int = Field(description="Answers of upper nodes; one per task and tier.")
    upload_bytes: int = Field(description="Bodies of the requests to the upper nodes.")
    relay_bytes: int = Field(description="Bodies of the requests to edge nodes that encoded.")
    encode_ms: float = Field(description="Spent on encoding.")


class NodeShare(BaseModel):
    tier: Tier
    coarse_images: int
    fine_images: int


class JobView(BaseModel):
    """A job. Accuracies are null without labels; an image's latency counts from the dispatch of its task to the moment
    the answer reached the scheduler."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": "019aa3c0f1e27b3c55d0",
                    "name": "holiday",
                    "state": "running",
                    "reason": "",
                    "scheme": "mapping",
                    "images": 300,
                    "tasks": 6,
                    "answered_coarse": 200,
                    "answered_fine": 150,
                }
            ]
        }
    )

    id: str
    name: str | None
    state: State
    reason: str = Field(description='Why it waits, failed or misses answers; "" when all is well.')
    scheme: Scheme
    privacy: Privacy
    images: int
    tasks: int
    answered_coarse: int
    answered_fine: int
    fallback: int = Field(description="Images whose coarse (or lower tier's) answer stands, no node having answered.")
    sent_up: dict[Tier, int] = Field({}, description="Images sent to a tier, where they go up one by one (`escalate`).")
    final_tier: dict[Tier, int] = Field({}, description="Images by the tier whose answer stands.")
    failed_images: int = Field(description="Images without any answer; of a running job, those given up so far.")
    quarantined_images: int = Field(0, description="Images of tasks that no node gets any more: three died with them.")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    elapsed_s: float | None = Field(description="From the dispatch of the first task until now or the end.")
    images_per_s: float | None = Field(description="Images answered (coarse or better) per second of elapsed_s.")
    coarse_accuracy: float | None
    fine_accuracy: float | None
    coarse_from_fine_accuracy: float | None
    final_coarse_accuracy: float | None = Field(None, description="Of the superclasses of the answers that stand.")
    coarse_p50_ms: float | None
    coarse_p99_ms: float | None
    fine_p50_ms: float | None
    fine_p99_ms: float | None
    sent: dict[str, SentShare] = Field(
        {},
        description="What went to upper nodes for the answers that came, by its form: pixels, conv1 or bottleneck. "
        "What left in attempts that failed is not counted.",
    )
    by_node: dict[str, NodeShare]
    mapping: dict[str, str] = Field(description="Upper node by end device, as last used.")
    resized_images: int
    policy: dict[str, Any]


class JobPage(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobView]
    next_cursor: str | None = Field(description="For the next page; null on the last one.")


class AttemptView(BaseModel):
    """One attempt of a task on an end device."""

    task: int
    attempt: int = Field(description="From 1, in the order in which the attempts of this task began.")
    first_image: int
    images: int
    node: str
    incarnation: str
    tier: Tier
    upstream: str | None = Field(description="The upper node that the device was to ask first.")
    stage: Literal["all", "fine"] = Field(
        description="fine: the coarse answer was known, only the fine one was asked for."
    )
    hedge: bool = Field(description="Made beside another attempt that took too long.")
    outcome: str = Field(
        description="running, ok, refused, unreachable, lost, error, fallback, rerouted, cancelled or late (jobs.md)."
    )
    reason: str
    started_at: datetime
    ended_at: datetime | None
    ms: float | None = Field(description="From its start to its end.")


class Decision(BaseModel):
    """Why a task was sent where it was."""

    task: int
    attempt: int
    node: str
    upstream: str | None = Field(description="The upper node that the device was to ask first.")
    why: str
    outcome: str = Field(description="What came of it, as in `/attempts`.")
    started_at: datetime


class Explanation(BaseModel):
    """The decisions of a job, by task and attempt."""

    job: str
    scheme: Scheme
    state: State
    now: str = Field(description='Why nothing of it is sent at the moment; "" while tasks go, and at the end.')
    decisions: list[Decision]
    next_cursor: str | None = Field(description="For the next page; null on the last one.")


class AttemptPage(BaseModel):
    """Attempts by task and number."""

    attempts: list[AttemptView]
    next_cursor: str | None = Field(description="For the next page; null on the last one.")


def decision(report: AttemptReport) -> Decision:
    """The reason of an attempt as shown."""
    return Decision(
        task=report.task,
        attempt=report.number,
        node=report.node_id,
        upstream=report.upstream,
        why=report.why,
        outcome=report.outcome,
        started_at=_time(report.started_at),
    )


def attempt_view(report: AttemptReport, *, batch_size: int, images: int) -> AttemptView:
    """An attempt as shown, of a job with so many images, `batch_size` per task."""
    first, ended = report.task * batch_size, report.ended_at
    return AttemptView(
        task=report.task,
        attempt=report.number,
        first_image=first,
        images=min(batch_size, images - first),
        node=report.node_id,
        incarnation=report.incarnation,
        tier=report.tier,
        upstream=report.upstream,
        stage=report.stage,  # type: ignore[arg-type]  # there are no others
        hedge=report.hedge,
        outcome=report.outcome,
        reason=report.reason,
        started_at=_time(report.started_at),
        ended_at=None if ended is None else _time(ended),
        ms=None if ended is None else round(1000 * (ended - report.started_at), 3),
    )


def job_view(row: JobRow, *, state: str, reason: str, figures: Mapping[str, Any], now: float) -> JobView:
    """A job as shown.

    Args:
        state, reason: of the moment; for a job under way they are ahead of the database.
        figures: `Progress.summary()` with the mapping added.
        now: wall clock.
    """
    end = row.finished_at if row.finished_at is not None else now
    elapsed_s = None if row.started_at is None else max(0.0, end - row.started_at)
    answered = figures["answered_coarse"]
    return JobView(
        id=row.id,
        name=row.name,
        state=state,  # type: ignore[arg-type]  # the database holds no others
        reason=reason,
        scheme=row.policy.scheme,
        privacy=row.policy.privacy,
        images=row.images,
        tasks=row.tasks,
        created_at=_time(row.created_at),
        started_at=None if row.started_at is None else _time(row.started_at),
        finished_at=None if row.finished_at is None else _time(row.finished_at),
        elapsed_s=None if elapsed_s is None else round(elapsed_s, 3),
        images_per_s=round(answered / elapsed_s, 2) if elapsed_s else None,
        resized_images=row.resized_images,
        policy=row.policy.model_dump(mode="json", exclude_none=True),
        **figures,
    )


class Renderer:
    """Image results of one job.

    Args:
        hierarchy: names of the classes.
        facts: names, labels and sizes of the job's images.
        policy: with which it was accepted.
    """

    def __init__(self, hierarchy: Hierarchy, facts: ImageFacts, policy: JobPolicy) -> None:
        self._expects_fine = policy.scheme is not Scheme.END
        self._top = policy.gates[-1].upper if policy.gates else None
        """The tier above which there is nothing, where images go up one by one."""
        self._fine = hierarchy.fine
        self._coarse = hierarchy.coarse
        self._parent = hierarchy.parent
        self._facts = facts

    def task(
        self,
        first_image: int,
        images: int,
        coarse: Answer | None,
        final: Answer | None,
        *,
        unanswered: str | None = None,
    ) -> list[dict[str, Any]]:
        """The results of a task's images.

        Args:
            coarse, final: what there is.
            unanswered: shown where an answer is missing that will not come: as the error without any answer, as the
                reason of the fallback where the coarse one is there and a fine one was to follow.
        """
        known = final or coarse
        coarse_event = coarse.event if coarse is not None and isinstance(coarse.event, CoarseEvent) else None
        fallback = error = None
        if final is not None and isinstance(final.event, FallbackEvent):
            fallback = f"{final.event.reason}: {final.event.detail[:_MOST_SAID]}"
        elif final is not None and isinstance(final.event, ErrorEvent):
            error = final.event.error[:_MOST_SAID]
        elif known is None:
            error = unanswered
        elif final is None and self._expects_fine:
            fallback = unanswered
        over = final is not None or unanswered is not None or not self._expects_fine
        finer = _finer_answers(final.event, images) if final is not None else {}
        losses = without(final.event) if final is not None and isinstance(final.event, RoutedEvent) else None
        rows = []
        for offset in range(images):
            index = first_image + offset
            row: dict[str, Any] = {
                "index": index,
                "name": None if self._facts.names is None else self._facts.names[index],
                "coarse": None,
                "fine": None,
                "answered_by": None,
                "not_escalated": False,
                "fallback": fallback,
                "error": error,
                "resized_from": self._facts.resized.get(index),
                "true_fine": None,
                "true_coarse": None,
                "request_id": None if known is None else known.request_id,
            }
            if self._facts.labels is not None and (label := int(self._facts.labels[index])) >= 0:
                row["true_fine"] = self._fine[label]
                row["true_coarse"] = self._coarse[self._parent[label]]
            if coarse_event is not None and coarse is not None:
                row["coarse"] = {
                    "index": coarse_event.labels[offset],
                    "label": self._coarse[coarse_event.labels[offset]],
                    "confidence": coarse_event.confidences[offset],
                    "node": coarse_event.node_id,
                    "ms": round(coarse.ms, 3),
                }
            if offset in finer and final is not None:
                row["fine"] = {**self._fine_answer(*finer[offset]), "ms": round(final.ms, 3)}
            if over and error is None and (row["coarse"] or row["fine"]):
                row["answered_by"] = row["fine"]["tier"] if row["fine"] else Tier.END
            if losses is not None:
                lost = losses.get(offset)
                row["fallback"] = None if lost is None else f"{lost.reason}: {lost.detail}"
                row["not_escalated"] = lost is None and row["answered_by"] != self._top
            rows.append(row)
        return rows

    def _fine_answer(self, answer: FineEvent | StageAnswer, place: int) -> dict[str, Any]:
        return {
            "index": answer.labels[place],
            "label": self._fine[answer.labels[place]],
            "confidence": answer.confidences[place],
            "coarse_index": answer.coarse_labels[place],
            "coarse_label": self._coarse[answer.coarse_labels[place]],
            "node": answer.node_id,
            "tier": answer.tier,
        }


def _finer_answers(event: TaskEvent, images: int) -> dict[int, tuple[FineEvent | StageAnswer, int]]:
    """By position in the task: the upper node's answer that stands, and the image's place in it."""
    match event:
        case FineEvent():
            return {place: (event, place) for place in range(images)}
        case RoutedEvent():
            return {
                index: (answer, place)
                for answer, at, places in final_answers(event)
                for index, place in zip(at.tolist(), places.tolist(), strict=True)
            }
    return {}


CSV_COLUMNS = (
    "index",
    "name",
    "coarse_label",
    "coarse_confidence",
    "coarse_node",
    "coarse_ms",
    "fine_label",
    "fine_confidence",
    "fine_node",
    "fine_tier",
    "fine_ms",
    "fine_coarse_label",
    "answered_by",
    "not_escalated",
    "fallback",
    "error",
    "resized_from",
    "true_fine",
    "true_coarse",
    "request_id",
)


def csv_lines(results: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Rows of the CSV form, without the header line."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for result in results:
        coarse, fine = result["coarse"] or {}, result["fine"] or {}
        size = result["resized_from"]
        writer.writerow(
            [
                result["index"],
                result["name"],
                *(coarse.get(key) for key in ("label", "confidence", "node", "ms")),
                *(fine.get(key) for key in ("label", "confidence", "node", "tier", "ms", "coarse_label")),
                result["answered_by"],
                "true" if result["not_escalated"] else "false",
                result["fallback"],
                result["error"],
                None if size is None else f"{size[0]}x{size[1]}",
                result["true_fine"],
                result["true_coarse"],
                result["request_id"],
            ]
        )
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def to_line(value: Any) -> str:
    """Compact JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
