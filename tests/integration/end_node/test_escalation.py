"""Only unsure images go up, over real sockets: who is asked about which images, and whose answer stands."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.integration.end_node.aids import PixelModel, RunningEnd, RunningUpper, StartEnd, serve_upper, to
from tierkit.tensors import Array
from tierkit.types import Tier
from tierkit.wire.events import CoarseEvent, RoutedEvent
from tierkit.wire.messages import Stage, Upstream

END, EDGE, CLOUD = 0, 1, 2
HALF = (Stage(tier=Tier.EDGE), Stage(tier=Tier.CLOUD, below=0.5))
GATED = (Stage(tier=Tier.EDGE, below=0.5), Stage(tier=Tier.CLOUD, below=0.5))
CLOSED = "http://127.0.0.1:1"


class Sure(PixelModel):
    """Of an image's first pixel the first value is the class; each tier is sure (probability 0.9) of those images of
    which its bit in the second value is set, and undecided (0.55 or less) of the others. Notes what it was asked."""

    def __init__(self, tier: int, classes: int) -> None:
        super().__init__(f"{['end', 'edge', 'cloud'][tier]}-model", classes)
        self.tier = tier
        self.asked: list[list[int]] = []

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        pixels = inputs["images"]
        self.asked.append(pixels[:, 1, 1, 2].tolist())  # the number of the image in its task
        labels = pixels[:, 0, 0, 0] // (4 // self.classes) % self.classes
        top = np.where(pixels[:, 0, 0, 1] >> self.tier & 1, 0.9, 0.55).astype(np.float32)
        probabilities = np.repeat(((1 - top) / (self.classes - 1))[:, None], self.classes, axis=1)
        probabilities[np.arange(len(labels)), labels] = top
        if self.tier == EDGE:  # what the edge is unsure of it gets wrong, so that one sees whose answer stands
            probabilities[top < 0.6] = probabilities[top < 0.6][:, ::-1]
        return {"probabilities": probabilities}


def batch(*sure: str) -> Array:
    """An image of class 0, 1, 2, 3, 0, ... for each of "", "end", "edge", "end+edge": the tiers that are sure of it."""
    bits = [sum(1 << ("end", "edge", "cloud").index(tier) for tier in tiers.split("+") if tier) for tiers in sure]
    array = np.zeros((len(sure), 2, 2, 3), np.uint8)
    array[:, 0, 0, 0] = np.arange(len(sure)) % 4
    array[:, 0, 0, 1] = bits
    array[:, 1, 1, 2] = np.arange(len(sure))
    return array


EIGHT = batch("end", "edge", "", "end+edge", "edge", "", "end", "edge")


@pytest.fixture
async def end(start_end: StartEnd) -> AsyncIterator[RunningEnd]:
    async with start_end(Sure(END, 2)) as running:
        yield running


@pytest.fixture
async def edge() -> AsyncIterator[RunningUpper]:
    async with upper(EDGE) as running:
        yield running


@pytest.fixture
async def cloud() -> AsyncIterator[RunningUpper]:
    async with upper(CLOUD) as running:
        yield running


@asynccontextmanager
async def upper(tier: int) -> AsyncIterator[RunningUpper]:
    async with serve_upper(Sure(tier, 4)) as running:
        asked(running).clear()  # the warm-up
        yield running


def asked(node: RunningUpper | RunningEnd) -> list[list[int]]:
    assert isinstance(node.model, Sure)
    return node.model.asked


def at(url: str, tier: Tier, number: int = 1) -> Upstream:
    return to(url, f"{tier}-{number}", f"{tier}-model").model_copy(update={"tier": tier})


async def routed(
    end: RunningEnd, pixels: Array, *upstreams: Upstream, stages: tuple[Stage, ...], stage=None
) -> RoutedEvent:
    *_, event = await end.answer(pixels, *upstreams, escalation=stages, stage=stage)
    assert isinstance(event, RoutedEvent)
    return event


def finals(event: RoutedEvent) -> dict[int, tuple[str, int]]:
    """Who answered which image what, in the end."""
    return {
        index: (answer.node_id, label)
        for answer in event.answers
        for index, label in zip(answer.indices, answer.labels, strict=True)
    }


async def test_every_image_gets_a_fine_answer_and_only_the_unsure_go_to_the_cloud(
    end: RunningEnd, edge: RunningUpper, cloud: RunningUpper
) -> None:
    event = await routed(end, EIGHT, at(edge.url, Tier.EDGE), at(cloud.url, Tier.CLOUD), stages=HALF)
    assert asked(edge) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert asked(cloud) == [[0, 2, 5, 6]]
    assert event.losses == ()
    assert [(answer.tier, answer.indices) for answer in event.answers] == [
        (Tier.EDGE, tuple(range(8))),
        (Tier.CLOUD, (0, 2, 5, 6)),
    ]
    edge_1, cloud_1 = "edge-1", "cloud-1"
    assert finals(event) == {number: (cloud_1 if number in (0, 2, 5, 6) else edge_1, number % 4) for number in range(8)}
    for answer in event.answers:
        assert answer.coarse_labels == tuple(label // 2 for label in answer.labels)


async def test_a_sure_coarse_answer_stays_on_the_end_device(
    end: RunningEnd, edge: RunningUpper, cloud: RunningUpper
) -> None:
    event = await routed(end, EIGHT, at(edge.url, Tier.EDGE), at(cloud.url, Tier.CLOUD), stages=GATED)
    assert asked(edge) == [[1, 2, 4, 5, 7]]
    assert asked(cloud) == [[2, 5]]
    assert sorted(finals(event)) == [1, 2, 4, 5, 7]


async def test_where_all_is_sure_nobody_above_is_asked(end: RunningEnd, edge: RunningUpper) -> None:
    coarse, event = await end.answer(
        batch("end", "end"), at(edge.url, Tier.EDGE), escalation=(Stage(tier=Tier.EDGE, below=0.5),)
    )
    assert isinstance(coarse, CoarseEvent)
    assert event == RoutedEvent(task_id="task-1", answers=(), losses=())
    assert asked(edge) == []


async def test_the_fine_stage_alone(end: RunningEnd, edge: RunningUpper, cloud: RunningUpper) -> None:
    asked(end).clear()
    both = at(edge.url, Tier.EDGE), at(cloud.url, Tier.CLOUD)
    assert len(finals(await routed(end, EIGHT, *both, stages=HALF, stage="fine"))) == 8
    assert asked(end) == []
    async with end.stream(EIGHT, *both, escalation=GATED, stage="fine") as response:
        assert response.status_code == 400
        assert "ask for both stages" in (await response.aread()).decode()


async def test_the_fine_stage_alone_of_the_images_that_the_coarse_answer_was_unsure_of(
    end: RunningEnd, edge: RunningUpper, cloud: RunningUpper
) -> None:
    both = at(edge.url, Tier.EDGE), at(cloud.url, Tier.CLOUD)
    coarse, before = await end.answer(EIGHT, *both, escalation=GATED)
    assert isinstance(coarse, CoarseEvent)
    assert coarse.unsure == (1, 2, 4, 5, 7)
    for node in (end, edge, cloud):
        asked(node).clear()
    known = (Stage(tier=Tier.EDGE, only=coarse.unsure), GATED[1])
    event = await routed(end, EIGHT, *both, stages=known, stage="fine")
    assert isinstance(before, RoutedEvent)
    assert finals(event) == finals(before)
    assert (asked(end), asked(edge), asked(cloud)) == ([], [[1, 2, 4, 5, 7]], [[2, 5]])
    beyond = (Stage(tier=Tier.EDGE, only=(8,)), GATED[1])
    async with end.stream(EIGHT, *both, escalation=beyond, stage="fine") as response:
        assert response.status_code == 400
        assert "asks about image 8 of a task of 8" in (await response.aread()).decode()


async def test_without_an_answer_from_the_cloud_the_edge_answer_stands_and_the_loss_is_told(
    end: RunningEnd, edge: RunningUpper
) -> None:
    event = await routed(end, EIGHT, at(edge.url, Tier.EDGE), at(CLOSED, Tier.CLOUD), stages=HALF)
    assert {node for node, _ in finals(event).values()} == {"edge-1"}
    (loss,) = event.losses
    assert (loss.tier, loss.indices, loss.reason) == (Tier.CLOUD, (0, 2, 5, 6), "upstream_unavailable")
    assert loss.tried == ("cloud-1",)


@pytest.mark.parametrize("spare", [True, False])
async def test_what_no_edge_answers_goes_to_the_cloud_if_it_may(
    end: RunningEnd, cloud: RunningUpper, spare: bool
) -> None:
    stages = (Stage(tier=Tier.EDGE), Stage(tier=Tier.CLOUD, below=0.5, spare=spare))
    event = await routed(end, EIGHT, at(CLOSED, Tier.EDGE), at(cloud.url, Tier.CLOUD), stages=stages)
    (loss,) = event.losses
    assert (loss.tier, loss.indices) == (Tier.EDGE, tuple(range(8)))
    assert asked(cloud) == ([list(range(8))] if spare else [])
    assert len(finals(event)) == (8 if spare else 0)


async def test_a_tier_without_a_node_is_lost_and_that_is_told(end: RunningEnd, edge: RunningUpper) -> None:
    event = await routed(end, EIGHT, at(edge.url, Tier.EDGE), stages=HALF)
    assert len(finals(event)) == 8
    (loss,) = event.losses
    assert (loss.tier, loss.indices, loss.reason, loss.tried) == (Tier.CLOUD, (0, 2, 5, 6), "no_upstream", ())


async def test_the_next_node_of_a_tier_is_asked_before_the_tier_is_lost(
    end: RunningEnd, edge: RunningUpper, cloud: RunningUpper
) -> None:
    route = (
        at(CLOSED, Tier.EDGE, 1),
        at(edge.url, Tier.EDGE, 2),
        at(CLOSED, Tier.CLOUD, 1),
        at(cloud.url, Tier.CLOUD, 2),
    )
    event = await routed(end, EIGHT, *route, stages=HALF)
    assert [answer.node_id for answer in event.answers] == ["edge-2", "cloud-2"]
    assert event.losses == ()
