"""Jobs, attempts, devices and image results as the API shows them. Pure.

An image's result is a plain dict with the fields of `tierkit.wire.api.ImageResult`: a job has up to 100,000 of them.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from models.hierarchy import Hierarchy
from scheduler.devices.list import DeviceView
from scheduler.dispatch.work import Answer, AttemptReport
from scheduler.jobs.policy import JobPolicy
from scheduler.placement.escalation import final_answers, without
from scheduler.store.jobs import ImageFacts, JobRow
from tierkit.types import JobState, Scheme, Tier
from tierkit.wire.api import Attempt, Decision, Device, Job
from tierkit.wire.events import CoarseEvent, ErrorEvent, FallbackEvent, FineEvent, RoutedEvent, StageAnswer, TaskEvent

__all__ = ["Renderer", "Rows", "as_csv", "as_lines", "attempt", "decision", "device", "job", "to_line"]

_MOST_SAID = 500
"""Characters of what a node says of a task that went wrong; they are told for each of its images."""


def decision(report: AttemptReport) -> Decision:
    """The reason of an attempt."""
    return Decision(
        task=report.task,
        attempt=report.number,
        node=report.node_id,
        upstream=report.upstream,
        why=report.why,
        outcome=report.outcome,
        started_at=_time(report.started_at),
    )


def attempt(report: AttemptReport, *, batch_size: int, images: int) -> Attempt:
    """An attempt of a job with this many images, `batch_size` per task."""
    first, ended = report.task * batch_size, report.ended_at
    return Attempt(
        task=report.task,
        attempt=report.number,
        first_image=first,
        images=min(batch_size, images - first),
        node=report.node_id,
        incarnation=report.incarnation,
        tier=report.tier,
        upstream=report.upstream,
        stage=report.stage,
        hedge=report.hedge,
        outcome=report.outcome,
        reason=report.reason,
        started_at=_time(report.started_at),
        ended_at=None if ended is None else _time(ended),
        ms=None if ended is None else round(1000 * (ended - report.started_at), 3),
    )


def job(row: JobRow, *, state: JobState, reason: str, figures: Mapping[str, Any], now: float) -> Job:
    """A job.

    Args:
        state, reason: of the moment; for a job under way they are ahead of the database.
        figures: `Progress.summary()` with the mapping added.
        now: wall clock.
    """
    end = row.finished_at if row.finished_at is not None else now
    elapsed_s = None if row.started_at is None else max(0.0, end - row.started_at)
    return Job(
        id=row.id,
        name=row.name,
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
        policy=row.policy.model_dump(mode="json", exclude_none=True),
        **figures,
    )


def device(view: DeviceView, *, trusted: bool, outstanding: int, now: float) -> Device:
    """A node of the device list.

    Args:
        outstanding: tasks that it has been given.
        now: monotonic.
    """
    node, registration = view.device, view.device.registration
    load = node.load
    return Device(
        node_id=node.node_id,
        tier=node.tier,
        url=registration.url,
        incarnation=registration.incarnation,
        version=registration.version,
        health=view.health,
        reason=view.reason,
        trusted=trusted,
        silent_s=round(view.silent_s, 3),
        reached=node.reached,
        phi=round(view.phi, 1),
        joined_s=round(now - node.joined_at, 3),
        outstanding=outstanding,
        in_flight=load.in_flight if load else 0,
        queued_images=load.queued_images if load else 0,
        running_images=load.running_images if load else 0,
        images_done=load.images_done if load else 0,
        images_per_minute=registration.images_per_minute,
        models=tuple(offer.model_dump() for offer in registration.models),
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
    """By position in the task: the upstream node's answer that stands, and the image's place in it."""
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


_CSV_COLUMNS = (
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


Rows = list[dict[str, Any]]


async def as_csv(batches: AsyncGenerator[Rows, None]) -> AsyncGenerator[str, None]:
    """Image results as CSV, batch by batch."""
    yield ",".join(_CSV_COLUMNS) + "\r\n"
    async with aclosing(batches):
        async for rows in batches:
            yield csv_lines(rows)


async def as_lines(batches: AsyncGenerator[Rows, None]) -> AsyncGenerator[str, None]:
    """Objects as NDJSON, batch by batch."""
    async with aclosing(batches):
        async for rows in batches:
            yield "".join(to_line(row) + "\n" for row in rows)


def csv_lines(results: Iterable[Mapping[str, Any]]) -> str:
    """Rows of the CSV form, without the header line."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    for result in results:
        values = dict(result)
        for stage in ("coarse", "fine"):
            values |= {f"{stage}_{key}": value for key, value in (result[stage] or {}).items()}
        values["not_escalated"] = "true" if result["not_escalated"] else "false"
        if size := result["resized_from"]:
            values["resized_from"] = f"{size[0]}x{size[1]}"
        writer.writerow([values.get(column) for column in _CSV_COLUMNS])
    return buffer.getvalue()


def to_line(value: Any) -> str:
    """Compact JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
