"""Counts, accuracies and latencies of a job."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from scheduler.core.job import Answer
from scheduler.jobs.progress import Progress
from tierkit.types import Tier
from tierkit.wire.events import (
    CoarseEvent,
    Damage,
    ErrorEvent,
    FallbackEvent,
    FineEvent,
    RoutedEvent,
    StageAnswer,
    StageLoss,
    TaskEvent,
)

PARENTS = np.array([0, 0, 1, 1], np.int32)  # four fine classes, two superclasses


def coarse(labels: tuple[int, ...], node: str = "end-0") -> CoarseEvent:
    return CoarseEvent(
        task_id="t",
        node_id=node,
        model="m",
        labels=labels,
        confidences=(0.5,) * len(labels),
        queue_ms=0,
        compute_ms=0,
    )


def fine(labels: tuple[int, ...], coarse_labels: tuple[int, ...], node: str = "edge-0") -> FineEvent:
    sure = (0.5,) * len(labels)
    return FineEvent(
        task_id="t",
        node_id=node,
        tier=Tier.EDGE,
        model="m",
        labels=labels,
        confidences=sure,
        coarse_labels=coarse_labels,
        coarse_confidences=sure,
        round_trip_ms=1,
    )


def told(event: TaskEvent, kind: str, *, ms: float, first_image: int, images: int) -> Answer:
    return Answer(
        job_id="j",
        task=0,
        first_image=first_image,
        images=images,
        stage="coarse" if kind == "coarse" else "final",
        kind=kind,
        ms=ms,
        request_id="r",
        event=event,
        line="",
    )


def test_accuracies_count_answered_images_with_a_known_class():
    progress = Progress(np.array([0, 1, 2, 3, -1, 2], np.int32), PARENTS)
    progress.add(told(coarse((0, 1, 1)), "coarse", ms=1, first_image=0, images=3))
    progress.add(told(coarse((1, 0, 0)), "coarse", ms=1, first_image=3, images=3))
    progress.add(told(fine((0, 0, 2), (0, 0, 0)), "fine", ms=1, first_image=0, images=3))
    summary = progress.summary()
    assert summary["coarse_accuracy"] == pytest.approx(3 / 5)  # right: images 0, 2, 3; the class of 4 is unknown
    assert summary["fine_accuracy"] == pytest.approx(2 / 3)
    assert summary["coarse_from_fine_accuracy"] == pytest.approx(2 / 3)
    assert (summary["answered_coarse"], summary["answered_fine"]) == (6, 3)


def stage(tier: Tier, indices: tuple[int, ...], labels: tuple[int, ...]) -> StageAnswer:
    sure = (0.5,) * len(labels)
    return StageAnswer(
        tier=tier,
        node_id=f"{tier}-0",
        model="m",
        indices=indices,
        labels=labels,
        confidences=sure,
        coarse_labels=tuple(int(PARENTS[label]) for label in labels),
        coarse_confidences=sure,
        round_trip_ms=1,
    )


def test_images_that_went_up_one_by_one_count_where_their_answer_comes_from():
    progress = Progress(np.array([0, 1, 2, 3, 0, 1], np.int32), PARENTS)
    progress.add(told(coarse((0,)), "coarse", ms=1, first_image=0, images=1))
    fallback = FallbackEvent(task_id="t", reason="deadline", detail="late", tried=())
    progress.add(told(fallback, "fallback", ms=1, first_image=0, images=1))
    progress.add(told(coarse((0, 0, 0, 1)), "coarse", ms=1, first_image=1, images=4))
    # Of images 1 to 4 the last stays at the end, 1 at the edge (wrong); the cloud knows 2, 3 stays at the edge.
    event = RoutedEvent(
        task_id="t",
        answers=(stage(Tier.EDGE, (0, 1, 2), (3, 3, 3)), stage(Tier.CLOUD, (1,), (2,))),
        losses=(),
    )
    progress.add(told(event, "fine", ms=9, first_image=1, images=4))
    # Image 5 should have gone on from the edge, and no cloud node answered.
    progress.add(told(coarse((0,)), "coarse", ms=1, first_image=5, images=1))
    lost = StageLoss(tier=Tier.CLOUD, indices=(0,), reason="upstream_error", detail="no", tried=("cloud-1",))
    event = RoutedEvent(task_id="t", answers=(stage(Tier.EDGE, (0,), (1,)),), losses=(lost,))
    progress.add(told(event, "fine", ms=9, first_image=5, images=1))
    summary = progress.summary()
    assert (summary["answered_coarse"], summary["answered_fine"], summary["fallback"]) == (6, 4, 2)
    assert summary["sent_up"] == {"edge": 4, "cloud": 2}
    assert summary["final_tier"] == {"end": 2, "edge": 3, "cloud": 1}
    assert {node: share["fine_images"] for node, share in summary["by_node"].items()} == {
        "end-0": 0,
        "edge-0": 3,
        "cloud-0": 1,
    }
    assert summary["fine_accuracy"] == pytest.approx(3 / 4)  # 2 by the cloud, 3 and 5 by the edge
    # Of what stands 0 is right at the end, 2, 3 and 5 above; 1 is wrong at the edge and 4 at the end.
    assert summary["final_coarse_accuracy"] == pytest.approx(4 / 6)
    assert summary["fine_p50_ms"] == 9


def test_the_cloud_s_planned_and_actual_share_are_about_the_same_images():
    progress = Progress(None, PARENTS)
    assert (progress.summary()["theta_cloud"], progress.summary()["cloud_share"]) == (None, None)
    edge, cloud = fine((0, 0, 2), (0, 0, 0)), replace(fine((1,), (0,)), tier=Tier.CLOUD)
    for event, first, images, planned in ((edge, 0, 3, 0.5), (cloud, 3, 1, 0.9), (cloud, 4, 1, None)):
        answer = told(event, "fine", ms=1, first_image=first, images=images)
        progress.add(replace(answer, theta_cloud=planned))
    summary = progress.summary()
    assert summary["theta_cloud"] == pytest.approx((3 * 0.5 + 0.9) / 4)
    assert summary["cloud_share"] == 1 / 4  # nothing is known of what was planned for the last one


@pytest.mark.parametrize("by_image", [False, True])
def test_images_that_cannot_be_read_count_nowhere_but_among_the_failed(by_image):
    """Image 1 was found out when it came, image 2 by the node; both have answers that mean nothing."""
    progress = Progress(np.array([0, 0, 0, 2], np.int32), PARENTS, {1: "no picture"})
    found = (Damage(index=2, reason="cut short"),)
    answer = told(replace(coarse((0, 0, 0, 1)), damaged=found), "coarse", ms=1, first_image=0, images=4)
    progress.add(answer)
    assert (progress.summary()["answered_coarse"], progress.summary()["coarse_accuracy"]) == (2, 1.0)
    progress.take_back(answer)
    assert progress.summary()["answered_coarse"] == 0
    progress.add(answer)
    finer: TaskEvent = fine((0, 0, 0, 3), (0, 0, 0, 1))
    if by_image:
        finer = RoutedEvent(task_id="t", answers=(stage(Tier.EDGE, (0, 1, 3), (0, 0, 3)),), losses=())
    progress.add(told(finer, "fine", ms=2, first_image=0, images=4))
    summary = progress.summary()
    assert summary["damaged"] == [{"index": 1, "reason": "no picture"}, {"index": 2, "reason": "cut short"}]
    assert (summary["damaged_images"], summary["failed_images"], summary["answered_fine"]) == (2, 2, 2)
    assert (summary["fine_accuracy"], summary["final_coarse_accuracy"]) == (0.5, 1.0)
    assert (summary["final_tier"], summary["fallback"]) == ({"edge": 2}, 0)
    assert {node: (share["coarse_images"], share["fine_images"]) for node, share in summary["by_node"].items()} == {
        "end-0": (2, 0),
        "edge-0": (0, 2),
    }


def test_without_labels_there_is_no_accuracy():
    progress = Progress(None, PARENTS)
    progress.add(told(coarse((0,)), "coarse", ms=1, first_image=0, images=1))
    summary = progress.summary()
    assert summary["coarse_accuracy"] is summary["fine_accuracy"] is summary["coarse_from_fine_accuracy"] is None


def test_latencies_are_per_image():
    progress = Progress(None, PARENTS)
    assert progress.summary()["coarse_p50_ms"] is None
    progress.add(told(coarse((0,) * 98), "coarse", ms=10.0, first_image=0, images=98))
    progress.add(told(coarse((0,) * 2), "coarse", ms=500.0, first_image=98, images=2))
    assert progress.summary()["coarse_p50_ms"] == 10.0
    assert progress.summary()["coarse_p99_ms"] == 500.0
    assert progress.summary()["fine_p50_ms"] is None


def test_shares_by_node_and_what_is_missing():
    progress = Progress(None, PARENTS)
    progress.add(told(coarse((0, 0), "end-1"), "coarse", ms=1, first_image=0, images=2))
    progress.add(told(coarse((0,), "end-0"), "coarse", ms=1, first_image=2, images=1))
    progress.add(told(fine((0, 0), (0, 0)), "fine", ms=1, first_image=0, images=2))
    fallback = FallbackEvent(task_id="t", reason="deadline", detail="late", tried=())
    progress.add(told(fallback, "fallback", ms=1, first_image=2, images=1))
    progress.add(told(ErrorEvent(task_id="t", error="no"), "failed", ms=1, first_image=3, images=5))
    summary = progress.summary()
    assert summary["by_node"] == {
        "edge-0": {"tier": "edge", "coarse_images": 0, "fine_images": 2},
        "end-0": {"tier": "end", "coarse_images": 1, "fine_images": 0},
        "end-1": {"tier": "end", "coarse_images": 2, "fine_images": 0},
    }
    assert (summary["fallback"], summary["failed_images"]) == (1, 5)


def test_a_coarse_answer_that_was_withdrawn_is_not_counted():
    labels = np.array([0, 1, 2, 3], np.int32)
    progress, other = Progress(labels, PARENTS), Progress(labels, PARENTS)
    for one in (progress, other):
        one.add(told(coarse((0, 1), "end-0"), "coarse", ms=1, first_image=0, images=2))
    progress.add(told(coarse((1, 0), "end-1"), "coarse", ms=9, first_image=2, images=2))
    progress.take_back(told(coarse((1, 0), "end-1"), "coarse", ms=9, first_image=2, images=2))
    summary, expected = progress.summary(), other.summary()
    assert summary["by_node"].pop("end-1")["coarse_images"] == 0
    assert summary == expected
    for one in (progress, other):
        one.add(told(coarse((1, 1), "end-0"), "coarse", ms=2, first_image=2, images=2))
        one.add(told(fine((2, 3), (1, 1)), "fine", ms=3, first_image=2, images=2))
    assert progress.summary()["final_coarse_accuracy"] == other.summary()["final_coarse_accuracy"] == 1.0
