"""Progress bars of a job under way: coarse and fine, as the answers arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from terrace.console import image_count, progress_bars, screen
from tierkit.client import (
    Client,
    CoarseResults,
    FailedResults,
    FallbackResults,
    FineResults,
    ImageResult,
    Job,
    StateChange,
)
from tierkit.plaintext import one_line
from tierkit.types import Scheme

__all__ = ["follow"]

_MOST_SAID, _MOST_KEPT = 3, 100


def follow(client: Client, job: Job, *, budget_s: float | None = None) -> Job:
    """Draw the progress of a job until it is done, and say why images got no finer answer."""
    reasons: Counter[str] = Counter()
    with progress_bars("image") as progress:
        coarse = progress.add_task("coarse", total=job.images)
        fine = progress.add_task("fine", total=job.images, visible=job.scheme is not Scheme.END)
        standing = 0
        for event in client.events(job, budget_s=budget_s):
            match event:
                case CoarseResults(results=results):
                    progress.advance(coarse, len(results))
                case FineResults(results=results):
                    standing += _count(results, reasons)
                    progress.advance(fine, len(results))
                case FallbackResults(results=results) | FailedResults(results=results):
                    _count(results, reasons)
                    standing += len(results)
                    progress.advance(fine, len(results))
                case StateChange(job=job):
                    pass
            if standing:
                progress.update(fine, description=f"fine, {standing} without a finer answer")
    for reason, images in reasons.most_common(_MOST_SAID):
        said = one_line(f"{image_count(images)} without a finer answer: {reason}")
        screen(stderr=True).print(said, style="yellow", soft_wrap=True, markup=False)
    return job


def _count(results: Iterable[ImageResult], reasons: Counter[str]) -> int:
    """Count the images whose answer stands for a finer one, by reason, of which some are enough."""
    lost = [result.fallback for result in results if result.fallback is not None]
    for reason in lost:
        if reason in reasons or len(reasons) < _MOST_KEPT:
            reasons[reason] += 1
    return len(lost)
