"""A job as it is stored, facts about its images, and what its tasks give: answers and reports of attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from scheduler.core.policy import JobPolicy
from tierkit.tensors import Array
from tierkit.types import JobState, Tier
from tierkit.wire.events import TaskEvent
from tierkit.wire.trace import Trace, read_traceparent

__all__ = [
    "FAILED_OUTCOMES",
    "Answer",
    "AttemptReport",
    "ImageFacts",
    "JobImages",
    "JobRow",
]


class JobImages(Protocol):
    """The images of a job: `len` is their number, and a slice is a tensor of some of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, which: slice, /) -> Array: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """Facts about a job's images other than their pixels."""

    labels: NDArray[np.int32] | None = None
    """True fine class per image, -1 where unknown."""
    names: Sequence[str | None] | None = None
    resized: dict[int, tuple[int, int]] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    """Damage of images that could not be read at submission, by number."""
    mended: dict[int, str] = field(default_factory=dict)
    """Damage of images that are answered from the part that can be decoded, by number."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of files in archives that are not pictures, by reason; not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job as stored, without the parts that grow with the number of images."""

    id: str
    owner: str | None = None
    """Name of the token that submitted it; None without tokens."""
    state: JobState = JobState.QUEUED
    reason: str = "waiting for its first task to be sent"
    policy: JobPolicy
    images: int
    input_sha256: str
    hierarchy: str | None = None
    """Digest of the class hierarchy of its labels and results."""
    resized_images: int
    fingerprint: str
    traceparent: str | None = None
    """Traceparent of the trace that it belongs to."""
    created_at: float
    """Seconds since 1970; so are `started_at` and `finished_at`."""
    started_at: float | None = None
    finished_at: float | None = None
    deadline_elapsed: float
    """Seconds of elapsed time; so are `started_elapsed` and `finished_elapsed`."""
    started_elapsed: float | None = None
    finished_elapsed: float | None = None
    summary: dict[str, Any] | None = None

    @property
    def final(self) -> bool:
        return self.state.final

    @property
    def trace(self) -> Trace | None:
        """The trace that it belongs to; a scheduler that resumes it continues the trace."""
        return read_traceparent(self.traceparent or "")

    @property
    def tasks(self) -> int:
        return -(-self.images // self.policy.batch_size)

    def images_of(self, task: int) -> tuple[int, int]:
        """The first image of a task, and the number of its images."""
        first = task * self.policy.batch_size
        return first, min(self.policy.batch_size, self.images - first)


class Answer(Struct, frozen=True, kw_only=True):
    """The answer to one stage of one task."""

    job_id: str
    task: int
    first_image: int
    images: int
    stage: str
    """coarse | final"""
    kind: str
    """coarse | fine | fallback | failed"""
    ms: float
    """Milliseconds from the task's first dispatch to the arrival of this answer."""
    request_id: str
    event: TaskEvent
    line: str
    """`event` as it came over the wire."""
    site: str | None = None
    """Site of the device that gave a coarse answer; None: no site."""
    theta_cloud: float | None = None
    """The cloud's planned share when the task of a fine answer was sent in the scheme `mapping`. Not stored."""


FAILED_OUTCOMES = ("unreachable", "lost", "error", "fallback")
"""Outcomes that count as failed attempts of a task. See `AttemptReport.outcome`."""


class AttemptReport(Struct, frozen=True, kw_only=True):
    """One attempt of a task, at its end or as it is now."""

    job_id: str
    task: int
    number: int
    """Number of the attempt, from 1, in the order in which the task's attempts began."""
    node_id: str
    incarnation: str
    tier: Tier
    upstream: str | None
    """The upstream node that the device asks first."""
    stage: str
    """all, or fine if the coarse answer was known already"""
    hedge: bool
    """True for a hedge: a second attempt while a straggler runs."""
    outcome: str
    """`running`, or an outcome that `scheduler.core.step` lists."""
    reason: str
    """Reason of the outcome; "" for ok."""
    why: str
    """Reason of the choice of this device and these upstream nodes."""
    started_at: float
    """Seconds since 1970."""
    ended_at: float | None
