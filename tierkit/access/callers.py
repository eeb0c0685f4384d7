"""Who has sent a request, as the gate has found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tierkit.access.limits import Allowance
from tierkit.access.tokens import TokenEntry
from tierkit.errors import Forbidden
from tierkit.types import Tier

__all__ = ["CALLER", "Caller", "Role", "caller_of"]

CALLER = "terrace.caller"
"""Key in the ASGI scope under which the gate leaves the caller; absent where a service is open to all."""

Role = Literal["user", "node", "fleet"]
"""`fleet` is whoever holds a node's own key: its scheduler, and the end nodes that the scheduler sends there."""


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
