"""The kept sample of a node: pictures that it keeps to learn from, written in a separate thread.

Answers never wait for it. If the disk is full or broken, no picture is kept for a while, and the state says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from end_node.spool import Held
from models.hierarchy import Hierarchy
from models.kept.page import MOST_PICTURES, PageEnd, write_page
from models.kept.sample import KeptPicture, checked, kind_of
from models.kept.store import KeptStore
from tierkit.errors import InvalidAnswer, SetupError, SpoolUnavailable
from tierkit.wire.learning import KeptState, LabelOfPerson
from tierkit.wire.observations import FinerAnswer

__all__ = ["Keeping", "kept_picture"]

log = logging.getLogger(__name__)

_PAUSE_S = 30.0
"""Seconds without a further attempt after the disk has failed."""
_PAGE_BYTES = 4 << 20
"""Bound on the files of a page, unless the first is larger."""


class Keeping:
    """Writes the kept sample, one picture after the other. The sample is opened with the first picture.

    Args:
        folder: of the sample.
        size_bytes: limit on its size.
        hierarchy: of the answers.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, folder: Path, size_bytes: int, hierarchy: Hierarchy, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._size_bytes, self._hierarchy = folder, size_bytes, hierarchy
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kept")
        self._store: KeptStore | None = None
        self._again = -float("inf")
        self.state = KeptState(size_bytes=size_bytes)
        """The sample after the last picture, and why none is kept now."""
        self.refused = 0
        """Pictures whose answers cannot be learned from."""

    async def keep(self, held: Held, content: bytes, finer: FinerAnswer) -> bool:
        """Keep a picture with its answers, and return True if it is kept. Errors are logged and shown in `state`.

        Args:
            held: the picture, with the local answer.
            finer: the answer from above.
        """
        if held.observation.local is None or self._clock() < self._again:
            return False
        try:
            picture = checked(kept_picture(held, content, finer, self._hierarchy.digest), self._hierarchy)
        except InvalidAnswer as error:
            self.refused += 1
            log.warning("a picture is not kept: %s", error, extra={"upstream": finer.node_id})
            return False
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._write, picture, content)
        except (SpoolUnavailable, SetupError) as error:
            self._again = self._clock() + _PAUSE_S
            self._pause(error)
            return False

    async def forget(self, source: str, first: int) -> None:
        """Drop the pictures of a source from a number on, which the source has given to others.

        Raises:
            SpoolUnavailable: the disk is full or broken.
        """
        await self._in_thread(self._forget, source, first)

    async def label(self, labels: Sequence[LabelOfPerson]) -> None:
        """Note labels of people with the pictures that are here. Labels of other classes are left out.

        Raises:
            SpoolUnavailable: the disk is full or broken.
        """
        await self._in_thread(self._label, labels)

    async def page(self, after: int, limit: int, may_go: Callable[[KeptPicture], bool]) -> bytes:
        """A page of pictures for a node that learns from them, without names of people; see `models.kept.page`.

        Args:
            after: key of the last picture that the node has.
            limit: most pictures; no more than `MOST_PICTURES` count.
            may_go: Returns True if a picture may go there.

        Raises:
            SpoolUnavailable: the disk is full or broken.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, self._page, after, min(limit, MOST_PICTURES), may_go
            )
        except SetupError as error:
            raise SpoolUnavailable(str(error)) from error

    async def close(self) -> None:
        """Close the sample when the last picture is written."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._close)
        self._pool.shutdown()

    async def open(self) -> None:
        """Read how large the sample is. A failure is shown in `state`, and the next picture tries again."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._count)
        except (SpoolUnavailable, SetupError) as error:
            self._pause(error)

    def _pause(self, error: SpoolUnavailable | SetupError) -> None:
        if not self.state.reason:
            log.warning("no pictures are kept for now: %s", error)
        self.state = self.state.model_copy(update={"reason": str(error)})

    async def _in_thread(self, call: Callable[..., None], *values: Any) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, call, *values)
        except SetupError as error:
            raise SpoolUnavailable(str(error)) from error

    def _forget(self, source: str, first: int) -> None:
        self._opened().forget(source, first)
        self._count()

    def _label(self, labels: Sequence[LabelOfPerson]) -> None:
        store, classes = self._opened(), self._hierarchy
        for each in labels:
            known = each.label is None or 0 <= each.label < len(classes.fine)
            if each.classes == classes.digest and known:
                store.label(each.source, each.sequence, each.label, name=each.by or "", at=each.at)
        self._count()

    def _page(self, after: int, limit: int, may_go: Callable[[KeptPicture], bool]) -> bytes:
        found = self._opened().page(after, limit, _PAGE_BYTES)
        sent = [
            (key, dataclasses.replace(picture, person_name=None, person_at=None), content)
            for key, picture, content in found.pictures
            if may_go(picture)
        ]
        withheld = len(found.pictures) - len(sent)
        return write_page(sent, PageEnd(after=found.after, more=found.more, withheld=withheld))

    def _write(self, picture: KeptPicture, content: bytes) -> bool:
        try:
            kept = self._opened().keep(picture, content)
            self._count()
        except SpoolUnavailable:
            self._close()  # to look at the file again before the next picture, and set it aside if it is damaged
            raise
        return kept

    def _count(self) -> None:
        self.state = KeptState.model_validate(_fields(self._opened()))

    def _opened(self) -> KeptStore:
        if self._store is None:
            self._store = KeptStore(self._folder, self._size_bytes)
        return self._store

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def kept_picture(held: Held, content: bytes, finer: FinerAnswer, classes: str) -> KeptPicture:
    """A picture with both answers, to be kept.

    Args:
        held: its observation has a local answer.
        content: bytes of the file.
        finer: the answer from above.
        classes: digest of the hierarchy.
    """
    seen = held.observation
    local = seen.local
    assert local is not None
    return KeptPicture(
        source=seen.source,
        sequence=seen.sequence,
        taken_at=seen.taken_at,
        sha256=hashlib.sha256(content).hexdigest(),
        release=seen.release,
        local_sha256=local.sha256,
        local=local.label,
        local_confidence=local.confidence,
        margin=held.margin,
        tier=finer.tier,
        node_id=finer.node_id,
        upper_sha256=finer.sha256,
        label=finer.label,
        confidence=finer.confidence,
        coarse_label=finer.coarse_label,
        coarse_confidence=finer.coarse_confidence,
        kind=kind_of(local.label, finer.coarse_label, unsure=seen.unsure),
        form="pixels" if finer.sent is not None and finer.sent.form == "pixels" else "features",
        classes=classes,
    )


def _fields(store: KeptStore) -> dict[str, Any]:
    counts = store.counts()
    return {name: getattr(counts, name) for name in KeptState.model_fields if hasattr(counts, name)}
