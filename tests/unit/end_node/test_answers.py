"""From probabilities to answers, and what is no answer."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from end_node.answers import (
    UpperAnswer,
    check_probabilities,
    coarse_event,
    fine_event,
    finer_in_place,
    in_place,
    nothing_to_answer,
    stage_answer,
)
from models.hierarchy import Hierarchy
from tierkit.errors import UpstreamError
from tierkit.inference.runner import RunResult
from tierkit.tensors import Array
from tierkit.testing import MadeModel
from tierkit.types import Tier
from tierkit.wire.events import (
    CoarseEvent,
    FallbackEvent,
    FineEvent,
    RoutedEvent,
    Sent,
    StageLoss,
    TaskEvent,
    UpperTiming,
    WrongAnswer,
    read_event,
    written,
)
from tierkit.wire.messages import Upstream
from tierkit.wire.oip import InferResponse, Tensor, Timing

HIERARCHY = Hierarchy(name="h", fine=("a", "b", "c"), coarse=("x", "y"), parent=(0, 1, 1))
UPSTREAM = Upstream(node_id="edge-1", url="http://a:1", tier=Tier.EDGE, model="m", sha256="0" * 64, encoding=None)


class Named(MadeModel):
    name = "m"
    outputs = ()

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        raise AssertionError("nothing is computed here")


MODEL = Named()
GOOD = np.array([[0.4, 0.3, 0.3], [0.0, 0.0, 1.0]], np.float32)


def response(data: Array, name: str = "probabilities") -> InferResponse:
    return InferResponse("m", "1", (Tensor(name, data),))


def read(event: TaskEvent) -> TaskEvent:
    """As the receiver reads it."""
    return read_event(written(event).decode())


def test_the_superclass_is_that_of_the_most_probable_sum() -> None:
    event = read(fine_event("t", UpperAnswer(upstream=UPSTREAM, probabilities=GOOD, round_trip_s=0.25), HIERARCHY))
    assert isinstance(event, FineEvent)
    assert event.labels == (0, 2)
    assert event.coarse_labels == (1, 1)
    assert event.coarse_confidences == pytest.approx((0.6, 1.0))
    assert (event.node_id, event.tier, event.model, event.round_trip_ms) == ("edge-1", Tier.EDGE, "m", 250.0)


def test_a_confidence_is_at_most_one_whatever_the_rounding() -> None:
    just_above = np.array([[1.0000001, 0.0, 0.0]], np.float32)
    assert just_above.max() > 1
    answer = UpperAnswer(upstream=UPSTREAM, probabilities=just_above, round_trip_s=0.0)
    event = read(fine_event("t", answer, HIERARCHY))
    assert isinstance(event, FineEvent)
    assert event.confidences == (1.0,)
    assert event.coarse_confidences == (1.0,)


def test_a_coarse_event_tells_what_it_cost() -> None:
    cost = RunResult(outputs={}, queue_s=0.001, compute_s=0.002, batch_images=2)
    event = read(coarse_event("t", "end-1", MODEL, np.array([[0.25, 0.75]], np.float32), cost))
    assert isinstance(event, CoarseEvent)
    assert (event.labels, event.confidences) == ((1,), (0.75,))
    assert (event.queue_ms, event.compute_ms) == (1.0, 2.0)
    assert (event.model, event.sha256) == (MODEL.name, MODEL.sha256)


def test_a_coarse_event_names_the_unsure_images() -> None:
    cost = RunResult(outputs={}, queue_s=0.001, compute_s=0.002, batch_images=2)
    probabilities = np.array([[0.25, 0.75], [0.45, 0.55]], np.float32)
    event = read(coarse_event("t", "end-1", MODEL, probabilities, cost, below=0.2))
    assert isinstance(event, CoarseEvent)
    assert event.unsure == (1,)


def test_a_network_that_gives_nan_has_no_coarse_answer() -> None:
    cost = RunResult(outputs={}, queue_s=0.001, compute_s=0.002, batch_images=2)
    with pytest.raises(RuntimeError, match="'m' gave probabilities that are not finite numbers"):
        coarse_event("t", "end-1", MODEL, np.array([[0.25, 0.75], [np.nan, 0.5]], np.float32), cost)


def test_a_fine_event_tells_how_it_was_had() -> None:
    sent = Sent(form="bottleneck", upload_bytes=17, encode_ms=1.5, encoded_by="end-1")
    wrong = (WrongAnswer(node_id="edge-2", detail="nonsense"),)
    timing = Timing(queue_s=0.001, compute_s=0.002, batch_images=3)
    answer = UpperAnswer(
        upstream=UPSTREAM, probabilities=GOOD, round_trip_s=0.25, timing=timing, sent=sent, wrong=wrong
    )
    event = read(fine_event("t", answer, HIERARCHY))
    assert isinstance(event, FineEvent)
    assert (event.sent, event.wrong) == (sent, wrong)
    assert event.timing == UpperTiming(queue_ms=1.0, compute_ms=2.0, batch_images=3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_good_answer_passes_as_float32(dtype: type) -> None:
    checked = check_probabilities(response(GOOD.astype(dtype)), images=2, classes=3)
    assert checked.dtype == np.float32
    np.testing.assert_array_equal(checked, GOOD)


@pytest.mark.parametrize(
    "bad",
    [
        response(GOOD, name="logits"),
        response(GOOD[:1]),
        response(GOOD[:, :2]),
        response(GOOD.reshape(2, 3, 1)),
        response(GOOD.astype(np.int64)),
        response(GOOD * np.float32(1.01)),
        response(np.array([[1.5, -0.5, 0.0], [0, 0, 1]], np.float32)),
        response(np.array([[np.nan, 0.5, 0.5], [0, 0, 1]], np.float32)),
        response(np.array([[np.inf, 0.5, 0.5], [0, 0, 1]], np.float32)),
        response(np.zeros((2, 3), np.float32)),
    ],
    ids=["name", "rows", "classes", "rank", "integers", "sum", "negative", "nan", "inf", "zeros"],
)
def test_what_is_no_list_of_distributions_is_refused(bad: InferResponse) -> None:
    with pytest.raises(UpstreamError):
        check_probabilities(bad, images=2, classes=3)


def test_answers_stand_at_the_positions_of_the_images_that_could_be_read() -> None:
    cost = RunResult(outputs={}, queue_s=0.001, compute_s=0.002, batch_images=2)
    probabilities = np.array([[0.25, 0.75], [0.45, 0.55]], np.float32)
    damaged = {0: "no picture", 2: "x" * 1000}
    event = read(in_place(coarse_event("t", "end-1", MODEL, probabilities, cost, below=0.2), [1, 3], damaged))
    assert isinstance(event, CoarseEvent)
    assert event.labels == (0, 1, 0, 1)
    assert event.confidences == pytest.approx((0, 0.75, 0, 0.55))
    assert event.unsure == (3,)
    assert [damage.index for damage in event.damaged] == [0, 2]
    assert event.damaged[0].reason == "no picture"


def test_finer_answers_stand_there_as_well() -> None:
    answer = UpperAnswer(upstream=UPSTREAM, probabilities=GOOD, round_trip_s=0.25)
    fine = read(finer_in_place(fine_event("t", answer, HIERARCHY), [1, 3], 4))
    assert isinstance(fine, FineEvent)
    assert (fine.labels, fine.coarse_labels) == ((0, 0, 0, 2), (0, 1, 0, 1))
    assert (len(fine.confidences), len(fine.coarse_confidences)) == (4, 4)
    loss = StageLoss(tier=Tier.CLOUD, indices=(0,), reason="deadline", detail="", tried=())
    routed = RoutedEvent(task_id="t", answers=(stage_answer(np.array([0, 1]), answer, HIERARCHY),), losses=(loss,))
    moved = read(finer_in_place(routed, [1, 3], 4))
    assert isinstance(moved, RoutedEvent)
    assert (moved.answers[0].indices, moved.answers[0].labels, moved.losses[0].indices) == ((1, 3), (0, 2), (1,))
    fallback = FallbackEvent(task_id="t", reason="deadline", detail="late", tried=())
    assert finer_in_place(fallback, [1, 3], 4) == fallback


def test_without_any_image_there_is_an_answer_all_the_same() -> None:
    event = read(in_place(nothing_to_answer("t", "end-1", MODEL), [], {0: "a", 1: "b"}))
    assert isinstance(event, CoarseEvent)
    assert (event.labels, event.confidences, len(event.damaged)) == ((0, 0), (0.0, 0.0), 2)
