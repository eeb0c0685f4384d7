"""Tickets: what a worker that the scheduler sends to the host of a training run shows there, in place of its token.

Each run has a secret, which the scheduler tells the run's host and nobody else. A ticket says who a worker is, signed
with that secret (HMAC-SHA-256). So a host learns nothing that is good anywhere but at this host, and no worker can act
as another one.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

from tierkit.access.callers import Caller
from tierkit.access.tokens import TokenEntry
from tierkit.errors import Unauthenticated, Unavailable

__all__ = ["TICKET_HEADER", "Tickets", "issued", "secret_of_run", "ticket_of"]

TICKET_HEADER = "Terrace-Ticket"
_VALID_S = 3600
_MOST_SEEN = 1_000
_PURPOSE = b"terrace run\n"
"""Sets these secrets apart from whatever else is made with the scheduler's own."""
_NAME = "[a-z0-9][a-z0-9._-]{0,62}"
_FORM = re.compile(rf"([0-9a-f]{{8}}):([0-9]{{1,12}}):({_NAME}):({_NAME}):([0-9a-f]{{64}})", re.ASCII)


def secret_of_run(secret: bytes, run: str, owner: str, created_at: float) -> str:
    """The secret of a run: the same for each host that goes on with it, and at each scheduler of one database.

    Args:
        secret: the schedulers' own.
        created_at: of the run, so that one which takes the id of a forgotten run has another secret.
    """
    return hmac.digest(secret, _PURPOSE + f"{run}\n{owner}\n{created_at!r}".encode(), "sha256").hex()


def issued(secret: str, run: str, entry: TokenEntry, worker: str, now: float) -> tuple[str, float]:
    """A ticket, and the seconds for which it is valid.

    Args:
        secret: of the run.
        entry: the worker's token.
        worker: the one name under which the ticket lets it work.
        now: seconds since 1970.
    """
    expires = int(now) + _VALID_S
    if entry.expires is not None:
        expires = min(expires, int(entry.expires.timestamp()))
    content = f"{entry.id}:{expires}:{entry.name}:{worker}"
    return f"{content}:{_signature(secret, run, content)}", max(0.0, expires - now)


class Tickets:
    """The tickets of one run, as its host reads them."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.secret: str | None = None
        """None until the scheduler has told it."""
        self.revoked: frozenset[str] = frozenset()
        """Ids of tokens whose tickets are not taken any more."""
        self._seen: dict[str, None] = {}

    @property
    def seen(self) -> tuple[str, ...]:
        """Ids of the tokens whose tickets were shown last: the scheduler says which of them it has revoked."""
        return tuple(self._seen)

    def holder(self, ticket: str, now: float) -> Caller:
        """Who shows a ticket: a worker with the name of its token, for the one worker's name that the ticket is for.

        Raises:
            Unauthenticated: it is for another run, has expired, or its token was revoked.
            Unavailable: the scheduler has not told this host the run's secret yet.
        """
        if self.secret is None:
            raise Unavailable("this host waits for the scheduler, which says what tickets are worth", retry_after_s=1.0)
        form = _FORM.fullmatch(ticket)
        signed = ticket.rpartition(":")[0]
        if form is None or not hmac.compare_digest(form[5], _signature(self.secret, self._run, signed)):
            raise Unauthenticated("the ticket is not for this run: ask the scheduler for another one")
        token, expires, name, worker = form.groups()[:4]
        self._see(token)
        if int(expires) <= now:
            raise Unauthenticated("the ticket has expired: ask the scheduler for another one")
        if token in self.revoked:
            raise Unauthenticated(f"the token of {name!r} was revoked, or has expired: ask for a new one")
        entry = TokenEntry(name=name, role="worker", sha256=form[5], nodes=(worker,))
        return Caller(name=name, role="worker", entry=entry)

    def _see(self, token: str) -> None:
        self._seen.pop(token, None)
        self._seen[token] = None
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]


def ticket_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The ticket of a request; None where there is none, or more than one.

    Args:
        headers: names in lower case.
    """
    wanted = TICKET_HEADER.lower().encode()
    values = [value for name, value in headers if name == wanted]
    return values[0].decode("latin-1") if len(values) == 1 else None


def _signature(secret: str, run: str, content: str) -> str:
    return hmac.digest(secret.encode(), f"{run}:{content}".encode(), "sha256").hex()
