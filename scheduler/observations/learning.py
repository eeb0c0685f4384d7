"""Learning behind the HTTP API: labels of people, agreement between the tiers, and improvements of releases."""

from __future__ import annotations

import base64
import binascii
import logging
import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, Protocol

import msgspec

from scheduler.core.learning import MOST_IMPROVEMENTS, Agreement, Audits, SoughtPictures, agrees
from scheduler.core.observing import Label, StoredObservation
from scheduler.observations.book import SourceBook, fields_of
from tierkit.errors import InvalidInput
from tierkit.wire.learning import Improvement, KeptState, LabelNews, LabelOfPerson, LearningNow, NodeLearning
from tierkit.wire.observations import Observation

__all__ = ["Learning"]

log = logging.getLogger(__name__)

_MOST_NEWS = 500
_MOST_NODES = 10_000
_MOST_CURSOR = 400

_Picture = tuple[str, str, int]
_Position = tuple[float, str, str, int]
_decode = msgspec.json.Decoder(_Position).decode


class _Store(Protocol):
    async def last_numbers(self) -> dict[str, int]: ...

    async def count(self, reader: str | None = None) -> int: ...

    async def add(self, picture: _Picture, label: Label, *, elapsed: float) -> tuple[int, Label | None]: ...

    async def take_back(
        self, picture: _Picture, by: str | None, *, only_own: bool, at: float, elapsed: float
    ) -> int: ...

    async def news(self, node_id: str, after: int, limit: int) -> list[LabelOfPerson]: ...

    async def pictures(
        self, sought: SoughtPictures, before: _Position | None, limit: int
    ) -> list[tuple[float, StoredObservation]]: ...

    async def audited(self) -> list[tuple[str, str, int, bool]]: ...

    async def improvements(self) -> list[Improvement]: ...

    async def save_improvement(self, improvement: Improvement, dropped: Collection[str]) -> None: ...


class Learning:
    """Labels, agreement and improvements.

    Args:
        hierarchy: digest of the classes that are served.
    """

    def __init__(self, store: _Store, book: SourceBook, hierarchy: str) -> None:
        self._store = store
        self._book = book
        self._hierarchy = hierarchy
        self._audits = Audits()
        self._numbers: dict[str, int] = {}
        """The last number of a label by node."""
        self.labels = 0
        self._improvements: dict[str, Improvement] = {}
        """Improvements by id, the newest first."""

    async def load(self) -> None:
        """Take what the scheduler before this one has stored."""
        self._numbers, self.labels = await self._store.last_numbers(), await self._store.count()
        for each in await self._store.audited():
            self._audits.note(*each)
        self._improvements = {each.id: each for each in await self._store.improvements()}

    # --- labels -----------------------------------------------------------------------------------------------------

    def class_called(self, name: str) -> int:
        """Number of the class with this name. Raises InvalidInput if there is none."""
        classes = list(self._book.hierarchies[self._hierarchy].fine)
        if name not in classes:
            close = get_close_matches(name, classes, n=3)
            hint = f": did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise InvalidInput(f"no class is called {name[:80]!r}{hint}")
        return classes.index(name)

    async def label(self, picture: _Picture, number_of_class: int, by: str | None) -> None:
        """Note which class a person sees in a picture. The last label counts; the log names the one before.

        Args:
            picture: node, source and sequence number.
            by: name of a token; None if no token was asked for.

        Raises:
            NotFound: the scheduler does not have the picture.
            Conflict: too many pictures of the source are labelled.
        """
        label = Label(label=number_of_class, hierarchy=self._hierarchy, by=by, at=time.time())
        number, before = await self._store.add(picture, label, elapsed=self._book.elapsed())
        self._note(picture, number)
        self.labels += before is None
        if before is not None and before.label != label.label:
            log.info("a label replaces another", extra={"picture": picture, "by": by, "before_by": before.by})

    async def take_back(self, picture: _Picture, by: str | None, *, only_own: bool) -> None:
        """Take the label of a picture back. Raises NotFound without one, Forbidden if another user has set it."""
        elapsed = self._book.elapsed()
        number = await self._store.take_back(picture, by, only_own=only_own, at=time.time(), elapsed=elapsed)
        self._note(picture, number)
        self.labels -= 1

    def _note(self, picture: _Picture, number: int) -> None:
        node_id = picture[0]
        self._numbers[node_id] = max(number, self._numbers.get(node_id, 0))

    def last_number(self, node_id: str) -> int:
        """Number of the last label that was set or taken back for a picture of this node; 0 without any."""
        return self._numbers.get(node_id, 0)

    async def news(self, node_id: str, after: int) -> LabelNews:
        """Labels of a node's pictures after a number."""
        found = await self._store.news(node_id, after, _MOST_NEWS + 1)
        return LabelNews(labels=tuple(found[:_MOST_NEWS]), more=len(found) > _MOST_NEWS)

    async def purged(self) -> None:
        """Count again: old labels were deleted."""
        self.labels = await self._store.count()

    # --- pictures ---------------------------------------------------------------------------------------------------

    async def pictures(
        self, sought: SoughtPictures, limit: int, cursor: str | None
    ) -> tuple[list[dict[str, Any]], str | None]:
        """Pictures that the scheduler has (the fields of a `SeenPicture`), and the cursor of the next page.

        Raises:
            InvalidInput: no page has given this cursor.
        """
        before = None if cursor is None else _position_of(cursor)
        rows = await self._store.pictures(sought, before, limit + 1)
        fields = [fields_of(stored, self._book.hierarchies) for _, stored in rows[:limit]]
        if len(rows) <= limit:
            return fields, None
        use, last = rows[limit - 1]
        return fields, _cursor_of((use, last.node_id, last.content.source, last.content.sequence))

    # --- agreement --------------------------------------------------------------------------------------------------

    def observed(self, node_id: str, seen: Sequence[tuple[Observation, bool]]) -> None:
        """Count the audited pictures among new observations of a node."""
        for each, _ in seen:
            if (agreed := agrees(each)) is not None:
                self._audits.note(node_id, each.source, each.sequence, agreed)

    def agreement(self) -> Agreement:
        """Add up all sources."""
        whole = Agreement()
        for each in self._audits.by_source().values():
            whole = whole.plus(each)
        return whole

    def kept(self) -> dict[str, KeptState]:
        """The kept sample by node, as its device reported it last."""
        return {
            node_id: KeptState.model_validate(msgspec.to_builtins(status.kept))
            for node_id, status in self._book.devices.items()
            if status.kept is not None
        }

    async def now(self, reader: str | None) -> LearningNow:
        """Return kept pictures, agreement and number of labels of the sources that a user may see; None: all."""
        labels = self.labels if reader is None else await self._store.count(reader)
        of_nodes: dict[str, Agreement] = {}
        for (node_id, source), each in self._audits.by_source().items():
            if self._book.may_see(reader, node_id, source):
                of_nodes[node_id] = of_nodes.get(node_id, Agreement()).plus(each)
        kept = self.kept()
        if reader is not None:
            seen = {node_id for node_id, _ in self._book.visible(reader)}
            kept = {node_id: each for node_id, each in kept.items() if node_id in seen}
        whole = Agreement()
        for each in of_nodes.values():
            whole = whole.plus(each)
        nodes = tuple(
            NodeLearning(
                node=node_id,
                kept=kept.get(node_id),
                audited=of_nodes.get(node_id, Agreement()).audited,
                agreement=of_nodes.get(node_id, Agreement()).share,
            )
            for node_id in sorted(of_nodes.keys() | kept.keys())[:_MOST_NODES]
        )
        return LearningNow(nodes=nodes, audited=whole.audited, agreement=whole.share, labels=labels)

    # --- improvements -----------------------------------------------------------------------------------------------

    async def put_improvement(self, improvement: Improvement, by: str | None) -> Improvement:
        """Store an improvement as it is now; returns it with what the scheduler adds."""
        known = self._improvements.get(improvement.id)
        now = datetime.now(UTC)
        at = now if known is None else known.created_at
        by = by if known is None else known.by
        improvement = improvement.model_copy(update={"created_at": at, "told_at": now, "by": by})
        others = [each for each in self._improvements.values() if each.id != improvement.id]
        everything = sorted([improvement, *others], key=_age, reverse=True)
        dropped = [each.id for each in everything[MOST_IMPROVEMENTS:]]
        await self._store.save_improvement(improvement, dropped)
        self._improvements = {each.id: each for each in everything[:MOST_IMPROVEMENTS]}
        return improvement

    @property
    def improvements(self) -> tuple[Improvement, ...]:
        """The newest first."""
        return tuple(self._improvements.values())


def _age(improvement: Improvement) -> float:
    return 0.0 if improvement.created_at is None else improvement.created_at.timestamp()


def _cursor_of(position: _Position) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def _position_of(cursor: str) -> _Position:
    try:
        if len(cursor) > _MOST_CURSOR:
            raise ValueError
        position: _Position = _decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        return position
    except (ValueError, binascii.Error, msgspec.DecodeError, RecursionError) as exc:
        raise InvalidInput(f"cursor is the next_cursor of the page before, not {cursor[:32]!r}") from exc
