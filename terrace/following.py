"""Progress bars of a job under way: coarse and fine, as the answers arrive."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tierkit.client import Client, CoarseResults, FailedResults, FallbackResults, FineResults, Job, StateChange
from tierkit.types import Scheme

__all__ = ["follow"]


def follow(client: Client, job: Job, console: Console, *, budget_s: float | None = None) -> Job:
    """Draw the progress of a job until it is done."""
    with Progress(
        TextColumn("{task.description:<7}"),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        console=console,
        transient=True,
        # Into a file it would write an empty line, and nothing else.
        disable=not console.is_terminal,
    ) as progress:
        coarse = progress.add_task("coarse", total=job.images, note="")
        fine = progress.add_task("fine", total=job.images, note="", visible=job.scheme is not Scheme.END)
        standing = 0
        for event in client.events(job, budget_s=budget_s):
            match event:
                case CoarseResults(results=results):
                    progress.advance(coarse, len(results))
                case FineResults(results=results):
                    standing += sum(result.fallback is not None for result in results)
                    progress.update(fine, advance=len(results), note=_note(standing))
                case FallbackResults(results=results) | FailedResults(results=results):
                    standing += len(results)
                    progress.update(fine, advance=len(results), note=_note(standing))
                case StateChange(job=job):
                    pass
    return job


def _note(standing: int) -> str:
    return f"{standing} without a finer answer" if standing else ""
