"""Sources of pictures as people see them: their state on a device, and their observations at the scheduler.

The node and the scheduler write these values as JSON, and the client reads them. Unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Protocol, TypedDict

import msgspec
from pydantic import BaseModel, ConfigDict

from tierkit.types import Health, Tier
from tierkit.wire.api import PictureAnswers
from tierkit.wire.observations import Observation

__all__ = [
    "ClassNames",
    "NumberRange",
    "ObservationPage",
    "SeenGap",
    "SeenPicture",
    "SourceFields",
    "SourceList",
    "SourceNow",
    "SourceRights",
    "SourceState",
    "SourcesReport",
    "SpoolState",
    "UplinkState",
    "seen_fields",
    "seen_picture",
]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, defer_build=True)


class SourceFields(TypedDict, total=False):
    """The optional fields of a `[[source]]` table. See the settings of the end node."""

    kind: str
    rate: float
    changed: float
    keep: Literal["none", "unsure", "all"]
    after: Literal["leave", "move", "delete"]
    move_to: str


class SourceState(_Value):
    """A source on its device."""

    name: str
    """Name of the source."""
    kind: str
    """stream, camera, folder, snapshot, push or a kind of another package."""
    url: str = ""
    """Without a user name or password."""
    state: str
    """starting, running, paused, finished, or waiting after a failure."""
    reason: str = ""
    """Reason why it does not run."""
    taken: int = 0
    """Pictures that were answered, since the node started."""
    skipped: int = 0
    """Pictures that hardly differed from the last one taken, or came too fast."""
    restarts: int = 0
    """Restarts after a failure, since the node started."""
    last_s: float | None = None
    """Seconds since the last picture; None before the first."""


class SpoolState(_Value):
    """The spool of a device."""

    bytes: int
    """Bytes on the disk."""
    size_bytes: int
    """Limit on `bytes`."""
    waiting_bytes: int = 0
    """Estimate of the room that answers and pictures take which have to leave the device. The rest may be dropped."""
    room_bytes: int = 0
    """Limit on `waiting_bytes`: beyond it some of that is dropped."""
    waiting_answers: int = 0
    """Answers that the scheduler does not have yet."""
    waiting_pictures: int = 0
    """Pictures that wait for a better answer, or for the scheduler."""
    dropped_pictures: int = 0
    """Pictures that were dropped because the spool was full."""
    lost_answers: int = 0
    """Answers that were dropped because the spool was full."""
    set_aside: str | None = None
    """Folder of a damaged spool that was set aside; None without one."""


class UplinkState(_Value):
    """The connection of a device to the scheduler and to upstream nodes."""

    online: bool
    """True if the device reaches the scheduler."""
    reason: str = ""
    """Reason why nothing leaves the device now."""
    route: str | None = None
    """Version of the route in force; None before the first."""
    spent_bytes: int = 0
    """Bytes sent and received in the last 24 hours."""
    bytes_per_day: int | None = None
    """The budget for that; None without one."""
    open: bool = True
    """False outside of the hours in which pictures may leave."""


class SourcesReport(_Value):
    """GET /v1/sources of a node: its sources, and what becomes of their pictures."""

    sources: tuple[SourceState, ...]
    """Sources of the device."""
    spool: SpoolState | None = None
    """Spool of the device; None if it has no sources."""
    uplink: UplinkState | None = None
    """Uplink of the device; None if it has no sources."""


class SeenPicture(PictureAnswers):
    """An observation: a picture of a source, and its answers."""

    node: str
    """Id of the device."""
    source: str
    """Name of the source."""
    sequence: int
    """Sequence number of the picture; it rises by one with each picture of the source."""
    revision: int = 0
    """Number of amendments so far."""
    taken_at: datetime | None = None
    """Time on the clock of the device. If the device did not know the time: by the scheduler's clock, or None on the
    device itself."""
    unsure: bool = False
    """True if the answer of the device's network is below the threshold."""
    waits: bool = False
    """True while the device still wants a better answer."""
    picture: bool = False
    """True if the scheduler has the picture itself."""
    release: int | None = None
    """Number of the release with whose network the device answered; None from a node that does not follow releases, and
    for an answer of a personal head."""
    audit: bool = False
    """True if the device was sure, and asked for an answer from above to compare the two."""
    person: str | None = None
    """The class that a person named; None without a label."""
    person_by: str | None = None
    """Name of that person's token; None if no token was asked for."""
    person_at: datetime | None = None
    """Time of the label; None without a label."""


class SourceRights(_Value):
    """The users who may see a source, by the names of their tokens. Operators see all."""

    owner: str | None = None
    """User who may pause and resume the source, and change its readers, as well as see it."""
    readers: tuple[str, ...] = ()
    """Users who may see the source and its observations."""


class SourceNow(_Value):
    """A source as the scheduler knows it."""

    node: str
    """Id of the device."""
    source: str
    """Name of the source."""
    owner: str | None = None
    """Name of a token; None: only operators may change it."""
    readers: tuple[str, ...] = ()
    """Names of tokens."""
    state: str = ""
    """The last word of its device: starting, running, paused, finished, or waiting after a failure. "" if unknown."""
    reason: str = ""
    """Reason why it does not run."""
    health: Health | None = None
    """Health of its node; None if the scheduler does not know the node now."""
    site: str | None = None
    """Site of its node; None: no site, or the scheduler does not know the node now."""
    heard_s: float | None = None
    """Seconds since the scheduler stored something of this source; None if nothing is stored."""
    last: SeenPicture | None = None
    """The observation with the highest number; None if it was lost, or is deleted."""
    last_picture: int | None = None
    """The number of the newest picture that the scheduler has; None without one."""
    waiting_answers: int | None = None
    """Answers in the spool of its node that the scheduler does not have; None if unknown, as are the next fields."""
    waiting_pictures: int | None = None
    """Pictures in the spool of its node."""
    spool_bytes: int | None = None
    """Estimated size of these answers and pictures, in bytes."""
    spool_size_bytes: int | None = None
    """Limit on `spool_bytes`."""
    spent_bytes: int | None = None
    """Bytes that the node sent and received in the last 24 hours."""
    bytes_per_day: int | None = None
    """The budget of the node; None without one."""


class SourceList(_Value):
    """GET /v1/sources: the sources that the caller may see, by node and name."""

    sources: tuple[SourceNow, ...]
    """Sources that the caller may see."""


class ObservationPage(_Value):
    """GET /v1/observations: one page of the observations that the caller may see, the newest first by `taken_at`."""

    observations: tuple[SeenPicture, ...]
    """Observations of this page."""
    next_cursor: str | None = None
    """For the next page, which may be there even if this one is short or empty; None on the last one."""


class NumberRange(_Value):
    """Sequence numbers of a source."""

    node: str
    """Id of the device."""
    source: str
    """Name of the source."""
    first: int
    """First sequence number of the range."""
    last: int
    """Last sequence number of the range."""


class SeenGap(_Value):
    """Observations that a device lost because its spool was full."""

    gap: NumberRange
    """Sequence numbers that were lost."""


class ClassNames(Protocol):
    """Names of classes by their numbers; a hierarchy has them."""

    @property
    def fine(self) -> Sequence[str]:
        """Names of the classes."""

    @property
    def coarse(self) -> Sequence[str]:
        """Names of the superclasses."""


def seen_picture(seen: Observation, *, node: str, taken_at: float | None, classes: ClassNames | None) -> SeenPicture:
    """An observation with the names of its classes. It takes the arguments of `seen_fields`."""
    return SeenPicture.model_validate(seen_fields(seen, node=node, taken_at=taken_at, classes=classes))


def seen_fields(seen: Observation, *, node: str, taken_at: float | None, classes: ClassNames | None) -> dict[str, Any]:
    """The fields of a `SeenPicture`, to write many of them.

    Args:
        taken_at: seconds since 1970.
        classes: None if they are not known. A class without a name is called by its number.
    """
    fine, coarse = (classes.fine, classes.coarse) if classes else ((), ())
    first: dict[str, Any] | None = None
    better: dict[str, Any] | None = None
    if (local := seen.local) is not None:
        first = {
            "index": local.label,
            "label": _name(coarse, local.label),
            "confidence": local.confidence,
            "node": node,
            "model": local.model,
            "sha256": local.sha256,
            "ms": None,
        }
    if (finer := seen.finer) is not None:
        better = {
            "index": finer.label,
            "label": _name(fine, finer.label),
            "confidence": finer.confidence,
            "coarse_index": finer.coarse_label,
            "coarse_label": _name(coarse, finer.coarse_label),
            "coarse_confidence": finer.coarse_confidence,
            "node": finer.node_id,
            "tier": finer.tier,
            "model": finer.model,
            "sha256": finer.sha256,
            "ms": None,
            "sent": None if finer.sent is None else _SENT | msgspec.to_builtins(finer.sent),
        }
    answer = better or first
    return {
        "node": node,
        "source": seen.source,
        "sequence": seen.sequence,
        "revision": seen.revision,
        "taken_at": None if taken_at is None else datetime.fromtimestamp(round(taken_at, 3), UTC),
        "name": seen.name or None,
        "release": seen.release or None,
        "label": None if answer is None else answer["label"],
        "confidence": None if answer is None else answer["confidence"],
        "answered_by": finer.tier if finer else Tier.END if first else None,
        "coarse": first,
        "fine": better,
        "unsure": seen.unsure,
        "waits": seen.waits,
        "fallback": (seen.reason or None) if answer else None,
        "damaged": None if answer else seen.reason or "the picture cannot be read",
        "picture": False,
        "audit": seen.audit,
        "person": None,
        "person_by": None,
        "person_at": None,
    }


_SENT = {"encode_ms": 0.0, "encoded_by": None, "relay_bytes": 0}


def _name(names: Sequence[str], label: int) -> str:
    return names[label] if label < len(names) else str(label)
