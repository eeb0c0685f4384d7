"""Options and state of an improvement of a release: the file `improve.json`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tierkit.documents import Frozen
from tierkit.types import Tier
from tierkit.wire.learning import Improvement, ImprovementState
from training.improve.plan import IMPROVE, STRATEGY_NAME
from training.strategies.config import HostedConfig

__all__ = ["ImproveState", "ImproveWish"]

_MOST_REASON = 500


class ImproveWish(Frozen):
    """The options of an improvement that must be the same for each start of one folder."""

    release: str
    """NAME@NUMBER, in force."""
    tier: str = "end"
    rounds: Annotated[int, Field(ge=1, le=10_000)] = 20
    layers: Annotated[int, Field(ge=0, le=10_000)] = 0
    devices: Annotated[int, Field(ge=1, le=10_000)] = 3
    batch: Annotated[int, Field(ge=1, le=4_096)] = 32
    rate: Annotated[float, Field(gt=0, le=10)] = 0.01
    least_confidence: Annotated[float, Field(ge=0, le=1)] = 0.7
    mirror: bool = True
    choice: str = STRATEGY_NAME
    strategy: Annotated[HostedConfig, Field(discriminator="family")] = IMPROVE


class ImproveState(BaseModel):
    """The state of an improvement."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    wish: ImproveWish
    created_at: datetime
    state: ImprovementState = "training"
    devices: int = 0
    """Devices whose updates are in the weights."""
    figures: dict[str, float] = Field(default_factory=dict)
    passes: bool | None = None
    """True if it may become a release; None before it is judged."""
    verdict: str = ""
    """The figures that decided; "" before it is judged."""
    temperature: float | None = None
    reason: str = ""
    new_release: str | None = None
    started: bool = False
    """True once the trial of the new release has begun."""

    def told(self) -> Improvement:
        """The same for the scheduler, which takes short reasons only."""
        return Improvement(
            id=self.id,
            release=self.wish.release,
            tier=Tier(self.wish.tier),
            state=self.state,
            devices=self.devices,
            rounds=self.wish.rounds,
            figures=self.figures,
            reason=self.reason[:_MOST_REASON],
            new_release=self.new_release,
        )
