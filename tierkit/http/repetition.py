"""Requests that are an earlier one once more: what a connection remembers of it, and what the server has under way.

A client sends one request after the other with the same head. To read the head again, make a task, and find the way
through the application takes several times as long as to answer a short request; so where the head repeats, byte for
byte, the rest goes straight to a function that the application has left for it (`tierkit.http.exchange.REPEATABLE`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkit.http.exchange import Again, header_lines, status_line

__all__ = ["MAX_OPENING_BYTES", "Repeatable", "Repetitions"]

MAX_OPENING_BYTES = 4096
"""Of a request's head and what repeats of its body."""


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A request that may come again."""

    opening: bytes
    """Its head, and what repeats of its body."""
    length: int
    """Of all of it."""
    again: Again


class Repetitions:
    """The repeated requests that a server has under way."""

    def __init__(self) -> None:
        self.holder: object = None
        """The connection whose request is being held, or was answered since the event loop last came around; None
        while there is none, and never more than one."""
        self.waiting = 0
        """Requests whose answers come later."""
        self._default_headers: list[tuple[bytes, bytes]] = []
        self._starts: dict[int, bytes] = {}

    def none_but(self, connection: object) -> bool:
        """True if no other connection has any."""
        return not self.waiting and self.holder in (None, connection)

    def let_go(self, connection: object) -> None:
        """This connection holds no request any more."""
        if self.holder is connection:
            self.holder = None

    def start(self, status: int, default_headers: list[tuple[bytes, bytes]]) -> bytes:
        """What all answers with this status begin with; the server has a new list of default headers each second."""
        if default_headers is not self._default_headers:
            self._default_headers = default_headers
            self._starts.clear()
        start = self._starts.get(status)
        if start is None:
            start = self._starts[status] = status_line(status) + header_lines(default_headers)
        return start
