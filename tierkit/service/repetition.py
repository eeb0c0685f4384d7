"""Requests that are an earlier one once more: what a connection remembers of it, and whose turn it is.

A client sends one request after the other with the same head. To read the head again, make a task, and find the way
through the application takes several times as long as to answer a short request; so where the head repeats, byte for
byte, the rest goes straight to a function that the application has left for it (`tierkit.service.exchange.REPEATABLE`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkit.service.exchange import AtOnce, header_lines

__all__ = ["MAX_OPENING_BYTES", "Repeatable", "Turn"]

MAX_OPENING_BYTES = 4096
"""Of a request's head and what repeats of its body."""


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A request that may come again."""

    opening: bytes
    """Its head, and what repeats of its body."""
    length: int
    """Of all of it."""
    answer: AtOnce


class Turn:
    """Whose repeated request is being held or answered: one on the whole server."""

    def __init__(self) -> None:
        self.holder: object = None
        """The connection; None while there is none."""
        self._default_headers: list[tuple[bytes, bytes]] = []
        self._start = b"HTTP/1.1 200 OK\r\n"

    def free(self) -> None:
        self.holder = None

    def start(self, default_headers: list[tuple[bytes, bytes]]) -> bytes:
        """What all answers begin with, until the server has new default headers (a new list each second)."""
        if default_headers is not self._default_headers:
            self._default_headers = default_headers
            self._start = b"HTTP/1.1 200 OK\r\n" + header_lines(default_headers)
        return self._start
