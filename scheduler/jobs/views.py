"""Jobs, attempts and image results as users see them. Pure.

An image's result is a plain dict with the fields of `tierkit.wire.api.ImageResult`: a job has up to 100,000 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from models.hierarchy import Hierarchy
from scheduler.core.escalation import final_answers, without
from scheduler.core.job import Answer, AttemptReport, ImageFacts, JobRow
from scheduler.core.policy import JobPolicy
from scheduler.jobs.progress import sent_of
from tierkit.types import JobState, Scheme, Tier
from tierkit.wire.api import Attempt, Decision, Job
from tierkit.wire.events import (
    CoarseEvent,
    ErrorEvent,
    FallbackEvent,
    FineEvent,
    RoutedEvent,
    StageAnswer,
    TaskEvent,
    UpstreamAnswer,
)
from tierkit.wire.trace import Trace

__all__ = ["Renderer", "Rows", "attempt", "decision", "grouped", "job"]

_MOST_SAID = 500
"""Most characters of a node's error message, which is repeated for each image of the task."""

Rows = list[dict[str, Any]]

_NO_ANSWER: dict[str, Any] = {
    "label": None,
    "confidence": None,
    "coarse": None,
    "fine": None,
    "answered_by": None,
    "not_escalated": False,
    "fallback": None,
    "request_id": None,
}


def decision(report: AttemptReport) -> Decision:
    """The reason of an attempt."""
    return Decision.model_validate(_fields(report))


def attempt(report: AttemptReport, job: JobRow) -> Attempt:
    """An attempt of a task of a job."""
    first_image, images = job.images_of(report.task)
    ms = None if report.ended_at is None else round(1000 * (report.ended_at - report.started_at), 3)
    return Attempt.model_validate(_fields(report) | {"first_image": first_image, "images": images, "ms": ms})


def _fields(report: AttemptReport) -> dict[str, Any]:
    return {**msgspec.to_builtins(report), "attempt": report.number, "node": report.node_id}


def job(row: JobRow, *, state: JobState, reason: str, figures: Mapping[str, Any], flat: bool, now: float) -> Job:
    """A job.

    Args:
        flat: True if all tiers answer the same classes.
        state, reason: of the moment; for a job under way they are ahead of the database.
        figures: `Progress.summary()` with the mapping added.
        now: elapsed time.
    """
    end = row.finished_elapsed if row.finished_elapsed is not None else now
    elapsed_s = None if row.started_elapsed is None else max(0.0, end - row.started_elapsed)
    return Job(
        id=row.id,
        name=row.policy.name,
        owner=row.owner,
        site=row.policy.site,
        release=row.policy.release,
        state=state,
        reason=reason,
        scheme=row.policy.scheme,
        privacy=row.policy.privacy,
        images=row.images,
        tasks=row.tasks,
        created_at=_time(row.created_at),
        started_at=None if row.started_at is None else _time(row.started_at),
        finished_at=None if row.finished_at is None else _time(row.finished_at),
        elapsed_s=None if elapsed_s is None else round(elapsed_s, 3),
        images_per_s=round(figures["answered_coarse"] / elapsed_s, 2) if elapsed_s else None,
        resized_images=row.resized_images,
        flat=flat,
        trace_id=None if row.trace is None else row.trace.trace_id,
        policy=row.policy.model_dump(mode="json", exclude_none=True),
        **figures,
    )


class Renderer:
    """Image results of one job.

    Args:
        hierarchy: names of the classes.
        facts: names, labels and sizes of the job's images.
        policy: with which it was accepted.
        trace: that it belongs to.
    """

    def __init__(self, hierarchy: Hierarchy, facts: ImageFacts, policy: JobPolicy, trace: Trace | None) -> None:
        self._trace_id = None if trace is None else trace.trace_id
        self._expects_fine = policy.scheme is not Scheme.END
        self._top = policy.gates[-1].upper if policy.gates else None
        """The tier above which there is nothing, where images go up one by one."""
        self._hierarchy = hierarchy
        self._facts = facts

    def task(
        self,
        first_image: int,
        images: int,
        coarse: Answer | None,
        final: Answer | None,
        *,
        unanswered: str | None = None,
    ) -> Rows:
        """The results of a task's images.

        Args:
            coarse, final: what there is.
            unanswered: reason shown for an answer that will not come. Without any answer it is the error; with a coarse
                answer it is the reason of the fallback.
        """
        known, event = final or coarse, final.event if final else None
        fallback = error = None
        if isinstance(event, FallbackEvent):
            fallback = f"{event.reason}: {event.detail[:_MOST_SAID]}"
        elif isinstance(event, ErrorEvent):
            error = event.error[:_MOST_SAID]
        elif known is None:
            error = unanswered
        elif final is None and self._expects_fine:
            fallback = unanswered
        over = final is not None or unanswered is not None or not self._expects_fine
        damaged = self._damaged(coarse, first_image)
        finer = _finer_answers(event, images)
        losses = without(event) if isinstance(event, RoutedEvent) else None
        rows = []
        for offset in range(images):
            if (damage := damaged.get(first_image + offset)) is not None:
                about = self._about(first_image + offset)
                rows.append({**about, **_NO_ANSWER, "error": damage, "damaged": damage})
                continue
            first = self._coarse_answer(coarse, offset)
            fine = self._fine_answer(*finer[offset], ms=final.ms) if final is not None and offset in finer else None
            standing = fine or first
            answered_by = None
            if over and error is None and standing:
                answered_by = fine["tier"] if fine else Tier.END
            not_escalated = False
            if losses is not None:
                lost = losses.get(offset)
                fallback = None if lost is None else f"{lost.reason}: {lost.detail}"
                not_escalated = lost is None and answered_by != self._top
            rows.append(
                {
                    **self._about(first_image + offset),
                    "site": None if coarse is None else coarse.site,
                    "label": standing["label"] if standing else None,
                    "confidence": standing["confidence"] if standing else None,
                    "coarse": first,
                    "fine": fine,
                    "answered_by": answered_by,
                    "not_escalated": not_escalated,
                    "fallback": fallback,
                    "error": error,
                    "request_id": None if known is None else known.request_id,
                }
            )
        return rows

    def readable(self, coarse: Answer | None, images: int) -> NDArray[np.int64]:
        """Positions of the images that can be read, of a job with one task."""
        damaged = self._damaged(coarse, 0)
        return np.array([place for place in range(images) if place not in damaged], np.int64)

    def _damaged(self, coarse: Answer | None, first_image: int) -> Mapping[int, str]:
        """Damage of the images that cannot be read, by number."""
        event = coarse.event if coarse else None
        found = event.damaged if isinstance(event, CoarseEvent) else ()
        return {first_image + item.index: item.reason for item in found} | self._facts.damaged

    def _about(self, image: int) -> dict[str, Any]:
        """The result of an image without any answer."""
        facts, names = self._facts, self._hierarchy
        label = -1 if facts.labels is None else int(facts.labels[image])
        return {
            "index": image,
            "name": None if facts.names is None else facts.names[image],
            "site": None,
            "resized_from": facts.resized.get(image),
            "damaged": facts.mended.get(image),
            "true_fine": names.fine[label] if label >= 0 else None,
            "true_coarse": names.coarse[names.parent[label]] if label >= 0 else None,
            "trace_id": self._trace_id,
        }

    def _coarse_answer(self, answer: Answer | None, place: int) -> dict[str, Any] | None:
        if answer is None or not isinstance(answer.event, CoarseEvent):
            return None
        event = answer.event
        return {
            "index": event.labels[place],
            "label": self._hierarchy.coarse[event.labels[place]],
            "confidence": event.confidences[place],
            "node": event.node_id,
            "model": event.model,
            "sha256": event.sha256,
            "ms": round(answer.ms, 3),
        }

    def _fine_answer(self, answer: FineEvent | StageAnswer, place: int, *, ms: float) -> dict[str, Any]:
        return {
            "index": answer.labels[place],
            "label": self._hierarchy.fine[answer.labels[place]],
            "confidence": answer.confidences[place],
            "coarse_index": answer.coarse_labels[place],
            "coarse_label": self._hierarchy.coarse[answer.coarse_labels[place]],
            "coarse_confidence": answer.coarse_confidences[place],
            "node": answer.node_id,
            "tier": answer.tier,
            "model": answer.model,
            "sha256": answer.sha256,
            "ms": round(ms, 3),
            "sent": _sent_alone(answer),
        }


def grouped(answer: Answer, rows: Rows) -> dict[str, Any]:
    """The event of an answer, with the results of its images."""
    sent = [msgspec.to_builtins(found) for found in sent_of(answer.event)]
    return {"task": answer.task, "first_index": answer.first_image, "sent": sent, "results": rows}


def _finer_answers(event: TaskEvent | None, images: int) -> dict[int, tuple[FineEvent | StageAnswer, int]]:
    """Return, by position in the task, the upstream node's final answer and the image's place in it."""
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


def _sent_alone(answer: UpstreamAnswer) -> dict[str, Any] | None:
    """Cost of sending the image of an answer up; None if other images went with it, because they share its cost."""
    if answer.sent is None or len(answer.labels) > 1:
        return None
    return msgspec.structs.asdict(answer.sent)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
