"""Releases on the wire: numbered rows that name the networks which answer, and the trial of a new one.

`GET /v1/releases` answers with a `ReleaseList`. See `docs/how-to/releases.md`.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tierkit.types import Tier

__all__ = [
    "DEFAULT_FOR_S",
    "DEFAULT_GUARDS",
    "RELEASE_REF_PATTERN",
    "GuardName",
    "GuardNow",
    "NewRelease",
    "Pruned",
    "ReleaseList",
    "ReleaseNetwork",
    "ReleaseNow",
    "ReleaseState",
    "Rollout",
    "RolloutState",
    "StartRequest",
    "TroubleNow",
]

RELEASE_REF_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}@[1-9][0-9]{0,8}$"
"""NAME@NUMBER, such as flowers@8. The number identifies a release."""

GuardName = Literal["agreement", "p99", "errors"]

DEFAULT_GUARDS: dict[GuardName, float] = {"agreement": 0.97, "p99": 1.3, "errors": 0.005}
"""Guards of a canary for which the operator names none."""

DEFAULT_FOR_S = 7200.0


class ReleaseState(StrEnum):
    """State of a release in the fleet."""

    READY = "ready"
    """It has never been started."""
    CANARY = "canary"
    """A part of the fleet tries it."""
    ROLLING = "rolling out"
    """It has passed its trial, or was promoted, and is on its way to everyone."""
    IN_FORCE = "in force"
    """It answers."""
    RETIRED = "retired"
    """Another one took its place."""
    ROLLED_BACK = "rolled back"
    """It failed a guard, could not be loaded, or an operator took it back."""
    STOPPED = "stopped"
    """An operator ended its trial."""


class RolloutState(StrEnum):
    """The state of a change from one release to another: canary -> rolling out -> done, or an end on the way."""

    CANARY = "canary"
    ROLLING = "rolling out"
    DONE = "done"
    ROLLED_BACK = "rolled back"
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        """True if nothing of it is under way any more."""
        return self not in (RolloutState.CANARY, RolloutState.ROLLING)


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True, defer_build=True)


class ReleaseNetwork(_Value):
    """A network of a release."""

    name: str
    """Name of the network."""
    tier: Tier
    """Tier whose nodes serve it."""
    sha256: str
    """sha256 of its file."""
    gpu: bool = False
    """True if only nodes with a GPU serve it by default."""
    target: str
    """Labels that it answers with: `coarse` or `fine`."""
    size_bytes: int
    """Size of its file, in bytes."""
    accuracy: float | None = None
    """Accuracy on its test images, 0 to 1; None if unknown."""
    test_images: int = 0
    """Pictures on which it was measured; 0 if that is not known."""
    nodes: int = 0
    """Nodes on the device list, not given up, that hold it."""


class TroubleNow(_Value):
    """A node that cannot hold a release."""

    node_id: str
    """Id of the node."""
    kind: str
    """`room` (its disk or memory is full), `unusable` (the network cannot be loaded, or gives NaN), `unreachable` (the
    file cannot be fetched now), or `differs` (its answers to the probe pictures are wrong)."""
    detail: str
    """Explanation in words."""


class ReleaseNow(_Value):
    """A release as it is now."""

    release: str
    """Name and number of the release: NAME@NUMBER."""
    name: str
    """Name of the release, without its number."""
    number: int
    """Number of the release, which identifies it."""
    state: ReleaseState
    """Role of the release in the fleet now."""
    digest: str
    """sha256 of its content: manifest and thresholds."""
    created_at: datetime
    """Time at which it was made."""
    created_by: str = ""
    """Name of the token; "" without tokens, or where the scheduler made it from its own model set."""
    origin: str = ""
    """Folder of the scheduler from which it was made; "" if it was uploaded."""
    classes: int
    """Number of the classes of the finest tier."""
    networks: tuple[ReleaseNetwork, ...]
    """Networks of the release."""
    encoders: tuple[str, ...] = ()
    """Names of its encoders."""
    thresholds: bool = False
    """True if it has tuned thresholds for escalation."""
    probes: int = 0
    """Networks whose answers to the probe pictures are known, so that nodes can be checked."""
    nodes: int = 0
    """Nodes that hold it: those that may get its work."""
    jobs: int = 0
    """Unfinished jobs that belong to it."""
    troubles: tuple[TroubleNow, ...] = ()
    """Nodes that cannot hold it."""


class GuardNow(_Value):
    """A condition that rolls a release back, and the figures so far."""

    name: GuardName
    """agreement: agreement with the tier above. p99: 99th percentile of milliseconds per image. errors: share of failed
    attempts."""
    limit: float
    """For `agreement`, the least ratio of the new release's agreement to the old one's. For `p99`, the largest ratio of
    their 99th percentiles of milliseconds per image. For `errors`, the largest share of failed attempts."""
    old: float | None = None
    """Figure of the release in force in the same period: agreement from 0 to 1, milliseconds per image, or share."""
    new: float | None = None
    """Figure of the new release in the same period."""
    value: float | None = None
    """Value that is compared with the limit."""
    low: float | None = None
    """Lower end of the confidence interval of `value`."""
    high: float | None = None
    """Confidence interval of `value`."""
    samples: int = 0
    """Number of samples of the new release."""
    old_samples: int = 0
    """Number of samples of the release in force."""
    needs: int = 0
    """Samples of each release without which the guard decides nothing."""
    verdict: Literal["open", "holds", "fails"] = "open"
    """open: too few samples. holds: the limit is kept. fails: the release is rolled back."""
    detail: str = ""
    """The figures as a sentence."""


class Rollout(_Value):
    """A change from one release to another."""

    release: str
    """NAME@NUMBER of the new release."""
    previous: str
    """The release to which a roll-back returns."""
    kind: Literal["canary", "promote", "rollback", "first"]
    """first: there was none in force before."""
    state: RolloutState
    """State of the change; `done`, `rolled back` and `stopped` are final."""
    share: float
    """Share of the end devices, and of new jobs, that use the new release now."""
    canary: float
    """Share of the end devices, and of new jobs, during the trial."""
    guards: tuple[GuardNow, ...] = ()
    """Conditions of the trial, with the figures so far; empty without a trial."""
    for_s: float = 0.0
    """Length of the trial."""
    elapsed_s: float = 0.0
    """Seconds of the trial so far."""
    extended: bool = False
    """True if the trial was extended by its own length, because there was too little data."""
    devices: tuple[str, ...] = ()
    """End devices that use the new release now, at most 100."""
    device_count: int = 0
    """Number of the end devices that use the new release now."""
    wanted: int = 0
    """Nodes that are to hold the new release."""
    ready: int = 0
    """Nodes among these that hold it."""
    started_at: datetime
    """Time at which the change began."""
    started_by: str = ""
    """Name of the token that began it; "" without tokens."""
    ended_at: datetime | None = None
    """Time of its end; None while it is under way."""
    reason: str = ""
    """Reason why it ended, with the figures; or what it waits for."""


class ReleaseList(_Value):
    """All releases, the newest first."""

    in_force: str
    """NAME@NUMBER of the release that answers."""
    previous: str | None = None
    """The one to which `rollback` returns; None if there is none."""
    rollout: Rollout | None = None
    """The change that is under way."""
    releases: tuple[ReleaseNow, ...]
    """Releases, the newest first."""
    history: tuple[Rollout, ...] = ()
    """The latest changes that have ended, the newest first."""


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class NewRelease(_Request):
    """POST /v1/releases: a release of networks whose files the scheduler has (`PUT /v1/networks/{sha256}`)."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Name of the release; the scheduler adds the number."""
    manifest: dict[str, Any] | None = None
    """Content of `manifest.json`. None: the model set of the scheduler's own folder."""
    tuning: dict[str, Any] | None = None
    """Content of `escalation.json`, if there are tuned thresholds."""


class StartRequest(_Request):
    """POST /v1/releases/{release}/start: try it on a part of the fleet."""

    canary: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the end devices, and of new jobs."""
    guards: Annotated[dict[GuardName, Annotated[float, Field(gt=0, le=1000)]], Field(min_length=1)] = Field(
        default_factory=lambda: DEFAULT_GUARDS
    )
    """Limits of the trial by name: at least one of `agreement`, `p99` and `errors`. See `GuardNow`."""
    for_s: Annotated[float, Field(ge=1, le=30 * 24 * 3600)] = DEFAULT_FOR_S
    """Length of the trial in seconds, at most 30 days. A trial with too little data is extended once."""


class Pruned(_Value):
    """Releases and files that were removed, or would be."""

    releases: tuple[str, ...]
    """NAME@NUMBER of the removed releases."""
    files: tuple[str, ...]
    """sha256 of networks that no release refers to any more."""
    bytes: int
    """Size of the removed files, in bytes."""
    dry_run: bool
    """True if nothing was removed."""
