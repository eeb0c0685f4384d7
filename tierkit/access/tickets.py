"""Tickets, which the scheduler gives to workers: a worker shows the host of a training run a ticket instead of its
token.

Each run has a secret that the scheduler gives only to the run's host. A ticket names a worker, signed with that secret
(HMAC-SHA-256). So a host learns nothing that is valid at another host, and no worker can act as another one.
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
    """Return the secret of a run: the same for each host that continues it, and at each scheduler of one database.

    Args:
        secret: secret of the schedulers.
        created_at: creation time of the run, so that a run with the id of a forgotten run has another secret.
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
        """None until the scheduler has sent it."""
        self.revoked: frozenset[str] = frozenset()
        """Ids of tokens whose tickets are not taken any more."""
        self._seen: dict[str, None] = {}

    @property
    def seen(self) -> tuple[str, ...]:
        """Ids of the tokens whose tickets were shown last: the scheduler answers which of them are revoked."""
        return tuple(self._seen)

    def holder(self, ticket: str, now: float) -> Caller:
        """Return the worker that shows a ticket: it has the name of its token, and may use only the worker name in the
        ticket.

        Raises:
            Unauthenticated: it is for another run, has expired, or its token was revoked.
            Unavailable: this host has not received the run's secret from the scheduler yet.
        """
        if self.secret is None:
            raise Unavailable(
                "this host cannot check tickets yet: it waits for the run's secret from the scheduler",
                retry_after_s=1.0,
            )
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
    """The ticket of a request; None if there is none, or more than one.

    Args:
        headers: names in lower case.
    """
    wanted = TICKET_HEADER.lower().encode()
    values = [value for name, value in headers if name == wanted]
    return values[0].decode("latin-1") if len(values) == 1 else None


def _signature(secret: str, run: str, content: str) -> str:
    return hmac.digest(secret.encode(), f"{run}:{content}".encode(), "sha256").hex()
