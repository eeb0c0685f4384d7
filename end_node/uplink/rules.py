"""Rules about one picture: does it go up, is it kept, does the scheduler get a copy. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from end_node.settings import SourceSettings, UplinkSettings
from models.kept.sample import KeptPicture
from tierkit.types import Tier
from tierkit.wire.events import FallbackEvent, FineEvent, RoutedEvent, StageAnswer, UpstreamAnswer
from tierkit.wire.messages import DeviceRoute, Stage
from tierkit.wire.observations import FinerAnswer

__all__ = ["Amendment", "PictureFate", "fate_of", "is_audited", "is_unsure", "may_go", "outcome_of", "stages_left"]

_FINAL = ("forbidden", "damaged")
"""Reasons of a fallback that trying again cannot change."""


class PictureFate(Struct, frozen=True, kw_only=True):
    """The future of a picture that has its local answer."""

    unsure: bool
    waits: bool
    """True if a better answer is wanted."""
    keeps: bool
    """True if it stays on the device after that."""
    to_scheduler: bool
    """True if the scheduler gets a copy."""


def is_unsure(margin: float, route: DeviceRoute | None) -> bool | None:
    """True if the margin of the local answer is below the threshold of the route; None without a route or thresholds.

    A route whose first stage has no threshold belongs to other weights than the device's: all its answers count as
    unsure, as in a job.
    """
    if route is None or not route.stages:
        return None
    below = route.stages[0].below
    return below is None or margin < below


def is_audited(route: DeviceRoute | None, *, margin: float, share: float, chance: float) -> bool:
    """True if a picture with a sure answer goes up, to compare the answers. An unsure one goes up in any case.

    Args:
        margin: of the local answer.
        share: of the sure pictures that go up.
        chance: a random number from 0 to 1, less than 1.
    """
    return route is not None and route.learn and is_unsure(margin, route) is False and chance < share


def fate_of(margin: float, route: DeviceRoute | None, source: SourceSettings, uplink: UplinkSettings) -> PictureFate:
    """The fate of a picture. Without a route the device has no threshold, so its pictures wait for one.

    Args:
        margin: of the local answer; 1 for a picture that cannot be read.
    """
    unsure = is_unsure(margin, route)
    perhaps = route is None if unsure is None else unsure
    return PictureFate(
        unsure=unsure is True,
        waits={"nothing": False, "unsure": perhaps, "all": True}[uplink.escalate],
        keeps={"none": False, "unsure": perhaps, "all": True}[source.keep],
        to_scheduler={"none": False, "unsure": unsure is True, "all": True}[uplink.pictures_to_scheduler],
    )


def may_go(picture: KeptPicture, tier: Tier, is_reader: Callable[[str], bool], route: DeviceRoute | None) -> bool:
    """True if a kept picture may go to a node: the pixels went to it before, and may still go there.

    Args:
        tier: of the node.
        is_reader: Returns True if an id is the node's.
        route: in force. It shows if the node gets only features by now.
    """
    if picture.form != "pixels" or picture.tier != tier or not is_reader(picture.node_id):
        return False
    upstreams = () if route is None else route.upstreams
    return all(each.encoding is None for each in upstreams if each.node_id == picture.node_id)


def stages_left(route: DeviceRoute, reached: Tier | None, uplink: UplinkSettings) -> tuple[Stage, ...]:
    """The stages that one picture still has to go through, in whose first it has to be asked about.

    Args:
        reached: the tier whose answer it has; None if it has only the local one.
    """
    if uplink.escalate == "all" or not route.stages:
        return ()
    tiers = list(Tier)
    left = [stage for stage in route.stages if reached is None or tiers.index(stage.tier) > tiers.index(reached)]
    if not left:
        return ()
    first = left[0].model_copy(update={"below": None, "only": (0,)})
    return (first, *left[1:])


class Amendment(Struct, frozen=True, kw_only=True):
    """Result of asking the upstream nodes about a picture."""

    finer: FinerAnswer | None
    waits: bool
    """True if it is worth asking again."""
    reason: str
    unreachable: bool
    """True if no upstream node could be reached, so that others will fail too."""
    at_fault: bool = False
    """True if the picture itself may be the reason: a node took it and did not answer in time."""


def outcome_of(event: FineEvent | RoutedEvent | FallbackEvent) -> Amendment:
    """The outcome for the only picture of a task."""
    if isinstance(event, FineEvent):
        return Amendment(finer=_finer(event), waits=False, reason="", unreachable=False)
    losses: Sequence[tuple[str, str]]
    answer: StageAnswer | None = None
    if isinstance(event, RoutedEvent):
        answer = event.answers[-1] if event.answers else None
        losses = [(loss.reason, loss.detail) for loss in event.losses]
    else:
        losses = [(event.reason, event.detail)]
    # The last loss is the one of the highest tier: below it may lie an answer that came in its place.
    if not losses or (isinstance(event, RoutedEvent) and answer is not None and not _lost_above(event, answer)):
        return Amendment(finer=None if answer is None else _finer(answer), waits=False, reason="", unreachable=False)
    reason, detail = losses[-1]
    return Amendment(
        finer=None if answer is None else _finer(answer),
        # Without a node of a further tier in the route, the answer from below stands, as in a job.
        waits=reason not in _FINAL and not (answer is not None and reason == "no_upstream"),
        reason=f"{reason}: {detail}"[:500],
        unreachable=answer is None and reason != "upstream_error",
        at_fault=reason == "upstream_timeout",
    )


def _lost_above(event: RoutedEvent, answer: StageAnswer) -> bool:
    tiers = list(Tier)
    return any(tiers.index(loss.tier) > tiers.index(answer.tier) for loss in event.losses)


def _finer(answer: UpstreamAnswer) -> FinerAnswer:
    return FinerAnswer(
        node_id=answer.node_id,
        tier=answer.tier,
        model=answer.model,
        sha256=answer.sha256,
        label=answer.labels[0],
        confidence=answer.confidences[0],
        coarse_label=answer.coarse_labels[0],
        coarse_confidence=answer.coarse_confidences[0],
        sent=answer.sent,
    )
