"""The table `[trust]` of a strategy, which sets how a run judges its workers."""

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
    """Share of the workers that may cheat. A trimmed mean leaves out this share at each end."""
    updates: int | None = Field(default=None, ge=FEWEST, le=MOST)
    """Number of updates judged together by a server rule; by default the number of the run's workers. With an outer
    rule, all updates of a round are judged together.
    """
    deviation: float = Field(default=4.0, gt=0)
    """Number of standard deviations by which an update may be further from the centre than the others."""
    quarantine: float = Field(default=0.2, ge=0, lt=0.5)
    """A worker with a lower score is in quarantine. Scores begin at 0.5; with 0 there is no quarantine."""
    recheck: float = Field(default=0.0, ge=0, le=1)
    """Share of the units of which the host computes an update again."""
    tolerance: float = Field(default=0.02, ge=0, lt=1)
    """Largest difference of an update that is computed again, as a fraction of its length. 0 demands equality to the
    bit, if all machines are of one kind.
    """
