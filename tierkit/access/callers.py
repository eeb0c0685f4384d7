"""Who has sent a request, as the gate has found out, and the limits of that caller. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tierkit.access.tokens import TokenEntry
from tierkit.errors import Forbidden, LimitReached
from tierkit.types import Tier

__all__ = ["CALLER", "Allowance", "Bucket", "Caller", "Role", "caller_of"]

CALLER = "terrace.caller"
"""Key in the ASGI scope under which the gate leaves the caller; absent where a service is open to all."""

Role = Literal["user", "node", "fleet"]
"""`fleet` is whoever holds a node's own key: its scheduler, and the end nodes that the scheduler sends there."""


@dataclass(slots=True)
class Bucket:
    """A token bucket: holds at most one minute's worth, fills evenly, and may be overdrawn by what is charged after
    the fact. So in any minute at most twice `per_minute` passes, and `per_minute` on average."""

    per_minute: int
    level: float
    filled_at: float

    def wait_s(self, now: float) -> float:
        """Seconds until there is one unit in it; 0 where there is."""
        self.level = min(self.per_minute, self.level + (now - self.filled_at) * self.per_minute / 60.0)
        self.filled_at = now
        return max(0.0, (1.0 - self.level) * 60.0 / self.per_minute)

    def charge(self, amount: int) -> None:
        """Take out so much, even if it is more than there is."""
        self.level -= amount


@dataclass(slots=True)
class Allowance:
    """What one name may still do. Holds two numbers and a set of job ids, however much is asked."""

    name: str
    requests: Bucket | None = None
    upload: Bucket | None = None
    max_jobs: int | None = None
    jobs: set[str] = field(default_factory=set)
    """Unfinished jobs that it has submitted."""
    submitting: int = 0
    """Uploads under way that will be jobs."""

    def adopt(self, entry: TokenEntry, now: float) -> None:
        """Take over the limits of an entry, and keep what has been used up of those that stay."""
        self.requests = _bucket(self.requests, entry.requests_per_minute, now)
        self.upload = _bucket(self.upload, entry.upload_bytes_per_minute, now)
        self.max_jobs = entry.unfinished_jobs

    def take_request(self, now: float) -> None:
        """Count a request.

        Raises:
            LimitReached: too many.
        """
        if self.requests is None:
            return
        if wait_s := self.requests.wait_s(now):
            raise LimitReached(
                f"{self.name!r} has used up its {self.requests.per_minute} requests a minute", retry_after_s=wait_s
            )
        self.requests.charge(1)

    def check_upload(self, now: float) -> None:
        """Before an upload is read.

        Raises:
            LimitReached: earlier ones have used up the allowance.
        """
        if self.upload is not None and (wait_s := self.upload.wait_s(now)):
            raise LimitReached(
                f"{self.name!r} has used up its {self.upload.per_minute} bytes of uploads a minute",
                retry_after_s=wait_s,
            )

    def count_bytes(self, amount: int) -> None:
        """So many bytes of an upload have come."""
        if self.upload is not None:
            self.upload.charge(amount)

    def check_jobs(self) -> None:
        """Before a job is accepted.

        Raises:
            LimitReached: too many are unfinished.
        """
        if self.max_jobs is not None and len(self.jobs) + self.submitting >= self.max_jobs:
            raise LimitReached(
                f"{self.name!r} has {len(self.jobs) + self.submitting} unfinished jobs, and no more than "
                f"{self.max_jobs} are allowed",
                retry_after_s=5.0,
            )


def _bucket(old: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if old is None or old.per_minute != per_minute:
        return Bucket(per_minute, float(per_minute), now)
    return old


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The holder of a token."""

    name: str
    role: Role
    entry: TokenEntry | None = None
    allowance: Allowance | None = None

    def need(self, *roles: Role) -> None:
        """Refuse other roles.

        Raises:
            Forbidden: the caller has none of these.
        """
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


def caller_of(scope: Mapping[str, Any]) -> Caller | None:
    """The caller of a request; None where the service is open to all."""
    caller: Caller | None = scope.get(CALLER)
    return caller
