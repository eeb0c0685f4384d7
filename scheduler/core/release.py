"""Releases: the networks that answer, and the change from one release to another. Pure.

A change goes from `canary` (a part of the end devices tries the new release) over `rolling out` (the part doubles) to
`done`. Or it ends in the state `rolled back` or `stopped`. `advance` decides on each step; `docs/how-to/releases.md`
states the rules.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from models.escalation import Tuning
from models.manifest import Manifest
from scheduler.core.guards import Step
from tierkit.errors import NotFound
from tierkit.tensors import Array
from tierkit.types import Tier
from tierkit.wire.messages import ModelOffer, Registration, classes_digest
from tierkit.wire.releases import ReleaseState, RolloutState

__all__ = [
    "MOST_LIVE",
    "FleetProgress",
    "LiveReleases",
    "NetworkSet",
    "Release",
    "ReleaseChange",
    "advance",
    "chosen",
    "digest_of",
    "named_like",
    "number_of",
    "rank",
    "state_of",
    "wanted",
    "with_both_sides",
]

MOST_LIVE = 4
"""Releases that a node holds at a time."""
_LONGEST_STEP_S = 600.0
_STEPS = 10
"""A step of a roll-out takes this part of the trial."""
_AWAY_S = 30.0
"""A step waits no longer for nodes that do not load the release."""
_REF = re.compile(r"(?:(?P<name>[a-z0-9][a-z0-9._-]{0,62})@)?(?P<number>[1-9][0-9]{0,8})")


class Release(Struct, frozen=True, kw_only=True):
    """The networks that answer, as a numbered row."""

    number: int
    name: str
    manifest: Manifest
    tuning: Tuning | None = None
    created_at: float
    """Seconds since 1970."""
    created_by: str = ""
    origin: str = ""
    """Folder of the scheduler from which it was made; "" if it was uploaded."""

    @property
    def ref(self) -> str:
        """Name and number of the release: NAME@NUMBER."""
        return f"{self.name}@{self.number}"

    @property
    def digest(self) -> str:
        """sha256 of its content: two releases with the same one give the same answers."""
        return digest_of(self.manifest, self.tuning)

    def fits_beside(self, other: Release) -> bool:
        """True if nodes can hold both at a time: they have the same classes and take pictures in the same form."""
        one, two = self.manifest, other.manifest
        return one.hierarchy.digest == two.hierarchy.digest and one.fit == two.fit


def digest_of(manifest: Manifest, tuning: Tuning | None) -> str:
    """sha256 of a release's content."""
    thresholds = "" if tuning is None else tuning.model_dump_json()
    return hashlib.sha256(manifest.as_json() + thresholds.encode()).hexdigest()


def named_like(manifest: Manifest, present: Manifest) -> Manifest:
    """The manifest with the hierarchy's name of the present one, if their classes are the same. An import names a
    hierarchy after the folder of its model set, and the same networks may be in several folders."""
    new, old = manifest.hierarchy, present.hierarchy
    if new.name == old.name or (new.fine, new.coarse, new.parent) != (old.fine, old.coarse, old.parent):
        return manifest
    return Manifest.model_validate({**manifest.content(), "hierarchy": old.content()})


def number_of(ref: str) -> tuple[int, str | None]:
    """Number and name in NAME@NUMBER, or only the number. Raises NotFound."""
    found = _REF.fullmatch(ref)
    if found is None:
        raise NotFound(f"no release is called {ref[:80]!r}: name it as NAME@NUMBER, such as flowers@8")
    return int(found["number"]), found["name"]


class NetworkSet:
    """The networks of a release, as placement asks for them."""

    def __init__(self, manifest: Manifest) -> None:
        self.fine_models = [entry.name for entry in manifest.models if entry.target == "fine"]
        self.encoders = manifest.encoders
        self.cut = [encoder.name for encoder in manifest.encoders if encoder.is_cut]
        self.encoded_tiers = {Tier(manifest.entry(encoder.network).tier) for encoder in manifest.encoders}
        self.offered = manifest.offered
        self.accuracy = {entry.sha256: entry.accuracy for entry in manifest.models}
        hierarchy = manifest.hierarchy
        self.fine_classes = {"", classes_digest(hierarchy.fine)}
        self.classes = {*self.fine_classes, classes_digest(hierarchy.coarse)}

    def is_of_it(self, offer: ModelOffer) -> bool:
        """True if the release has an offered model: the same name, weights and reading of pictures."""
        sha256, reading = self.offered.get(offer.name, ("", ""))
        return offer.sha256 == sha256 and offer.reading in ("", reading)

    def offer_of(self, registration: Registration, differing: Collection[str] = ()) -> ModelOffer | None:
        """The model of the release that a node is asked for: a fine one above the end devices, if it holds one; None
        if it holds nothing of the release.

        Args:
            differing: sha256 of models whose answers were wrong.
        """
        offers = [o for o in registration.models if self.is_of_it(o) and o.sha256 not in differing]
        if registration.tier is not Tier.END:
            # What is cut from a network has its weights: those are what thresholds were tuned for.
            first = next((o for names in (self.fine_models, self.cut) for o in offers if o.name in names), None)
            if first is not None:
                return first
        return offers[0] if offers else None

    def network_of(self, offer: ModelOffer) -> str:
        """The network that a node is asked for: one that serves only tails is asked for their network."""
        return next((encoder.network for encoder in self.encoders if encoder.name == offer.name), offer.name)


# --- the change from one release to another ---------------------------------------------------------------------------


class ReleaseChange(Struct, frozen=True, kw_only=True):
    """A change from one release to another."""

    id: int
    release: int
    previous: int
    kind: Literal["canary", "promote", "rollback", "first"]
    state: RolloutState
    share: float
    """Share of the end devices and of new jobs that use the new release."""
    canary: float = 1.0
    guards: Mapping[str, float] = {}
    for_s: float = 0.0
    begun: float
    """Elapsed time; so are `ready` and `stepped`."""
    ready: float | None = None
    """Time at which the first devices of the canary held the release: its trial began."""
    stepped: float
    """Time at which the present step began."""
    extended: bool = False
    seeds: tuple[str, ...] = ()
    """End devices that use it whatever their hash: a small fleet has a canary, too."""
    spared: tuple[str, ...] = ()
    """End devices that use the previous release until the share is 1: the guards compare with their figures."""
    started_at: float
    """Seconds since 1970."""
    by: str = ""
    ended_at: float | None = None
    reason: str = ""

    def trial_s(self, now: float) -> float:
        """Seconds of its trial so far."""
        return 0.0 if self.ready is None else now - self.ready


class FleetProgress(Struct, frozen=True, kw_only=True):
    """The progress of the fleet with a change."""

    wanted: int
    """Nodes that are alive and are to hold the new release."""
    ready: int
    """Number of nodes that hold it."""
    ends_ready: int
    """The end devices among them."""
    unusable: str = ""
    """A node says that the release cannot be used, and why; "" if none does."""
    trouble: str = ""
    """Reason why a node does not hold it yet; "" if none says so."""

    @property
    def settled(self) -> bool:
        return 0 < self.ready == self.wanted


def rank(release: int, node_id: str) -> float:
    """A number from 0 to 1 by which end devices are chosen: other ones for each release."""
    return int.from_bytes(hashlib.sha256(f"{release}\n{node_id}".encode()).digest()[:6], "big") / 2**48


def chosen(change: ReleaseChange, node_id: str) -> bool:
    """True if an end device uses the new release of a change."""
    if change.share >= 1 or node_id in change.seeds:
        return True
    return node_id not in change.spared and rank(change.release, node_id) < change.share


def with_both_sides(change: ReleaseChange, ends: Collection[str]) -> ReleaseChange:
    """The change with at least one end device in it, and with one outside it if there are two.

    Its first and its last device by `rank` are named once, so the choice stays the same when devices join or leave.

    Args:
        ends: node ids of the end devices.
    """
    ranked = sorted(ends, key=lambda node_id: rank(change.release, node_id))
    return replace(change, seeds=tuple(ranked[:1]), spared=tuple(ranked[1:][-1:]))


class LiveReleases(Struct, frozen=True, kw_only=True):
    """The releases that answer now, and the reason for each."""

    in_force: int
    change: ReleaseChange | None = None
    """The change under way."""
    busy: frozenset[int] = frozenset()
    """Releases of unfinished jobs."""
    tried: Mapping[int, ReleaseChange] = {}
    """Last change of each release if it failed: only devices that tried the release continue to hold it."""


def wanted(live: LiveReleases, node_id: str, tier: Tier) -> tuple[int, ...]:
    """The releases that a node is to hold; the first answers the pictures of its sources."""
    change, tried = live.change, live.tried
    under_way = change if change is not None and not change.state.final else None
    numbers = [live.in_force]
    if under_way is not None:
        if tier is not Tier.END:
            numbers.append(under_way.release)
        elif chosen(under_way, node_id):
            numbers.insert(0, under_way.release)
    for number in sorted(live.busy, reverse=True):
        trial = under_way if under_way is not None and under_way.release == number else tried.get(number)
        if number not in numbers and (trial is None or tier is not Tier.END or chosen(trial, node_id)):
            numbers.append(number)
    return tuple(numbers[:MOST_LIVE])


def advance(
    change: ReleaseChange, fleet: FleetProgress, *, now: float, conclusion: Step = "go on", reason: str = ""
) -> ReleaseChange:
    """The next state of a change.

    Args:
        conclusion: of the guards.
        reason: for it, with the figures.
    """
    if change.state.final:
        return change
    if fleet.unusable and (change.kind == "canary" or not fleet.ends_ready):
        return _ended(change, RolloutState.ROLLED_BACK, fleet.unusable)
    if change.state is RolloutState.CANARY:
        return _of_trial(change, fleet, now=now, conclusion=conclusion, reason=reason)
    if conclusion == "roll back":
        return _ended(change, RolloutState.ROLLED_BACK, reason)
    step_s = min(change.for_s / _STEPS, _LONGEST_STEP_S)
    waited_s = now - change.stepped
    if waited_s < step_s or not (fleet.settled or waited_s >= step_s + _AWAY_S):
        return change
    if not fleet.ends_ready and change.kind != "first":
        why = _with(f"no end device holds the release after {waited_s:.0f} s", fleet.trouble)
        return (
            replace(change, reason=why) if change.kind == "rollback" else _ended(change, RolloutState.ROLLED_BACK, why)
        )
    if change.share < 1:
        return replace(change, share=min(1.0, 2 * change.share), stepped=now)
    return replace(change, state=RolloutState.DONE)


def _of_trial(
    change: ReleaseChange, fleet: FleetProgress, *, now: float, conclusion: Step = "go on", reason: str = ""
) -> ReleaseChange:
    if change.ready is None:
        if fleet.ends_ready:
            return replace(change, ready=now)
        if now - change.begun > max(change.for_s, _LONGEST_STEP_S):
            why = _with("no end device of the canary could load it", fleet.trouble)
            return _ended(change, RolloutState.ROLLED_BACK, why)
        return change
    match conclusion:
        case "roll back":
            return _ended(change, RolloutState.ROLLED_BACK, reason)
        case "extend":
            return replace(change, extended=True, reason=reason)
        case "promote":
            share = min(1.0, 2 * change.share)
            return replace(change, state=RolloutState.ROLLING, share=share, stepped=now, reason=reason)
    return change


def _with(why: str, trouble: str) -> str:
    return f"{why}; {trouble}" if trouble else why


def _ended(change: ReleaseChange, state: RolloutState, reason: str) -> ReleaseChange:
    return replace(change, state=state, reason=reason)


def state_of(
    number: int, *, in_force: int, change: ReleaseChange | None, ended: Iterable[ReleaseChange]
) -> ReleaseState:
    """The state of a release.

    Args:
        ended: changes that are over, the newest first.
    """
    if change is not None and change.release == number:
        return ReleaseState.CANARY if change.state is RolloutState.CANARY else ReleaseState.ROLLING
    if number == in_force:
        return ReleaseState.IN_FORCE
    for each in ended:
        if each.state is RolloutState.DONE and each.previous == number:
            return ReleaseState.ROLLED_BACK if each.kind == "rollback" else ReleaseState.RETIRED
        if each.release == number and each.state is RolloutState.ROLLED_BACK:
            return ReleaseState.ROLLED_BACK
        if each.release == number and each.state is RolloutState.STOPPED:
            return ReleaseState.STOPPED
    return ReleaseState.READY


# --- probe pictures ---------------------------------------------------------------------------------------------------

_FAR = 0.25
"""Mean distance of two answers (half the sum of absolute differences) above which they are of other networks. Below it
is room for the rounding of other processors."""


def differs(answers: Array, known: Array) -> str:
    """Reason why the answers to the probe pictures come from another network; "" if they do not.

    Args:
        answers: probabilities `[n, classes]`.
        known: the network's, in the same form.
    """
    if answers.shape != known.shape:
        return f"it gave probabilities of the form {list(answers.shape)}, expected {list(known.shape)}"
    far = float(abs(answers - known).sum(axis=1).mean() / 2)
    if not far <= _FAR:
        return f"its answers to {len(known)} probe pictures are {far:.2f} away from those of the network"
    return ""


def check_live(numbers: Collection[int]) -> str:
    """Return why no other release can be started now; "" if one can."""
    if len(numbers) > MOST_LIVE:
        return f"unfinished jobs need {len(numbers) - 1} releases already, and nodes hold {MOST_LIVE} at most"
    return ""
