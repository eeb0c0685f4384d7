"""Rules about one picture: what goes up, what is kept, and what an answer from above means for it."""

from typing import Any

import pytest

from end_node.settings import SourceSettings, UplinkSettings
from end_node.uplink.rules import fate_of, is_unsure, may_go, outcome_of, stages_left
from models.kept.sample import KeptPicture
from tierkit.types import Tier
from tierkit.wire.events import FallbackEvent, FineEvent, RoutedEvent, StageAnswer, StageLoss
from tierkit.wire.messages import DeviceRoute, Encoding, Stage, Upstream

EDGE, CLOUD = Stage(tier=Tier.EDGE, below=0.3), Stage(tier=Tier.CLOUD, below=0.5)


def route(*stages: Stage) -> DeviceRoute:
    return DeviceRoute(version="0" * 16, upstreams=(), stages=stages)


def fate(margin: float, of: DeviceRoute | None, *, keep: str = "unsure", **uplink: Any) -> tuple[bool, ...]:
    source = SourceSettings.model_validate({"name": "a", "kind": "push", "keep": keep})
    found = fate_of(margin, of, source, UplinkSettings.model_validate(uplink))
    return found.unsure, found.waits, found.keeps, found.to_scheduler


@pytest.mark.parametrize(
    ("margin", "of", "unsure"),
    [
        (0.29, route(EDGE), True),
        (0.3, route(EDGE), False),
        (0.9, route(Stage(tier=Tier.EDGE)), True),  # a threshold for other weights counts for nothing
        (0.1, route(), None),
        (0.1, None, None),
    ],
)
def test_the_threshold_of_the_route_tells_which_are_unsure(
    margin: float, of: DeviceRoute | None, unsure: bool | None
) -> None:
    assert is_unsure(margin, of) is unsure


@pytest.mark.parametrize(
    ("margin", "of", "uplink", "expected"),
    [
        (0.1, route(EDGE), {}, (True, True, True, False)),
        (0.9, route(EDGE), {}, (False, False, False, False)),
        (0.1, route(EDGE), {"escalate": "nothing"}, (True, False, True, False)),
        (0.9, route(EDGE), {"escalate": "all"}, (False, True, False, False)),
        (0.9, None, {}, (False, True, True, False)),  # nobody knows yet
        (0.1, None, {"escalate": "nothing"}, (False, False, True, False)),
        (0.1, route(), {}, (False, False, False, False)),  # no thresholds: nothing is guessed
        (0.1, route(EDGE), {"pictures_to_scheduler": "unsure"}, (True, True, True, True)),
        (0.9, route(EDGE), {"pictures_to_scheduler": "unsure"}, (False, False, False, False)),
        (0.9, None, {"pictures_to_scheduler": "unsure"}, (False, True, True, False)),
        (0.9, route(EDGE), {"pictures_to_scheduler": "all"}, (False, False, False, True)),
    ],
)
def test_the_fate_of_a_picture(
    margin: float, of: DeviceRoute | None, uplink: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    assert fate(margin, of, **uplink) == expected


@pytest.mark.parametrize("keep", ["none", "all"])
def test_keeping_does_not_depend_on_going_up(keep: str) -> None:
    assert [fate(margin, route(EDGE), keep=keep)[2] for margin in (0.1, 0.9)] == [keep == "all"] * 2


def test_the_first_stage_left_asks_about_the_picture_whatever_its_margin() -> None:
    limits = UplinkSettings()
    both = stages_left(route(EDGE, CLOUD), None, limits)
    assert [(stage.tier, stage.below, stage.only) for stage in both] == [
        (Tier.EDGE, None, (0,)),
        (Tier.CLOUD, 0.5, None),
    ]
    upper = stages_left(route(EDGE, CLOUD), Tier.EDGE, limits)
    assert [(stage.tier, stage.only) for stage in upper] == [(Tier.CLOUD, (0,))]
    assert stages_left(route(EDGE, CLOUD), Tier.CLOUD, limits) == ()
    assert stages_left(route(EDGE, CLOUD), None, UplinkSettings(escalate="all")) == ()


def stage_answer(tier: Tier) -> StageAnswer:
    return StageAnswer(indices=(0,), **answer(tier))


def answer(tier: Tier) -> dict[str, Any]:
    return {
        "node_id": f"{tier}-1",
        "tier": tier,
        "model": "fine",
        "sha256": "a" * 64,
        "labels": (7,),
        "confidences": (0.9,),
        "coarse_labels": (1,),
        "coarse_confidences": (0.95,),
        "round_trip_ms": 3.0,
    }


def loss(tier: Tier, reason: Any = "upstream_unavailable") -> StageLoss:
    return StageLoss(tier=tier, indices=(0,), reason=reason, detail="gone", tried=("n",))


def routed(answers: tuple[StageAnswer, ...] = (), losses: tuple[StageLoss, ...] = ()) -> RoutedEvent:
    return RoutedEvent(task_id="t", answers=answers, losses=losses)


def fallback(reason: Any) -> FallbackEvent:
    return FallbackEvent(task_id="t", reason=reason, detail="gone", tried=())


@pytest.mark.parametrize(
    ("event", "tier", "waits", "unreachable"),
    [
        (FineEvent(task_id="t", **answer(Tier.CLOUD)), Tier.CLOUD, False, False),
        (routed((stage_answer(Tier.EDGE),)), Tier.EDGE, False, False),
        (routed((stage_answer(Tier.EDGE), stage_answer(Tier.CLOUD))), Tier.CLOUD, False, False),
        (routed((stage_answer(Tier.CLOUD),), (loss(Tier.EDGE),)), Tier.CLOUD, False, False),  # the spare way
        (routed((stage_answer(Tier.EDGE),), (loss(Tier.CLOUD),)), Tier.EDGE, True, False),
        (routed((stage_answer(Tier.EDGE),), (loss(Tier.CLOUD, "no_upstream"),)), Tier.EDGE, False, False),
        (routed((), (loss(Tier.EDGE), loss(Tier.CLOUD))), None, True, True),
        (routed((), (loss(Tier.EDGE, "upstream_error"),)), None, True, False),
        (fallback("upstream_timeout"), None, True, True),
        (fallback("no_upstream"), None, True, True),
        (fallback("forbidden"), None, False, True),
    ],
)
def test_what_an_answer_from_above_means(event: Any, tier: Tier | None, waits: bool, unreachable: bool) -> None:
    outcome = outcome_of(event)
    assert (outcome.finer and outcome.finer.tier) == tier
    assert (outcome.waits, outcome.unreachable) == (waits, unreachable)
    assert not waits or outcome.reason


def kept(**changes: Any) -> KeptPicture:
    given: dict[str, Any] = {
        "source": "gate",
        "sequence": 1,
        "sha256": "0" * 64,
        "release": 1,
        "local_sha256": "1" * 64,
        "local": 0,
        "local_confidence": 0.5,
        "margin": 0.1,
        "tier": Tier.EDGE,
        "node_id": "edge-1",
        "upper_sha256": "2" * 64,
        "label": 0,
        "confidence": 0.9,
        "coarse_label": 0,
        "coarse_confidence": 0.9,
        "kind": "unsure",
        "form": "pixels",
        "classes": "c",
    }
    return KeptPicture(**given | changes)


def led(**features: bool) -> DeviceRoute:
    """A route to these nodes, by whether they get features."""
    upstreams = [
        Upstream(
            node_id=node_id.replace("_", "-"),
            url="http://127.0.0.1:9",
            tier=Tier.EDGE,
            model="fine",
            encoding=Encoding(name="fine.conv1", head="a" * 64, tail="b" * 64) if encoded else None,
        )
        for node_id, encoded in features.items()
    ]
    return DeviceRoute(version="0" * 16, upstreams=tuple(upstreams))


@pytest.mark.parametrize(
    ("changes", "of", "goes"),
    [
        ({}, None, True),
        ({}, led(), True),
        ({}, led(edge_1=False, edge_2=True), True),
        ({}, led(edge_1=True), False),  # it was trusted then, and is not now
        ({"form": "features"}, led(edge_1=False), False),
        ({"tier": Tier.CLOUD}, led(edge_1=False), False),
        ({"tier": Tier.CLOUD, "node_id": "cloud-1"}, None, False),
        ({"node_id": "edge-2"}, led(edge_1=False, edge_2=False), False),
    ],
)
def test_a_kept_picture_goes_only_to_the_node_that_had_its_pixels(
    changes: dict[str, Any], of: DeviceRoute | None, goes: bool
) -> None:
    assert may_go(kept(**changes), Tier.EDGE, "edge-1".__eq__, of) is goes
