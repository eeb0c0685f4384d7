"""What operators have said of a node, and what is kept of it when the scheduler stops. Values."""

from __future__ import annotations

from dataclasses import dataclass

from tierkit.wire.messages import Registration

__all__ = ["NO_INTENT", "Intent", "KnownNode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What operators want with a node. It holds until they take it back, over restarts of the node and of the
    scheduler."""

    drained: bool = False
    """It gets no new tasks."""
    removed: bool = False
    """It may not register."""
    trusted: bool | None = None
    """Whether it may see pixels; None: as the setting `trusted` says."""
    by: str = ""
    """Who said so last; "" where no tokens are asked for."""

    @property
    def of_whom(self) -> str:
        """For the end of a sentence."""
        return f" by {self.by or 'an operator'}"


NO_INTENT = Intent()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNode:
    """A node as the database remembers it."""

    registration: Registration
    """Its last one, without the key, which ends with its process."""
    intent: Intent = NO_INTENT
