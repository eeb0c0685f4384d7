"""Progress bars of a job under way: coarse and fine, as the answers arrive."""

from __future__ import annotations

from terrace.console import progress_bars
from tierkit.client import Client, CoarseResults, FailedResults, FallbackResults, FineResults, Job, StateChange
from tierkit.types import Scheme

__all__ = ["follow"]


def follow(client: Client, job: Job, *, budget_s: float | None = None) -> Job:
    """Draw the progress of a job until it is done."""
    with progress_bars("image") as progress:
        coarse = progress.add_task("coarse", total=job.images)
        fine = progress.add_task("fine", total=job.images, visible=job.scheme is not Scheme.END)
        standing = 0
        for event in client.events(job, budget_s=budget_s):
            match event:
                case CoarseResults(results=results):
                    progress.advance(coarse, len(results))
                case FineResults(results=results):
                    standing += sum(result.fallback is not None for result in results)
                    progress.advance(fine, len(results))
                case FallbackResults(results=results) | FailedResults(results=results):
                    standing += len(results)
                    progress.advance(fine, len(results))
                case StateChange(job=job):
                    pass
            if standing:
                progress.update(fine, description=f"fine, {standing} without a finer answer")
    return job
