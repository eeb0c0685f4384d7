"""The scheme `adaptive` through the service: routes, estimates, reasons, deadlines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse

from tierkit.testing import wait_for


def told(lines, *, upper_ms: float):
    """The answers with what real nodes say of their own time."""
    lines = [dict(line) for line in lines]
    lines[0] |= {"compute_ms": 5.0, "queue_ms": 0.0, "batch_images": 50}
    for line in lines[1:]:
        line |= {
            "round_trip_ms": upper_ms + 40.0,
            "timing": {"queue_ms": 0.0, "compute_ms": upper_ms, "batch_images": 50},
        }
    return lines


async def answer(end, task_id, upstreams, lines):
    await asyncio.sleep(0.06)  # as long as it says: more would not be believed
    return told(lines, upper_ms=10.0)


async def test_every_task_is_answered_by_the_best_node_and_every_decision_has_its_reason(kit, scheduler):
    async with (
        kit.end(scheduler, "end-0", script=answer) as first,
        kit.end(scheduler, "end-1", script=answer) as second,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        job = await scheduler.submit(kit.images(1000), scheme="adaptive", weight=2)
        view = await scheduler.finished(job["id"])
        assert (view["state"], view["answered_fine"], view["fallback"]) == ("completed", 1000, 0)
        assert len(first.tasks) + len(second.tasks) == 20
        assert first.tasks, "a device did nothing"
        assert second.tasks, "a device did nothing"

        explained = (await scheduler.http.get(f"/v1/jobs/{job['id']}/explain")).json()
        assert (explained["job"], explained["scheme"], explained["state"]) == (job["id"], "adaptive", "completed")
        assert explained["now"] == ""
        assert [decision["task"] for decision in explained["decisions"]] == list(range(20))
        for decision in explained["decisions"]:
            assert decision["node"] in decision["why"]
            assert decision["upstream"] in decision["why"]
            assert "answer in" in decision["why"]
        # Of the pair that answers first, of the more accurate network where that delays nothing, or of a node that
        # would be idle.
        assert {decision["why"].split(",")[0] for decision in explained["decisions"]} <= {
            "earliest finish",
            "more accurate",
            "it runs out of work first",
        }

        mapping = (await scheduler.http.get("/v1/mapping", params={"scheme": "adaptive"})).json()
        assert [pair["end"] for pair in mapping["pairs"]] == ["end-0", "end-1"]
        assert all("answer in" in pair["reason"] and len(pair["upstream"]) == 2 for pair in mapping["pairs"])
        nodes = {node["node_id"]: node for node in mapping["adaptive"]["nodes"]}
        assert nodes["end-0"]["samples"] == len(first.tasks)
        assert nodes["end-0"]["ms_per_image"] < 1.0, "what was measured counts, not what was said at the start"
        assert all(node["tasks"] == 0 and node["backlog_s"] == 0 for node in nodes.values())
        assert {0.04} == {round(link["seconds"], 3) for link in mapping["adaptive"]["links"]}
        assert mapping["formulas"]["bound"]["value"] > 0

        page = (await scheduler.http.get(f"/v1/jobs/{job['id']}/explain", params={"limit": 1, "task": 3})).json()
        assert [decision["task"] for decision in page["decisions"]] == [3]
        assert (await scheduler.http.get("/v1/jobs/nothing/explain")).status_code == 404


async def test_what_would_come_too_late_is_not_asked_for(kit, settings):
    slow_link = settings.model_copy(update={"edge_link_s": 30.0})
    async with (
        kit.scheduler(slow_link) as scheduler,
        kit.end(scheduler, "end-0") as end,
        kit.uppers(scheduler, "edge-0"),
    ):
        job = await scheduler.submit(kit.images(150), scheme="adaptive", deadline_s=10)
        view = await scheduler.finished(job["id"])
        assert (view["state"], view["answered_coarse"], view["fallback"]) == ("completed", 150, 150)
        assert set(end.routes) == {()}
        results = await scheduler.results(job["id"])
        assert results[0]["fallback"] == "deadline: no upstream node would have answered in time"
        explained = (await scheduler.http.get(f"/v1/jobs/{job['id']}/explain")).json()
        # About 10 s: a clock that has not moved on since the job came says 10.00.
        assert re.match(r"no upstream node would answer in time: (9\.|10\.00)", explained["decisions"][0]["why"])


async def test_without_upper_nodes_the_coarse_answer_stands(kit, settings):
    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0"):
        job = await scheduler.submit(kit.images(60), scheme="adaptive")
        view = await scheduler.finished(job["id"])
        assert (view["state"], view["answered_coarse"], view["fallback"]) == ("completed", 60, 60)


async def test_the_reasons_of_the_papers_schemes(kit, scheduler):
    async with kit.end(scheduler, "end-0"), kit.uppers(scheduler, "edge-0", "edge-1"):
        job = await scheduler.submit(kit.images(100), scheme="end-edge")
        await scheduler.finished(job["id"])
        explained = (await scheduler.http.get(f"/v1/jobs/{job['id']}/explain")).json()
        why = "next in order with room; scheme end-edge: 2 edge nodes in sequential order"
        assert [(each["upstream"], each["why"]) for each in explained["decisions"]] == [
            ("edge-0", f"{why}; pixels to edge-0"),
            ("edge-1", f"{why}; pixels to edge-1"),
        ]


async def test_jobs_share_a_device_by_their_weights(kit, settings):
    async with (
        kit.scheduler(settings.model_copy(update={"window": 1})) as scheduler,
        kit.end(scheduler, "end-0") as end,
    ):
        end.gate.clear()
        first = await scheduler.submit(kit.images(20), scheme="end", batch_size=1)
        await wait_for(lambda: end.waiting == 1, what="the first task")
        second = await scheduler.submit(kit.images(20), scheme="end", batch_size=1, weight=3)
        end.gate.set()
        await scheduler.finished(first["id"])
        await scheduler.finished(second["id"])
        # The first of them was alone; of the next 16 three in four are the heavier job's.
        ours = sum(task.startswith(second["id"]) for task in end.tasks[1:17])
        assert 11 <= ours <= 13


async def test_a_task_is_taken_from_an_upper_node_that_has_become_slow(kit, settings):
    """The last task waits for edge-0, which does not answer; edge-1 would."""

    async def script(end, task_id, upstreams, lines):
        lines = told(lines, upper_ms=10.0)
        if task_id.endswith("-9") and len([task for task in end.tasks if task == task_id]) == 1:
            return StreamingResponse(never_fine(json.dumps(lines[0])), media_type="application/x-ndjson")
        if lines[0]["event"] == "coarse" and len([task for task in end.tasks if task == task_id]) > 1:
            lines = lines[1:]  # the coarse answer is known
        return lines

    async def never_fine(coarse: str) -> AsyncIterator[str]:
        yield coarse + "\n"
        await asyncio.Event().wait()

    async with (
        kit.scheduler(settings) as scheduler,
        kit.end(scheduler, "end-0", script=script),
        kit.uppers(scheduler, "edge-0", "edge-1"),
    ):
        job = await scheduler.submit(kit.images(500), scheme="adaptive")
        view = await scheduler.finished(job["id"])
        assert (view["state"], view["answered_fine"], view["fallback"]) == ("completed", 500, 0)
        attempts = (await scheduler.http.get(f"/v1/jobs/{job['id']}/attempts", params={"task": 9})).json()["attempts"]
        assert [(attempt["stage"], attempt["outcome"]) for attempt in attempts] == [("all", "rerouted"), ("fine", "ok")]
        assert attempts[0]["upstream"] != attempts[1]["upstream"]
        assert "is expected to answer in" in attempts[0]["reason"]
