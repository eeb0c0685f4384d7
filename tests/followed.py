"""A job as its user sees it: which answers came, and how often each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tierkit.client import AsyncClient, CoarseResults, FallbackResults, FineResults, Job, StateChange

__all__ = ["Followed"]


@dataclass(kw_only=True)
class Followed:
    """A job, and what its user has been told of its images so far."""

    job: Job
    """Its latest state."""
    coarse: Counter[int] = field(default_factory=Counter)
    fine: Counter[int] = field(default_factory=Counter)
    fallback: Counter[int] = field(default_factory=Counter)

    async def follow(self, client: AsyncClient, *, budget_s: float) -> None:
        """Until the job is done."""
        async for event in client.events(self.job, budget_s=budget_s):
            match event:
                case CoarseResults(results=results):
                    self.coarse.update(result.index for result in results)
                case FineResults(results=results):
                    self.fine.update(result.index for result in results)
                case FallbackResults(results=results):
                    self.fallback.update(result.index for result in results)
                case StateChange(job=job):
                    self.job = job
