"""Several jobs for one large source of `terrace classify`."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terrace.console import image_count, percent
from terrace.following import follow
from terrace.parts import Bounds, Fact, PartsFolder, SourcePart, split
from terrace.report import unanswered
from terrace.sources import PACKED
from tierkit.client import Client, Job, JobState, Labels, PolicyFields, shortened
from tierkit.errors import InvalidInput, NotFound, Unavailable

__all__ = ["Answered", "Parts", "bounds_of", "missing_text"]

_AHEAD = 2
"""Concurrent jobs: one is uploaded while the previous one is answered."""
_NAME = 180
_FIELDS_BYTES = 3 * 1024**2
"""Limit on the labels of a job; the scheduler takes 4 MiB of fields."""
_FORM_BYTES = 4096
"""Bytes of a form in addition to its files."""


@dataclass(slots=True, kw_only=True)
class Answered:
    """Outcome of a source."""

    parts: int
    images: int = 0
    unanswered: int = 0
    damaged: int = 0
    """Skipped images that cannot be read."""
    completed: bool = True
    jobs: list[Job] = field(default_factory=list)
    """Jobs of this command, without jobs of an earlier, interrupted one."""


def bounds_of(limits: Mapping[str, Any]) -> Bounds:
    """Return the limits of one upload, from the limits that the scheduler reports."""
    return Bounds(images=limits["max_images"], bytes=max(1, limits["max_upload_bytes"] - _FORM_BYTES))


class Parts:
    """Source of files, split into parts.

    Args:
        files: files by their names in the results.
        labels: one label for each file, or None.
        policy: policy fields of each job.
    """

    def __init__(
        self,
        client: Client,
        files: Mapping[str, Path | bytes],
        labels: Labels | None,
        bounds: Bounds,
        policy: PolicyFields,
    ) -> None:
        self._client = client
        self._files = files
        self._policy = policy
        self._facts = list(map(_fact, files, files.values(), labels if labels is not None else [None] * len(files)))
        if labels is not None:
            longest = max(len(str(label)) for label in labels)
            bounds = Bounds(images=max(1, min(bounds.images, _FIELDS_BYTES // (2 * longest + 8))), bytes=bounds.bytes)
        self._bounds = bounds
        for name, size, *_ in self._facts:
            if size > bounds.bytes:
                way_out = "unpack it, and classify the folder" if name.lower().endswith(PACKED) else "leave it out"
                raise InvalidInput(
                    f"{shortened(name)} has {size} bytes, and the scheduler takes {bounds.bytes} in one upload "
                    f"(setting max_body_bytes): {way_out}"
                )

    def several(self, out: Path | None) -> bool:
        """True if the source takes more than one job or an interrupted command is to continue."""
        return len(split(self._facts, self._bounds)) > 1 or (out is not None and _folder_of(out).is_dir())

    def answered(self, out: Path | None, *, bom: bool, say: Callable[[str], None]) -> Answered:
        """Submit all parts, one job after the other, and write the results to one file.

        Args:
            say: prints a note on progress.

        Raises:
            InvalidInput: the finished parts belong to a command with other options.
        """
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if out is None else _folder_of(out)
            kept = PartsFolder(
                folder,
                results=".jsonl" if out is None else out.suffix.lower(),
                options={key: value for key, value in self._policy.items() if value is not None},
                may_differ=frozenset({"on_bad_input"}),
            )
            stack.callback(kept.close)
            parts = kept.plan(self._facts, self._bounds)
            before = sum(map(kept.is_done, parts))
            say(
                f"{image_count(len(self._facts))} in {len(parts)} jobs: one upload may have {self._bounds.images:,} "
                f"images and {self._bounds.bytes:,} bytes" + (f"; {before} are done already" if before else "")
            )
            try:
                return self._run(kept, parts, out, bom=bom, say=say)
            except KeyboardInterrupt:
                goes_on = "the jobs that are sent go on without us"
                say(f"{goes_on}; the same command goes on where this one stopped" if out is not None else goes_on)
                raise

    def _run(
        self, kept: PartsFolder, parts: list[SourcePart], out: Path | None, *, bom: bool, say: Callable[[str], None]
    ) -> Answered:
        answered = Answered(parts=len(parts))
        under_way: deque[tuple[SourcePart, Job]] = deque()

        def finish() -> None:
            part, job = under_way.popleft()
            done = follow(self._client, job)
            part.unanswered = unanswered(done) or (0 if done.state is JobState.COMPLETED else len(part.facts))
            part.damaged = done.damaged_images
            kept.note(part)
            if out is not None:
                self._client.save_results(
                    done, kept.results_of(part), format="csv" if out.suffix.lower() == ".csv" else "jsonl"
                )
            answered.jobs.append(done)
            say(_line(done, part, len(parts)))

        for part in parts:
            if kept.is_done(part):
                continue
            job = self._job_of(part, kept)
            while job is None:
                try:
                    job = self._submit(part, kept)
                except Unavailable:
                    if not under_way:
                        raise
                    finish()  # it takes no more at a time
            under_way.append((part, job))
            if len(under_way) >= _AHEAD:
                finish()
        while under_way:
            finish()
        if out is not None:
            kept.merge(parts, out, bom=bom)
        answered.images = len(self._facts)
        answered.unanswered = sum(part.unanswered for part in parts)
        answered.damaged = sum(part.damaged for part in parts)
        answered.completed = all(job.state is JobState.COMPLETED for job in answered.jobs)
        return answered

    def _job_of(self, part: SourcePart, kept: PartsFolder) -> Job | None:
        """The job of a part that was submitted before a cut; None if it is to be submitted."""
        if part.job is None:
            return None
        try:
            job = self._client.job(part.job)
        except NotFound:
            job = None
        if job is not None and (not job.done or job.state is JobState.COMPLETED):
            return job
        part.job, part.tries = None, part.tries + 1
        return None

    def _submit(self, part: SourcePart, kept: PartsFolder) -> Job:
        kept.note(part)
        policy = self._policy.copy()
        policy["name"] = f"{(policy.get('name') or '')[:_NAME]}, part {part.number}"
        files = {name: self._files[name] for name, *_ in part.facts}
        job = self._client.submit(files, labels=part.labels, idempotency_key=kept.key(part), **policy)
        part.job = job.id
        kept.note(part)
        return job


def _folder_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.parts")


def _fact(name: str, file: Path | bytes, label: Any) -> Fact:
    if isinstance(file, bytes):
        return name, len(file), 0, label
    try:
        status = file.stat()
    except OSError as exc:
        raise InvalidInput(f"cannot read {shortened(str(file))}: {exc.strerror}") from exc
    return name, status.st_size, status.st_mtime_ns, label


def missing_text(unanswered: int, damaged: int) -> str:
    """Behind a number of images: how many of them have no answer; "" for none."""
    counts = ((unanswered, "without an answer"), (damaged, "damaged"))
    return "".join(f", {count:,} {what}" for count, what in counts if count)


def _line(job: Job, part: SourcePart, of: int) -> str:
    accuracy = next(
        (a for a in (job.fine_accuracy, job.final_coarse_accuracy, job.coarse_accuracy) if a is not None), None
    )
    right = "" if accuracy is None else f", {percent(accuracy)} right"
    missing = missing_text(part.unanswered, part.damaged)
    reason = f" ({job.reason})" if job.reason else ""
    return f"part {part.number} of {of}: {image_count(job.images)}, {job.state}{right}{missing}{reason}; job {job.id}"
