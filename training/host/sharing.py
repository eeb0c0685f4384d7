"""Training images that a host distributes: the segments, and the worker from which each worker copies the next
segment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from models.training.config import TrainConfig
from models.training.data import TrainingData
from tierkit.copies.serving import bounded
from tierkit.copies.tree import HOST, Came, Event, Failed, Got, Left, Passed, Tree
from tierkit.errors import NotFound
from training.data.manifest import SegmentManifest, decoded
from training.data.placement import SegmentPlacement
from training.data.segments import of_segments
from training.messages import DataAnswer, DataReport, Keeps, WorkerData

__all__ = ["Sharing", "drawn_from"]

log = logging.getLogger(__name__)

_TICK_S = 1.0
_STEADY_S = 10.0
"""Seconds of computing after which a worker's speed is known."""


class Sharing:
    """Lives as long as its host's process: workers tell a new one again what they have.

    Args:
        folder: folder with the checked segments of the manifest.
        batch: number of images of a step.
        wait_s: most seconds that a worker without a copy to make is kept waiting.
    """

    def __init__(self, manifest: SegmentManifest, folder: Path, *, batch: int, wait_s: float) -> None:
        self.manifest, self._folder = manifest, folder
        parts = len(manifest.segments)
        self._tree = Tree()
        self._placement = SegmentPlacement(parts=parts, images=manifest.images / parts, batch=batch)
        self._numbers = {entry.sha256: number for number, entry in enumerate(manifest.segments)}
        self._wait_s = wait_s
        self._key = secrets.token_urlsafe(32)
        self._urls: dict[str, str | None] = {}
        self._wanted: dict[str, tuple[int, ...]] = {}
        self._shares: dict[str, float] = {}
        """Fraction that each worker has of the copy in progress."""
        self._began: dict[str, tuple[float, int]] = {}
        """Time when a worker was first seen with computed steps, and their number."""
        self._speeds: dict[str, float] = {}
        """Steps a second."""
        self._drawn: tuple[tuple[int, ...], TrainingData] | None = None
        """Segments and result of the last call of `images_of`."""
        self._changed = asyncio.Event()

    def told(self, report: DataReport, steps: int) -> tuple[int, ...]:
        """Take a worker's report, and return the segments that it should have.

        Args:
            steps: number of steps that it has computed.

        Raises:
            TooLarge: no segment fits on its disk.
        """
        name, now = report.worker, time.monotonic()
        holds = frozenset(range(len(self.manifest.segments))).intersection(report.holds)
        self._time(name, steps, now)
        if report.keeps == "all":
            wanted = tuple(range(len(self.manifest.segments)))
        else:
            wanted = self._placement.place(name, room=report.room, holds=holds, steps=steps, speeds=self._speeds)
        self._wanted[name], self._urls[name], self._shares[name] = wanted, report.url, report.share
        if report.got is not None:
            self._on(Got(worker=name, file=report.got, bytes_per_s=report.bytes_per_s))
        copy = self._tree.copy_of(name)
        # It may have been told of another copy since, whose source is not the one that failed.
        if (
            report.failed is not None
            and copy is not None
            and (copy.file, self._urls.get(copy.source)) == (report.failed_segment, report.failed_source)
        ):
            trusted = self._tree.trusts(copy.source)
            self._on(Failed(worker=name, reason=report.failed))
            if trusted and not self._tree.trusts(copy.source):
                log.warning(
                    "%s says that the images of %s were wrong or not there: it sends no more", name, copy.source
                )
        self._on(Came(worker=name, serves=report.url is not None, wanted=frozenset(wanted), holds=holds))
        return wanted

    def held_by(self, name: str) -> frozenset[int]:
        """Whole segments of a worker, by its own report."""
        return self._tree.holds(name)

    async def answer(self, report: DataReport, *, ended: Callable[[], bool]) -> DataAnswer:
        """Return instructions for the worker as soon as there are some, or after some seconds."""
        deadline = time.monotonic() + self._wait_s
        while True:
            copy, changed = self._tree.copy_of(report.worker), self._changed
            if copy is not None or not report.waits or ended() or time.monotonic() >= deadline:
                break
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                break
        return DataAnswer(
            key=self._key,
            wanted=self._wanted.get(report.worker, ()),
            segment=None if copy is None else copy.file,
            source=None if copy is None or copy.source == HOST else self._urls.get(copy.source),
        )

    def left(self, name: str) -> None:
        """A worker has gone."""
        self._on(Left(worker=name))
        self._placement.leave(name)
        self._urls.pop(name, None)
        self._wanted.pop(name, None)
        self._shares.pop(name, None)
        self._began.pop(name, None)
        self._speeds.pop(name, None)

    def wake(self) -> None:
        """Answer all waiting workers now."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self) -> None:
        """Notice who is silent, and whose copies take long."""
        while True:
            await asyncio.sleep(_TICK_S)
            before = set(self._tree)
            self._on(Passed())
            for name in before - set(self._tree):
                self.left(name)

    async def read(self, sha256: str, span: range | None) -> tuple[bytes, int]:
        """Return some bytes of a segment, by default all, and the size of the segment.

        Raises:
            NotFound: there is no such segment.
            InvalidInput: the span is outside the segment. See `bounded`.
        """
        number = self._numbers.get(sha256)
        if number is None:
            raise NotFound("the run has no such segment")
        size = self.manifest.segments[number].bytes
        wanted = bounded(span, size=size, chunk_bytes=self.manifest.chunk_bytes)
        return await asyncio.to_thread(_read, self._folder / sha256, wanted), size

    def images_of(self, segments: tuple[int, ...], network: TrainConfig) -> TrainingData:
        """Return the training data of a worker with these segments. Reads files."""
        if self._drawn is None or self._drawn[0] != segments:
            paths = [self._folder / self.manifest.segments[number].sha256 for number in segments]
            pieces = [decoded(path.read_bytes(), self.manifest) for path in paths]
            self._drawn = segments, of_segments(network, pieces, self.manifest)
        return self._drawn[1]

    def view(self) -> list[WorkerData]:
        """List for each worker the segments that it has, and the copy in progress with its source."""
        found = []
        for name in self._tree:
            copy = self._tree.copy_of(name)
            found.append(
                WorkerData(
                    name=name,
                    holds=tuple(sorted(self._tree.holds(name))),
                    wanted=self._wanted.get(name, ()),
                    serves=self._urls.get(name) is not None,
                    trusted=self._tree.trusts(name),
                    segment=None if copy is None else copy.file,
                    source=None if copy is None else copy.source,
                    share=0.0 if copy is None else self._shares.get(name, 0.0),
                )
            )
        return found

    def _on(self, event: Event) -> None:
        if self._tree.on(event, time.monotonic()):
            self.wake()

    def _time(self, name: str, steps: int, now: float) -> None:
        if not steps:
            return
        began, first = self._began.setdefault(name, (now, steps))
        if now - began >= _STEADY_S:
            self._speeds[name] = (steps - first) / (now - began)


def drawn_from(now: list[int] | None, wanted: tuple[int, ...], holds: frozenset[int], keeps: Keeps) -> list[int] | None:
    """The segments from which a worker's batches are drawn: those that it is to have, once it has them; until then what
    they are drawn from now, or those that it has of them. None for the whole data set.

    Args:
        now: segments that its batches are drawn from now; empty for nothing yet.
    """
    if keeps == "all":
        return None if holds >= set(wanted) else []
    if holds >= set(wanted):
        return list(wanted)
    return now if now and holds >= set(now) else [number for number in wanted if number in holds]


def _read(path: Path, span: range) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), len(span), span.start)
