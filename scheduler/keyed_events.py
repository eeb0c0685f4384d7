"""Events by key. Waiters for a change use them, such as readers of a job's events."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

__all__ = ["KeyedEvents"]


class KeyedEvents:
    """One event per key that is awaited; keys that are not awaited take no memory."""

    def __init__(self) -> None:
        self._events = WeakValueDictionary[str, asyncio.Event]()

    def of(self, key: str) -> asyncio.Event:
        """The event that the next change of `key` sets. Take it before reading the state, and hold it while waiting."""
        return self._events.setdefault(key, asyncio.Event())

    def wake(self, key: str) -> None:
        """Wake all that wait for `key`; they take a new event then."""
        if (event := self._events.pop(key, None)) is not None:
            event.set()

    def wake_all(self) -> None:
        """Wake all that wait."""
        for key in list(self._events):
            self.wake(key)
