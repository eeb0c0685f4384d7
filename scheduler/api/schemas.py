"""What the API answers besides `tierkit.wire.api`: the client hands these on as plain JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tierkit.types import Scheme, Tier

__all__ = ["AdaptiveReport", "LinkReport", "MappingReport", "NodeReport", "Pair", "WhoAmI"]

Milli = Annotated[float, AfterValidator(lambda value: round(value, 3))]
TenthOfMilli = Annotated[float, AfterValidator(lambda value: round(value, 4))]


class _Report(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class WhoAmI(BaseModel):
    """The holder of the token that came with the request; nulls where no token is asked for."""

    name: str | None = None
    role: str | None = None
    expires: datetime | None = None


class Pair(BaseModel):
    """Where an end device sends its tasks on."""

    end: str
    upstream: list[str] = Field(description="In the order in which the device tries them.")
    shared: int = Field(description="How many of them, from the first, take turns.")
    reason: str


class NodeReport(_Report):
    """What the scheme `adaptive` thinks of a node now."""

    node_id: str
    tier: Tier
    ms_per_image: TenthOfMilli
    samples: int = Field(description="Answers that this comes from; 0: the node's own measurement at its start.")
    tasks: int = Field(description="On their way to it, waiting there or being computed.")
    backlog_s: Milli = Field(description="Until it will be done with them.")


class LinkReport(_Report):
    """What it thinks of the link between an end device and an upstream node."""

    end: str
    upper: str
    seconds: TenthOfMilli = Field(description="There and back, without the work in between.")
    samples: int


class AdaptiveReport(BaseModel):
    """The estimates that the scheme `adaptive` decides by. Links appear once an answer has passed them."""

    nodes: list[NodeReport]
    links: list[LinkReport]


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
