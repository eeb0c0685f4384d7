"""Waking those that follow something, such as the readers of a job's events."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

__all__ = ["News"]


class News:
    """An event per id that is followed. Nothing is kept of ids that nobody follows."""

    def __init__(self) -> None:
        self._events = WeakValueDictionary[str, asyncio.Event]()

    def of(self, key: str) -> asyncio.Event:
        """Set when something changes. Ask for it before you look, and hold it while you wait."""
        return self._events.setdefault(key, asyncio.Event())

    def tell(self, key: str) -> None:
        """Wake those that follow `key`; they ask for a new event then."""
        if (event := self._events.pop(key, None)) is not None:
            event.set()

    def tell_all(self) -> None:
        for key in list(self._events):
            self.tell(key)
