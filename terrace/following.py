"""Progress bars of a job under way: coarse and fine, as the answers arrive."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from rich.console import Console

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
_TELL_AGAIN_S = 10.0


def follow(client: Client, job: Job, *, budget_s: float | None = None) -> Job:
    """Draw the progress of a job until it is done, and say why images got no finer answer."""
    reasons: Counter[str] = Counter()
    state, waits = None, _Waits()
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
                    # Told again in the same state, since it waits.
                    if job.state is state and not job.done:
                        waits.tell(progress.console, job.reason)
                    state = job.state
            if standing:
                progress.update(fine, description=f"fine, {standing} without a finer answer")
    for reason, images in reasons.most_common(_MOST_SAID):
        said = one_line(f"{image_count(images)} {reason}")
        screen(stderr=True).print(said, style="yellow", soft_wrap=True, markup=False)
    return job


def _count(results: Iterable[ImageResult], reasons: Counter[str]) -> int:
    """Count the images without an answer, or whose answer stands for a finer one, by reason, of which some are enough;
    returns how many of the latter there are. A summary lists the damaged ones."""
    lost = 0
    for result in results:
        if result.fallback is not None:
            lost += 1
            reason = f"without a finer answer: {result.fallback}"
        elif result.error is not None and result.damaged is None:
            reason = f"without an answer: {result.error}"
        else:
            continue
        if reason in reasons or len(reasons) < _MOST_KEPT:
            reasons[reason] += 1
    return lost


class _Waits:
    """Says why a job waits, when that is new, and not too often: a reason may hold a time."""

    def __init__(self) -> None:
        self._told = ""
        self._not_before = 0.0

    def tell(self, console: Console, reason: str) -> None:
        now = time.monotonic()
        if reason not in ("", self._told) and now >= self._not_before:
            self._told, self._not_before = reason, now + _TELL_AGAIN_S
            console.print(one_line(reason), style="yellow", soft_wrap=True, markup=False)
