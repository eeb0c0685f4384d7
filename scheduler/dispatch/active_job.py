"""A job under way as its I/O needs it: pixels, the receiver of its answers, and its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Protocol

from scheduler.core.job import Answer, AttemptReport, JobImages
from scheduler.core.work import JobFacts, TaskFacts
from tierkit.spans import Span
from tierkit.wire.trace import Trace, new_trace

__all__ = ["ActiveJob", "Recipient"]


class Recipient(Protocol):
    """A receiver of a job's answers: the database for a job, the waiting client for an interactive request."""

    def started(self) -> None:
        """The first task is on its way."""

    def answer(self, answer: Answer) -> None:
        """Called once per stage of a task, or once more after `withdrawn`. Never waits: `Dispatcher` sends no new tasks
        while too much is unwritten."""

    def withdrawn(self, answer: Answer) -> None:
        """A coarse answer that was given does not count: what it was a part of has turned out to be invalid. Another
        one may follow. Never waits."""

    def attempted(self, report: AttemptReport) -> None:
        """An attempt has ended. Never waits."""

    async def ended(self, state: str | None, reason: str) -> None:
        """Nothing more will come. `state` None: as the answers say. Returns when that is durable."""


@dataclass(eq=False)
class ActiveJob:
    """A job that is not final.

    Args:
        tasks: those without a final answer, in order.
        images: of the whole job.
        trace: of the job; default: a new one.
        created_at: seconds since 1970; default: now.
    """

    facts: JobFacts
    _: KW_ONLY
    tasks: Sequence[TaskFacts]
    images: JobImages
    recipient: Recipient
    answered: bool = False
    """True if a task has an answer already."""
    trace: InitVar[Trace | None] = None
    created_at: InitVar[float | None] = None
    span: Span = field(init=False)
    reason: str = ""
    """Reason why nothing of it can be sent now; "" when all goes well."""

    def __post_init__(self, trace: Trace | None, created_at: float | None) -> None:
        # Its id is the same after a restart, and the span is written once, at the end.
        began_ns = 0 if created_at is None else round(created_at * 1e9)
        self.span = Span("job", trace or new_trace(), span_id=self.facts.job_id[-16:], began_ns=began_ns)

    @property
    def trace_id(self) -> str:
        """Id of the trace that it belongs to."""
        return "" if self.span.trace is None else self.span.trace.trace_id
