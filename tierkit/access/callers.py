"""Who has sent a request, as the gate has found out, and the limits of that caller. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tierkit.access.tokens import TokenEntry
from tierkit.errors import Forbidden, LimitReached
from tierkit.pacing import TokenBucket
from tierkit.types import Tier

__all__ = ["CALLER", "Allowance", "Caller", "Role"]

CALLER = "terrace.caller"
"""Key in the ASGI scope under which the gate leaves the caller; absent where a service is open to all."""

Role = Literal["user", "node", "fleet"]
"""`fleet`: the holders of a node's own key, its scheduler and the end nodes that the scheduler sends there."""


@dataclass(slots=True)
class Allowance:
    """What one name may still do. Holds two buckets and a set of job ids, however much is asked.

    A bucket holds one minute's worth, and may be overdrawn by what is charged after the fact. So in any minute at most
    twice the limit passes, and the limit on average.
    """

    name: str
    requests: TokenBucket | None = None
    upload: TokenBucket | None = None
    max_jobs: int | None = None
    jobs: set[str] = field(default_factory=set)
    """Unfinished jobs that it has submitted."""
    submitting: int = 0
    """Uploads under way that will be jobs."""

    def adopt(self, entry: TokenEntry) -> None:
        """Take over the limits of an entry, and keep what has been used up of those that stay."""
        self.requests = _bucket(self.requests, entry.requests_per_minute)
        self.upload = _bucket(self.upload, entry.upload_bytes_per_minute)
        self.max_jobs = entry.unfinished_jobs

    def take_request(self, now: float) -> None:
        """Count a request. Raises LimitReached when there were too many."""
        self._check(self.requests, "requests", now)
        if self.requests is not None:
            self.requests.take(now)

    def check_upload(self, now: float) -> None:
        """Before an upload is read. Raises LimitReached when earlier ones have used up the allowance."""
        self._check(self.upload, "bytes of uploads", now)

    def count_bytes(self, amount: int, now: float) -> None:
        """Bytes of an upload have come."""
        if self.upload is not None:
            self.upload.take(now, amount)

    def check_jobs(self) -> None:
        """Before a job is accepted. Raises LimitReached when too many are unfinished."""
        if self.max_jobs is not None and len(self.jobs) + self.submitting >= self.max_jobs:
            raise LimitReached(
                f"{self.name!r} may have {self.max_jobs} unfinished jobs, and has them now", retry_after_s=5.0
            )

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

    def need(self, *roles: Role) -> None:
        """Raises Forbidden for other roles."""
        if self.role not in roles:
            raise Forbidden(f"the token of {self.name!r} has the role {self.role}; this takes {' or '.join(roles)}")

    def check_claim(self, node_id: str, tier: Tier | None = None) -> None:
        """A node speaks for itself alone.

        Raises:
            Forbidden: its token is not for this node id, or not for this tier.
        """
        if self.role != "node" or self.entry is None:
            return
        if not self.entry.may_take(node_id):
            raise Forbidden(
                f"the token of {self.name!r} is not for the node id {node_id!r}; it is for "
                f"{', '.join(self.entry.nodes) or f'{self.name} and {self.name}-*'}"
            )
        if tier is not None and self.entry.tiers and tier not in self.entry.tiers:
            raise Forbidden(
                f"the token of {self.name!r} is not for {tier} nodes, only for {', '.join(self.entry.tiers)}"
            )
