"""How far a run trusts its workers: the table `[trust]` of a strategy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tierkit.documents import Strict

__all__ = ["FEWEST", "MOST", "Centre", "TrustConfig"]

FEWEST, MOST = 3, 64
"""Updates that are judged together: two say nothing about which of them is wrong, and all are kept in memory."""

Centre = Literal["median", "trimmed-mean"]


class TrustConfig(Strict):
    """Updates are judged several at a time, and their robust centre is what changes the weights."""

    centre: Centre = "median"
    cheaters: float = Field(default=0.3, ge=0, lt=0.5)
    """Share of the workers that may cheat: what a trimmed mean leaves out at each end."""
    updates: int | None = Field(default=None, ge=FEWEST, le=MOST)
    """How many are judged together, for a server rule; as many as the run has workers unless given. For an outer rule
    they are those of a round."""
    deviation: float = Field(default=4.0, gt=0)
    """How many standard deviations an update may lie further from the centre than the others do."""
    quarantine: float = Field(default=0.2, ge=0, lt=0.5)
    """A worker whose score is lower is in quarantine. Scores begin at 0.5; with 0 nobody is."""
    recheck: float = Field(default=0.0, ge=0, le=1)
    """Share of the units of which the host computes an update again."""
    tolerance: float = Field(default=0.02, ge=0, lt=1)
    """By how much of its own length an update that is computed again may differ; 0 where all machines are of a kind,
    and every bit must be the same."""
