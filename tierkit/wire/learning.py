"""Learning as people see it: what devices keep, how far the tiers agree, what people labelled, and improvements."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from tierkit.types import Tier
from tierkit.wire.messages import PLAIN
from tierkit.wire.releases import RELEASE_REF_PATTERN

__all__ = [
    "MOST_LABEL",
    "Improvement",
    "ImprovementList",
    "ImprovementState",
    "KeptState",
    "LabelNews",
    "LabelOfPerson",
    "LearningNow",
    "NewLabel",
    "NodeLearning",
]

ImprovementState = Literal["training", "evaluating", "paused", "released", "refused", "failed"]
"""`paused`: the command has ended before the improvement was done, and the same command continues it."""

_MOST_FIGURES = 64
MOST_LABEL = 200
"""Characters of the name of a class in a label."""

ReleaseRef = Annotated[str, Field(pattern=RELEASE_REF_PATTERN)]
Figure = Annotated[FiniteFloat, Field(strict=True)]
FigureName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]


def _no_number(value: object) -> object:
    """Refuse a number, which pydantic takes for seconds since 1970."""
    if isinstance(value, int | float) or (isinstance(value, str) and re.fullmatch(r"[-+0-9._e]*", value)):
        raise ValueError("write a date and a time")
    return value


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False)


class KeptState(_Value):
    """The kept sample of a device, as the device reports it."""

    pictures: int = 0
    """Number of kept pictures."""
    differs: int = 0
    """Pictures with different coarse answers."""
    unsure: int = 0
    """Pictures with the same answers, of which the local one was unsure."""
    sure: int = 0
    """Pictures with the same answers, of which the local one was sure."""
    labelled: int = 0
    """Pictures with a label of a person."""
    bytes: int = 0
    """Size of the kept pictures, in bytes."""
    size_bytes: int = 0
    """Limit on `bytes`."""
    reason: str = ""
    """Reason why no picture is kept now."""
    personal: bool = False
    """True if a personal head answers the pictures of its sources."""
    personal_reason: str = ""
    """Reason why the newest personal head is not used."""


class NodeLearning(_Value):
    """A device that keeps pictures, or whose sure pictures are audited."""

    node: str
    """Id of the device."""
    kept: KeptState | None = None
    """Kept sample of the device; None if it keeps none, or has not reported since the scheduler started."""
    audited: int = 0
    """Sure pictures with an answer from above, of the latest 1,000."""
    agreement: float | None = None
    """Share of them with the same coarse class; None without any."""


class NewLabel(BaseModel):
    """PUT /v1/observations/{node_id}/{source}/{sequence}/label: the class that is right."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    label: Annotated[str, Field(min_length=1, max_length=MOST_LABEL)]
    """Name of a class."""


class LabelOfPerson(_Value):
    """The label of a picture; the device that took it reads this."""

    number: int
    """Number of the change; it rises with each label that is set or taken back."""
    source: str
    """Source of the picture."""
    sequence: int
    """Sequence number of the picture."""
    label: int | None = None
    """Index of the class; None: the label was taken back."""
    classes: str
    """Digest of the class names."""
    by: str | None = None
    """Name of a token; None if no token was asked for."""
    at: float
    """Seconds since 1970."""


class LabelNews(_Value):
    """GET /v1/devices/{node_id}/labels: labels of the pictures of one device, in the order in which they were set."""

    labels: tuple[LabelOfPerson, ...] = ()
    """Labels that were set or taken back."""
    more: bool = False
    """True if there are more after the last one."""


class LearningNow(_Value):
    """GET /v1/learning."""

    nodes: tuple[NodeLearning, ...]
    """Devices that keep pictures, or whose sure pictures are audited."""
    audited: int = 0
    """Sure pictures with an answer from above, of all devices together."""
    agreement: float | None = None
    """Share of the audited pictures with the same coarse class; None without any."""
    labels: int = 0
    """Pictures at the scheduler that people have labelled."""


class Improvement(_Value):
    """One run of the loop, from a release to a better one. `PUT /v1/improvements/{id}` replaces it as a whole."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Id of the improvement, 32 hex digits, chosen by the command that makes it."""
    release: ReleaseRef
    """The release that it starts from."""
    tier: Tier
    """Tier whose network is improved."""
    state: ImprovementState
    """State of the improvement; `released`, `refused` and `failed` are final."""
    devices: Annotated[int, Field(ge=0, le=1_000_000), PLAIN] = 0
    """Devices with updates in the weights."""
    rounds: Annotated[int, Field(ge=0, le=10_000_000), PLAIN] = 0
    """Rounds of training so far."""
    figures: Annotated[dict[FigureName, Figure], Field(max_length=_MOST_FIGURES)] = {}
    """Results by name: `validation_new` is one."""
    reason: Annotated[str, Field(max_length=500)] = ""
    """Reason why it is paused, was refused, or has failed."""
    new_release: ReleaseRef | None = None
    """Release that was made from it; None before."""
    created_at: Annotated[datetime, BeforeValidator(_no_number)] | None = None
    """Time at which the scheduler first heard of it; the scheduler fills this in."""
    told_at: Annotated[datetime, BeforeValidator(_no_number)] | None = None
    """Time at which the scheduler last heard of it; the scheduler fills this in."""
    by: Annotated[str, Field(max_length=128)] | None = None
    """Name of the token; the scheduler fills this in."""


class ImprovementList(_Value):
    """GET /v1/improvements: the newest first."""

    improvements: tuple[Improvement, ...]
    """Improvements, at most 100."""
