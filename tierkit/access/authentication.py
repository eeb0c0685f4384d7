"""Authentication and rate limit of requests: each needs a token that the service knows.

Two kinds of secret are accepted: the tokens of a file (`tierkit.access.tokens`), which people and nodes hold, and the
key of a node. The node makes its key at each start and sends it to the scheduler in its registration; the scheduler
passes it to the end nodes that it sends there. So calls inside a fleet need no stored or shared secret, and a node can
call only the nodes that it is sent to. A node with several schedulers has a key for each. If the service gives
sessions (`tierkit.access.sessions`), the cookie of a session counts as the token of a user. At the host of a training
run a ticket (`tierkit.access.tickets`) counts as the token of a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import Counter

from tierkit.access.browsers import check_origin
from tierkit.access.callers import Allowance, Caller, Role
from tierkit.access.sessions import Sessions, cookie_of
from tierkit.access.tickets import Tickets, ticket_of
from tierkit.access.tokens import TokenEntry, digest_of, read_book
from tierkit.errors import Forbidden, LimitReached, TerraceError, Unauthenticated, Unavailable

__all__ = ["Authenticator"]

Headers = Sequence[tuple[bytes, bytes]]

_MAX_TOKEN_BYTES = 512
_REASONS: dict[type[TerraceError], str] = {Unauthenticated: "token", Forbidden: "role", LimitReached: "limit"}

_refused = Counter(
    "terrace_refused_callers_total",
    "Requests refused for their caller; reason: token (none, unknown or expired), role (or a page of another origin) "
    "or limit.",
    ["reason"],
)
for _reason in _REASONS.values():
    _refused.labels(_reason)  # begins at 0: Prometheus sees no increase from nothing


class Authenticator:
    """Admits a request by its `Authorization` header, or by its session where there is none.

    Args:
        path: file of tokens; None for none.
        keys: of a node, one for each scheduler; each opens this service as well.
        roles: that may use this service at all.
        wall: Returns seconds since 1970; expiry needs them.
        clock: Returns monotonic seconds; limits need them.

    Raises:
        SetupError: the file cannot be used.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        keys: Collection[str] = (),
        roles: Collection[Role],
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._keys = frozenset(digest_of(key.encode()).hex() for key in keys)
        self._roles = frozenset(roles)
        self._wall = wall
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}
        self._known: dict[str, tuple[TokenEntry, Caller]] = {}
        """Callers by the hash of the token; another thread replaces the whole mapping."""
        self._workers: dict[str, TokenEntry] = {}
        """Tokens of the role worker, by their ids."""
        self._fleet = Caller(name="the fleet", role="fleet")
        self.sessions: Sessions | None = None
        """Set by a service that gives sessions; without it no cookie is accepted."""
        self.tickets: Tickets | None = None
        """Set by the host of a training run; without it no ticket is accepted."""
        self.roles_at: Mapping[str, Collection[Role]] = {}
        """Further roles that may use a single path."""
        self.load()

    def admit(
        self,
        headers: Headers,
        *,
        method: str = "GET",
        scheme: str = "http",
        hosts: Collection[str] = (),
        path: str = "",
    ) -> Caller:
        """The caller of a request with these headers (names in lower case), whose limits it counts against.

        Args:
            hosts: as for `check_origin`.
            path: of the request, which further roles may use.

        Raises:
            Unauthenticated: no token or session, or one that is unknown or has expired.
            Forbidden: a role that has no business here, or a page of another origin.
            LimitReached: too many requests.
            Unavailable: a ticket cannot be read yet.
        """
        try:
            caller, by_cookie = self._identify(headers)
            check_origin(method, scheme, headers, by_cookie=by_cookie, hosts=hosts)
            if not any(caller.may(role) for role in (*self._roles, *self.roles_at.get(path, ()))):
                hint = (
                    "; an invitation is for --scheduler, in place of the host's URL" if caller.role == "guest" else ""
                )
                raise Forbidden(
                    f"the token of {caller.name!r} has the role {caller.role}, which is not served here{hint}"
                )
            if caller.allowance is not None:
                caller.allowance.take_request(self._clock())
        except (Unauthenticated, Forbidden, LimitReached) as exc:
            _refused.labels(_REASONS[type(exc)]).inc()
            raise
        return caller

    def sign_in(self, token: str) -> tuple[Caller, str, int]:
        """Return a session for the holder of a token: the caller, the value of the cookie, and the seconds for which it
        is valid. Only if `sessions` is set.

        Raises:
            Unauthenticated, LimitReached: see `admit`.
            Forbidden: the token of a node.
        """
        assert self.sessions is not None
        caller = self.admit([(b"authorization", b"Bearer " + token.encode(errors="replace"))])
        caller.need("user")
        assert caller.entry is not None
        return caller, *self.sessions.issue(caller.entry, self._wall())

    def knows(self, headers: Headers) -> bool:
        """True if they hold a valid token of any role, or a session; counts against no limit."""
        try:
            self._identify(headers)
        except (Unauthenticated, Unavailable):
            return False
        return True

    def _identify(self, headers: Headers) -> tuple[Caller, bool]:
        """The caller, and whether a cookie says so."""
        session = None if self.sessions is None or _claims_token(headers) else cookie_of(headers)
        if self.sessions is not None and session is not None:
            return self._holder(self.sessions.token_of(session, self._wall())), True
        if self.tickets is not None and not _claims_token(headers) and (ticket := ticket_of(headers)) is not None:
            return self.tickets.holder(ticket, self._wall()), False
        token = _bearer(headers)
        if token is None:
            raise Unauthenticated("a token is needed: Authorization: Bearer TOKEN")
        # How long the look-up takes tells an attacker nothing: they cannot choose the hash of what they send.
        sha256 = digest_of(token).hex()
        return (self._fleet if sha256 in self._keys else self._holder(sha256)), False

    def _holder(self, sha256: str) -> Caller:
        entry, caller = self._known.get(sha256, (None, None))
        if entry is None or caller is None:
            raise Unauthenticated("the token is unknown here: it was revoked, or is for another service")
        if entry.expired(self._wall()):
            when = f"{entry.expires:%Y-%m-%d %H:%M %Z}"
            raise Unauthenticated(f"the token of {entry.name!r} has expired ({when}); ask for a new one")
        return caller

    def still_admits(self, caller: Caller) -> bool:
        """True if the token of an admitted caller is still valid, with the same role."""
        if caller.entry is None:
            return True
        entry, now = self._known.get(caller.entry.sha256, (None, caller))
        return entry is not None and now.role == caller.role and not entry.expired(self._wall())

    def revoked_of(self, tokens: Iterable[str]) -> tuple[str, ...]:
        """Return the ids among these whose tokens of workers were revoked or have expired."""
        found, now = ((token, self._workers.get(token)) for token in tokens), self._wall()
        return tuple(token for token, entry in found if entry is None or entry.expired(now))

    @property
    def invited_to(self) -> frozenset[str]:
        """The training runs that invitations are for."""
        return frozenset(entry.run for entry in self._workers.values() if entry.run is not None)

    @property
    def admits_nobody(self) -> bool:
        """True if there is a file of tokens, and none of them is valid now."""
        return self.path is not None and all(entry.expired(self._wall()) for entry, _ in self._known.values())

    def load(self) -> None:
        """Read the file again.

        Raises:
            SetupError: it cannot be used; the tokens stay as they were.
        """
        if self.path is None:
            return
        allowances: dict[str, Allowance] = {}
        known = {}
        for entry in read_book(self.path):
            allowance = allowances.get(entry.name) or self._allowances.get(entry.name) or Allowance(entry.name)
            if not entry.expired(self._wall()):
                allowance.adopt(entry)
            allowances[entry.name] = allowance
            role: Role = entry.role if entry.run is None else "guest"
            caller = Caller(name=entry.name, role=role, entry=entry, allowance=allowance)
            known[entry.sha256] = (entry, caller)
        self._allowances, self._known = allowances, known
        self._workers = {entry.id: entry for entry, _ in known.values() if entry.role == "worker"}


def _claims_token(headers: Headers) -> bool:
    return any(name == b"authorization" for name, _ in headers)


def _bearer(headers: Headers) -> bytes | None:
    """The token of the only Authorization header; None if there is none, or no bearer token."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    token = token.strip()
    return token if scheme.lower() == b"bearer" and 0 < len(token) <= _MAX_TOKEN_BYTES else None
