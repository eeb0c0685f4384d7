"""What the API answers besides `tierkit.wire.api`: the client hands these on as plain JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from scheduler.placement.adaptive.pilot import LinkEstimate, NodeEstimate
from tierkit.types import Scheme

__all__ = ["AdaptiveReport", "MappingReport", "Pair", "SignIn", "WhoAmI"]


class SignIn(BaseModel):
    """What a browser exchanges for a session."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(max_length=512)


class WhoAmI(BaseModel):
    """The holder of the token, or of the session, that came with the request; nulls where no token is asked for."""

    name: str | None = None
    role: str | None = None
    expires: datetime | None = None


class Pair(BaseModel):
    """Where an end device sends its tasks on."""

    end: str
    upstream: list[str] = Field(description="In the order in which the device tries them.")
    shared: int = Field(description="How many of them, from the first, take turns.")
    reason: str


class AdaptiveReport(BaseModel):
    """The estimates that the scheme `adaptive` decides by. Links appear once an answer has passed them."""

    nodes: list[NodeEstimate]
    links: list[LinkEstimate]


class MappingReport(BaseModel):
    """The mapping of the fleet as it is now, and the paper's formulas with its figures."""

    scheme: Scheme
    scheme_default: Scheme
    n_map: int | None = Field(description="Null where there is no end device or no edge node to compute it for.")
    n_map_reason: str
    theta_cloud: float | None
    pairs: list[Pair]
    formulas: dict[str, dict[str, Any]]
    adaptive: AdaptiveReport | None = Field(description="With the scheme `adaptive`.")
