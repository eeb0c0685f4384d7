"""Jobs whose images go up one by one: end nodes that answer as they are told, on real sockets."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from models.escalation import TUNING_NAME, GateSide, Tuning, make_gate, save_tuning
from models.manifest import load_manifest
from tierkit.types import Tier

_GATES: list[tuple[Tier, Tier, Literal["coarse", "fine"]]] = [
    (Tier.EDGE, Tier.CLOUD, "fine"),
    (Tier.END, Tier.EDGE, "coarse"),
]


@pytest.fixture
def tuned(settings, weights: Path, tmp_path: Path):
    """Settings of a scheduler whose weights have thresholds."""
    folder = tmp_path / "weights"
    shutil.copytree(weights, folder)
    by_tier = {Tier(entry.tier): GateSide.of(entry) for entry in load_manifest(folder).models}
    gates = [
        make_gate(
            by_tier[lower],
            by_tier[upper],
            answers,
            margins=np.arange(100, dtype=np.float32) / 128,
            lower_right=np.arange(100) % 2 == 1,
            upper_right=np.ones(100, bool),
        )
        for lower, upper, answers in _GATES
    ]
    save_tuning(Tuning(data="made up", relative_accuracy=0.75, budget=0.5, gates=tuple(gates)), folder)
    return settings.model_copy(update={"models": folder})


def routed(task_id: str, lines: list[dict[str, Any]], cloud: list[int], *, lost: bool = False) -> list[dict[str, Any]]:
    """An end node's answer: all images to edge-0, those at `cloud` on to cloud-0, which says class 99, or nothing."""
    fine = lines[1]
    names = ("labels", "confidences", "coarse_labels", "coarse_confidences")
    edge = {"tier": "edge", "node_id": "edge-0", "model": "middle", "sha256": "1" * 64, "round_trip_ms": 1.0}
    edge |= {"indices": list(range(len(fine["labels"]))), **{name: fine[name] for name in names}}
    above = {"tier": "cloud", "indices": cloud}
    higher = {
        **above,
        "node_id": "cloud-0",
        "model": "large",
        "sha256": "2" * 64,
        "round_trip_ms": 1.0,
        "labels": [99] * len(cloud),
        "confidences": [0.9] * len(cloud),
        "coarse_labels": [1] * len(cloud),
        "coarse_confidences": [0.9] * len(cloud),
    }
    loss = {**above, "reason": "upstream_timeout", "detail": "cloud-0: slow", "tried": ["cloud-0"]}
    answers = [edge] if lost or not cloud else [edge, higher]
    event = {"event": "routed", "task_id": task_id, "answers": answers, "losses": [loss] if lost else []}
    return [lines[0], event]


async def test_only_some_images_go_on_to_the_cloud_and_the_results_say_which(kit, tuned):
    async def script(end, task_id, upstreams, lines):
        return routed(task_id, lines, [1, 3])

    async with (
        kit.scheduler(tuned) as scheduler,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
        kit.end(scheduler, "end-0", script=script) as end,
    ):
        job = await scheduler.submit(
            kit.images(8), labels=[0, 99, 2, 3, 4, 4, 6, 7], batch_size=4, escalate="budget", scheme="mapping"
        )
        events = await scheduler.events(job["id"])
        results = await scheduler.results(job["id"])
        table = (await scheduler.http.get(f"/v1/jobs/{job['id']}/results", params={"format": "csv"})).text
    assert end.routes == [("edge-0", "cloud-0")] * 2
    assert [name for name, _, _ in events if name != "state"] == ["coarse", "fine", "coarse", "fine"]
    done = events[-1][2]
    assert (done["answered_fine"], done["fallback"]) == (8, 0)
    assert done["sent_up"] == {"edge": 8, "cloud": 4}
    assert done["final_tier"] == {"edge": 4, "cloud": 4}
    assert done["by_node"]["cloud-0"] == {"tier": "cloud", "coarse_images": 0, "fine_images": 4}
    assert done["fine_accuracy"] == 5 / 8  # 0, 1 (the cloud), 2, 4 and 6
    assert done["policy"]["gates"][1]["below"] == 0.351562
    stands = [(row["answered_by"], row["not_escalated"], row["fine"]["index"]) for row in results]
    assert stands[::2] == [("edge", True, number) for number in (0, 2, 4, 6)]
    assert stands[1::2] == [("cloud", False, 99)] * 4
    assert all(row["fallback"] is None for row in results)
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [(row["answered_by"], row["not_escalated"]) for row in rows[:2]] == [("edge", "true"), ("cloud", "false")]


async def test_an_image_that_is_sure_on_the_end_device_is_no_fallback(kit, tuned):
    async def script(end, task_id, upstreams, lines):
        return [lines[0], {"event": "routed", "task_id": task_id, "answers": [], "losses": []}]

    async with (
        kit.scheduler(tuned) as scheduler,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
        kit.end(scheduler, "end-0", script=script),
    ):
        job = await scheduler.submit(kit.images(3), escalate="threshold", escalate_from="end", scheme="end-edge")
        done = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    assert (done["state"], done["fallback"], done["answered_fine"]) == ("completed", 0, 0)
    assert done["final_tier"] == {"end": 3}
    assert [(row["answered_by"], row["not_escalated"], row["fine"]) for row in results] == [("end", True, None)] * 3


async def test_where_the_cloud_is_lost_the_edge_answer_stands_and_says_why(kit, tuned):
    async def script(end, task_id, upstreams, lines):
        return routed(task_id, lines, [1], lost=True)[1 if len(end.tasks) > 1 else 0 :]

    async with (
        kit.scheduler(tuned.model_copy(update={"max_attempts": 2})) as scheduler,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
        kit.end(scheduler, "end-0", script=script) as end,
    ):
        job = await scheduler.submit(kit.images(3), escalate="budget", scheme="mapping")
        done = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    assert len(end.tasks) == 2, "the finer answers are asked for again, once"
    assert (done["state"], done["answered_fine"], done["fallback"]) == ("completed", 3, 1)
    assert [row["fine"]["tier"] for row in results] == ["edge"] * 3
    assert [row["fallback"] for row in results] == [None, "upstream_timeout: cloud-0: slow", None]
    assert [row["not_escalated"] for row in results] == [True, False, True]


async def test_what_the_coarse_answer_is_unsure_of_is_asked_about_again_without_the_coarse_work(kit, tuned):
    async def script(end, task_id, upstreams, lines):
        if end.stages[-1] == "fine":
            answer = routed(task_id, lines, [])[1]["answers"][0]
            names = ("indices", "labels", "confidences", "coarse_labels", "coarse_confidences")
            answer |= {name: [answer[name][index] for index in (0, 2)] for name in names}
            return [lines[0], {"event": "routed", "task_id": task_id, "answers": [answer], "losses": []}]
        loss = {
            "tier": "edge",
            "indices": [0, 2],
            "reason": "upstream_unavailable",
            "detail": "no",
            "tried": ["edge-0"],
        }
        return [
            {**lines[0], "unsure": [0, 2]},
            {"event": "routed", "task_id": task_id, "answers": [], "losses": [loss]},
        ]

    async with (
        kit.scheduler(tuned) as scheduler,
        kit.uppers(scheduler, "edge-0"),
        kit.end(scheduler, "end-0", script=script) as end,
    ):
        job = await scheduler.submit(kit.images(3), escalate="threshold", escalate_from="end", scheme="end-edge")
        done = await scheduler.finished(job["id"])
    assert end.stages == ["all", "fine"]
    assert [(stage[0].below is None, stage[0].only) for stage in end.escalations] == [(False, None), (True, (0, 2))]
    assert (done["state"], done["fallback"], done["final_tier"]) == ("completed", 0, {"end": 1, "edge": 2})


@pytest.mark.parametrize("wrong", ["two tiers swapped", "an image too many", "a label too many", "not asked"])
async def test_an_answer_that_does_not_fit_is_a_failed_attempt(kit, tuned, wrong: str):
    async def script(end, task_id, upstreams, lines):
        good = routed(task_id, lines, [1])
        if len(end.tasks) > 1:
            return good
        answers = good[1]["answers"]
        if wrong == "two tiers swapped":
            answers.reverse()
        elif wrong == "an image too many":
            answers[1]["indices"] = [3]
        elif wrong == "a label too many":
            answers[1]["labels"] = [99, 99]
        else:
            return lines  # a fine answer for all, as without escalation
        return good

    async with (
        kit.scheduler(tuned) as scheduler,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
        kit.end(scheduler, "end-0", script=script) as end,
    ):
        job = await scheduler.submit(kit.images(3), escalate="budget", scheme="mapping")
        done = await scheduler.finished(job["id"])
    assert end.stages == ["all", "all"]
    assert (done["answered_fine"], done["fallback"], done["sent_up"]) == (3, 0, {"edge": 3, "cloud": 1})


async def test_routed_answers_survive_a_restart(kit, tuned):
    async def script(end, task_id, upstreams, lines):
        return routed(task_id, lines, [0])

    async with kit.scheduler(tuned) as scheduler:
        async with kit.uppers(scheduler, "edge-0", "cloud-0"), kit.end(scheduler, "end-0", script=script):
            job = await scheduler.submit(kit.images(4), batch_size=2, escalate="budget", scheme="mapping")
            done = await scheduler.finished(job["id"])
        before = await scheduler.results(job["id"])
    async with kit.scheduler(tuned) as scheduler:
        assert await scheduler.results(job["id"]) == before
        assert await scheduler.job(job["id"]) == done


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        ({"escalate": "sometimes"}, "escalate: Input should be 'always', 'threshold' or 'budget'"),
        ({"escalate": "budget", "escalate_from": "cloud"}, "escalate_from: Input should be 'edge' or 'end'"),
        ({"escalate": "budget", "escalate_budget": "2"}, "escalate_budget: Input should be less than or equal to 1"),
        ({"escalate": "budget", "escalate_budget": "nan"}, "escalate_budget"),
        ({"escalate": "threshold", "escalate_accuracy": "1.2"}, "cannot be reached"),
        ({"escalate": "threshold", "scheme": "end"}, "scheme end sends nothing up"),
        (
            {"escalate": "threshold", "scheme": "end-cloud", "escalate_from": "end"},
            "no tuned threshold from end to cloud",
        ),
        ({"escalate_budget": "0.5"}, "escalate_budget goes with escalate=budget"),
    ],
)
async def test_a_policy_that_cannot_be_kept_is_refused(kit, tuned, policy: dict[str, str], complaint: str):
    async with kit.scheduler(tuned) as scheduler:
        response = await scheduler.try_submit(kit.images(1), **{"scheme": "mapping", **policy})
    assert response.status_code == 400
    assert complaint in response.json()["error"]


@pytest.mark.parametrize("there", ["none", "of other weights", "damaged"])
async def test_without_thresholds_of_these_weights_there_is_no_escalation(kit, tuned, there: str):
    file = tuned.models / TUNING_NAME
    if there == "none":
        file.unlink()
    elif there == "damaged":
        file.write_text("{")
    else:
        file.write_text(file.read_text().replace("0" * 64, "3" * 64))
    async with kit.scheduler(tuned) as scheduler:
        response = await scheduler.try_submit(kit.images(1), escalate="budget", scheme="mapping")
        assert (await scheduler.try_submit(kit.images(1), scheme="mapping")).status_code == 202
    assert response.status_code == 400
    assert "needs tuned thresholds, and this scheduler has none" in response.json()["error"]
