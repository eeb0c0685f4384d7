"""Invitations in the token file: their limits, and the choice of those that make room for others. Pure; time is passed
in.

The names under which workers have come are written behind an invitation, so room for all of them is set aside when it
is made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tierkit.access import TokenEntry
from tierkit.access.editing import added
from tierkit.errors import LimitReached, Overloaded

__all__ = ["invited"]

_MOST = 20
"""Most invitations of one inviter that are valid at a time."""
_MOST_USES = 1_000
"""Most uses of all of them."""
_MOST_BYTES = 2 * 1024 * 1024
"""Most bytes of all invitations: half of the file's limit."""
_ENTRY_BYTES = 640
_USE_BYTES = 68
_AGAIN_S = 60.0


def invited(
    entries: Sequence[TokenEntry], entry: TokenEntry, *, now: float, ended: Collection[str]
) -> list[TokenEntry]:
    """The entries with one more invitation, without expired ones, and where room is needed without those to runs that
    have ended.

    Args:
        now: seconds since 1970.
        ended: runs that have ended or are forgotten.

    Raises:
        LimitReached: its inviter has too many.
        Overloaded: all inviters together have too many.
    """
    kept = [each for each in entries if each.run is None or not each.expired(now)]
    try:
        _check([*kept, entry], entry.inviter)
    except (LimitReached, Overloaded):
        kept = [each for each in kept if each.run not in ended]
        _check([*kept, entry], entry.inviter)
    return added(kept, entry)


def _check(entries: Sequence[TokenEntry], inviter: str | None) -> None:
    uses = [each.uses or 0 for each in entries if each.run is not None]
    theirs = [each.uses or 0 for each in entries if each.run is not None and each.inviter == inviter]
    for count, most, what in ((len(theirs), _MOST, "valid invitations"), (sum(theirs), _MOST_USES, "uses of them")):
        if count > most:
            raise LimitReached(
                f"{inviter!r} may have {most:,} {what} in all: end one ('terrace train uninvite'), or ask for less",
                retry_after_s=_AGAIN_S,
            )
    if len(uses) * _ENTRY_BYTES + sum(uses) * _USE_BYTES > _MOST_BYTES:
        raise Overloaded(
            "the file of tokens has no room for this invitation: ask for fewer uses, or later",
            retry_after_s=_AGAIN_S,
        )
