"""Callers of a service, as the authenticator has found them, and the rate limit of each. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tierkit.access.tokens import TokenEntry
from tierkit.errors import Forbidden, LimitReached
from tierkit.pacing import TokenBucket
from tierkit.types import Tier

__all__ = ["CALLER", "Allowance", "Caller", "Role"]

CALLER = "terrace.caller"
"""Key in the ASGI scope under which the authenticator puts the caller; absent if a service is open to all."""

Role = Literal["user", "operator", "admin", "node", "worker", "guest", "fleet"]
"""Roles of tokens, and two more. `guest`: a worker with an invitation to one training run. `fleet`: the holders of a
node's own key, its scheduler and the end nodes that the scheduler sends there."""

_INCLUDES: Mapping[Role, tuple[Role, ...]] = {"operator": ("user",), "admin": ("operator", "user")}
"""Further roles whose rights a role includes."""

_AGAIN_S = 5.0
_MOST_NAMED = 20
"""Sites in a sentence."""


@dataclass(slots=True)
class Allowance:
    """Remaining limits of one name: three buckets and three counts, whatever the number of requests.

    A bucket holds one minute's worth, and may be overdrawn by what is charged after the fact. So in any minute at most
    twice the limit passes, and the limit on average.
    """

    name: str
    requests: TokenBucket | None = None
    upload: TokenBucket | None = None
    observations: TokenBucket | None = None
    max_jobs: int | None = None
    max_uploads: int | None = None
    max_streams: int | None = None
    submitting: int = 0
    """Uploads under way that will be jobs, and interactive requests."""
    uploads: int = 0
    """Uploads under way."""
    streams: int = 0
    """Open event streams."""

    def adopt(self, entry: TokenEntry) -> None:
        """Take over the limits of an entry, and keep what has been used up of those that stay."""
        self.requests = _bucket(self.requests, entry.requests_per_minute)
        self.upload = _bucket(self.upload, entry.upload_bytes_per_minute)
        self.observations = _bucket(self.observations, entry.observations_per_minute)
        self.max_jobs, self.max_uploads, self.max_streams = entry.unfinished_jobs, entry.uploads, entry.streams

    def take_request(self, now: float) -> None:
        """Count a request. Raises LimitReached when there were too many."""
        self._check(self.requests, "requests", now)
        if self.requests is not None:
            self.requests.take(now)

    def check_upload(self, now: float) -> None:
        """Check the allowance before an upload is read. Raises LimitReached when earlier ones have used up the
        allowance."""
        self._check(self.upload, "bytes of uploads", now)

    def count_bytes(self, amount: int, now: float) -> None:
        """Bytes of an upload have come."""
        if self.upload is not None:
            self.upload.take(now, amount)

    def check_observations(self, now: float) -> None:
        """Check the allowance before a batch is read. Raises LimitReached when earlier ones have used up the
        allowance."""
        self._check(self.observations, "observations", now)

    def count_observations(self, amount: int, now: float) -> None:
        """Count the observations of a batch that has come."""
        if self.observations is not None:
            self.observations.take(now, amount)

    @contextmanager
    def submits(self, unfinished: int, *, check: bool = True) -> Iterator[None]:
        """Count an upload that will be a job, or an interactive request. Raises LimitReached when too many are
        unfinished.

        Args:
            unfinished: jobs of this name that wait or run.
            check: True if it adds to them.
        """
        if check:
            self._check_jobs(unfinished)
        self.submitting += 1
        try:
            yield
        finally:
            self.submitting -= 1

    def _check_jobs(self, unfinished: int) -> None:
        if self.max_jobs is not None and unfinished + self.submitting >= self.max_jobs:
            raise self._too_many(self.max_jobs, "unfinished jobs")

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Count an upload. Raises LimitReached when too many are under way."""
        if self.max_uploads is not None and self.uploads >= self.max_uploads:
            raise self._too_many(self.max_uploads, "uploads under way")
        self.uploads += 1
        try:
            yield
        finally:
            self.uploads -= 1

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Count an event stream. Raises LimitReached when too many are open."""
        if self.max_streams is not None and self.streams >= self.max_streams:
            raise self._too_many(self.max_streams, "event streams open")
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1

    def _too_many(self, most: int, what: str) -> LimitReached:
        return LimitReached(f"{self.name!r} may have {most} {what}, and has them now", retry_after_s=_AGAIN_S)

    def _check(self, bucket: TokenBucket | None, what: str, now: float) -> None:
        if bucket is not None and (wait_s := bucket.wait_s(now)):
            raise LimitReached(
                f"{self.name!r} has used up its {bucket.burst:.0f} {what} a minute", retry_after_s=wait_s
            )


def _bucket(old: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
    if old is not None and old.burst == per_minute:
        return old
    return None if per_minute is None else TokenBucket(per_s=per_minute / 60, burst=per_minute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The holder of a token."""

    name: str
    role: Role
    entry: TokenEntry | None = None
    allowance: Allowance | None = None

    def may(self, role: Role) -> bool:
        """True if it has the rights of a role."""
        return role in (self.role, *_INCLUDES.get(self.role, ()))

    def need(self, *roles: Role) -> None:
        """Raises Forbidden without the rights of one of these roles."""
        if not any(map(self.may, roles)):
            raise Forbidden(f"the token of {self.name!r} has the role {self.role}; this takes {' or '.join(roles)}")

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites to which its token is limited; none: all."""
        return () if self.entry is None else self.entry.sites

    def site_of_node(self, wanted: str | None) -> str | None:
        """The site of a node that registers with this token: as it asks, or the only one of the token.

        Raises:
            Forbidden: the token is for other sites, or for several and the node names none.
        """
        if not self.sites or wanted in self.sites:
            return wanted
        if wanted is None and len(self.sites) == 1:
            return self.sites[0]
        named = "no site" if wanted is None else f"the site {wanted!r}"
        raise Forbidden(
            f"the token of {self.name!r} is for nodes of the site {' or '.join(self.sites[:_MOST_NAMED])}, and this "
            f"one names {named}: start the node with --site and one of these"
        )

    def check_claim(self, node_id: str, tier: Tier | None = None) -> None:
        """Check that a node or a worker speaks only for itself.

        Raises:
            Forbidden: its token is not for this id, or not for this tier.
        """
        if self.role not in ("node", "worker", "guest") or self.entry is None:
            return
        if not self.entry.may_take(node_id):
            hint = "" if self.role == "node" else ": start the worker with --name and such a name"
            raise Forbidden(
                f"the token of {self.name!r} is not for the {self.role} id {node_id!r}; it is for "
                f"{', '.join(self.entry.nodes) or f'{self.name} and {self.name}-*'}{hint}"
            )
        if tier is not None and self.entry.tiers and tier not in self.entry.tiers:
            raise Forbidden(
                f"the token of {self.name!r} is not for {tier} nodes, only for {', '.join(self.entry.tiers)}"
            )
