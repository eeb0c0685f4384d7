"""A job from its submission to its results, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.hierarchy import Hierarchy, bundled_hierarchy
from scheduler.settings import SchedulerSettings
from tierkit.testing import wait_for


async def test_mapping_answers_every_image_coarse_then_fine(kit, scheduler):
    async with (
        kit.end(scheduler, "end-0") as first,
        kit.end(scheduler, "end-1") as second,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        job = await scheduler.submit(kit.images(230), labels=np.arange(230) % 100, name="all")
        view = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    assert view["state"] == "completed"
    assert view["reason"] == ""
    assert (view["tasks"], view["images"]) == (5, 230)
    assert view["answered_coarse"] == view["answered_fine"] == 230
    assert (view["fallback"], view["failed_images"]) == (0, 0)
    assert view["fine_accuracy"] == view["coarse_accuracy"] == view["coarse_from_fine_accuracy"] == 1.0
    assert view["mapping"] == {"end-0": "edge-0", "end-1": "cloud-0"}
    assert view["by_node"]["end-0"]["coarse_images"] + view["by_node"]["end-1"]["coarse_images"] == 230
    assert view["by_node"]["edge-0"]["fine_images"] + view["by_node"]["cloud-0"]["fine_images"] == 230
    assert view["fine_p99_ms"] >= view["coarse_p50_ms"] > 0
    assert sorted(first.tasks + second.tasks) == [f"{job['id']}-{k}" for k in range(5)]
    assert [result["index"] for result in results] == list(range(230))
    hierarchy = bundled_hierarchy()
    for index, result in enumerate(results):
        assert result["fine"]["label"] == hierarchy.fine[index % 100] == result["true_fine"]
        assert result["coarse"]["label"] == hierarchy.coarse[hierarchy.parent[index % 100]] == result["true_coarse"]
        assert result["request_id"] == f"{job['id']}-{index // 50}"


async def test_a_result_has_what_was_sent_up_if_its_image_went_by_itself(kit, scheduler):
    sent = {"form": "pixels", "upload_bytes": 3321}

    async def script(end, task_id, upstreams, lines):
        return [lines[0], {**lines[1], "sent": sent}]

    async with kit.end(scheduler, "end-0", script=script), kit.uppers(scheduler, "edge-0"):
        job = await scheduler.submit(kit.images(3), batch_size=2, scheme="end-edge")
        await scheduler.finished(job["id"])
        fine = [result["fine"] for result in await scheduler.results(job["id"])]
    alone = {**sent, "encode_ms": 0.0, "encoded_by": None, "relay_bytes": 0}
    assert [answer["sent"] for answer in fine] == [None, None, alone]
    assert all(0 < answer["coarse_confidence"] <= 1 for answer in fine)


async def test_a_job_whose_pixels_are_gone_fails_and_says_so(kit, settings):
    async with kit.scheduler(settings) as scheduler:
        job = await scheduler.submit(kit.images(10))
    for file in (settings.state / "inputs").iterdir():
        file.unlink()
    async with kit.scheduler(settings) as scheduler:
        view = await scheduler.job(job["id"])
        assert (view["state"], view["failed_images"]) == ("failed", 10)
        assert "of an unfinished job is gone" in view["reason"]


@pytest.fixture
def few_classes(settings: SchedulerSettings, tmp_path: Path) -> Path:
    """A model set of two classes without a hierarchy."""
    assert settings.models is not None
    manifest = json.loads((settings.models / "manifest.json").read_text())
    manifest["hierarchy"] = Hierarchy.flat("few", ["yes", "no"]).content()
    manifest["models"] = [{**entry, "classes": 2} for entry in manifest["models"]]
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


async def test_jobs_keep_the_classes_of_their_model_set(kit, settings, few_classes):
    async def told(scheduler: Any) -> Any:
        job = f"/v1/jobs/{done['id']}"
        table = (await scheduler.http.get(f"{job}/results", params={"format": "csv"})).text
        events = [data for kind, _, data in await scheduler.events(done["id"]) if kind != "state"]
        return await scheduler.job(done["id"]), await scheduler.results(done["id"]), table, events

    async with kit.scheduler(settings) as scheduler:
        async with kit.end(scheduler, "end-0"):
            done = await scheduler.submit(kit.images(60), labels=np.arange(60), scheme="end")
            await scheduler.finished(done["id"])
        open_job = await scheduler.submit(kit.images(10), scheme="end")
        before = await told(scheduler)
    assert before[1][59]["true_fine"] == bundled_hierarchy().fine[59]
    async with kit.scheduler(settings.model_copy(update={"models": few_classes})) as scheduler:
        assert await told(scheduler) == before
        listed = (await scheduler.http.get("/v1/jobs")).json()["jobs"]
        assert [(job["id"], job["flat"]) for job in listed] == [(open_job["id"], False), (done["id"], False)]
        view = await scheduler.job(open_job["id"])
        assert (view["state"], view["failed_images"]) == ("failed", 10)
        assert "other classes" in view["reason"]
        assert all(result["error"] for result in await scheduler.results(open_job["id"]))
        new = await scheduler.submit(kit.images(1), scheme="end")
        assert new["flat"]
    async with kit.scheduler(settings) as scheduler:
        assert await told(scheduler) == before
        assert (await scheduler.job(new["id"]))["state"] == "failed"


async def test_a_deadline_that_passed_while_nobody_was_there_ends_the_job(kit, settings):
    async with kit.scheduler(settings) as scheduler:
        job = await scheduler.submit(kit.images(10), deadline_s=0.01)
    async with kit.scheduler(settings) as scheduler:
        view = await scheduler.finished(job["id"])
        assert (view["state"], view["failed_images"]) == ("failed", 10)


async def test_failed_attempts_are_counted_across_a_restart(kit, settings):
    """Three before and two after make the five that a task has."""

    async def script(end, task_id, upstreams, lines):
        if len(end.tasks) == 4:
            end.gate.clear()
            await end.gate.wait()
        return kit.json_response({"error": "broken"}, 500)

    async with AsyncExitStack() as nodes, kit.scheduler(settings) as scheduler:
        end = await nodes.enter_async_context(kit.end(scheduler, "end-0", script=script))
        job = await scheduler.submit(kit.images(10), scheme="end")
        await wait_for(lambda: len(end.tasks) == 4, what="the fourth attempt")
        # The scheduler has gone in the middle of the fourth: that one counts for nothing.
    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0", script=script) as end:
        view = await scheduler.finished(job["id"])
        assert (view["state"], len(end.tasks)) == ("failed", 2)


async def test_finished_jobs_are_forgotten_after_their_retention(kit, settings):
    async with kit.scheduler(settings) as scheduler:
        done = await scheduler.submit(kit.images(10))
        await scheduler.http.delete(f"/v1/jobs/{done['id']}")
        kept = await scheduler.submit(kit.images(10))
    async with kit.scheduler(settings.model_copy(update={"retention_s": 1e-6})) as scheduler:
        await wait_for(lambda: forgotten(scheduler, done), what="the job to be forgotten")
        assert (await scheduler.job(kept["id"]))["state"] == "queued"


async def forgotten(scheduler, job) -> bool:
    return bool((await scheduler.http.get(f"/v1/jobs/{job['id']}")).status_code == 404)


async def test_too_many_unfinished_jobs_are_refused_for_now(kit, settings):
    async with kit.scheduler(settings.model_copy(update={"max_unfinished_jobs": 2})) as scheduler:
        first = await scheduler.submit(kit.images(1))
        await scheduler.submit(kit.images(1))
        refused = await scheduler.try_submit(kit.images(1))
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        await scheduler.http.delete(f"/v1/jobs/{first['id']}")
        await scheduler.submit(kit.images(1))


async def test_many_jobs_at_once_over_several_devices(kit, scheduler):
    async with (
        kit.end(scheduler, "end-0"),
        kit.end(scheduler, "end-1"),
        kit.end(scheduler, "end-2"),
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        jobs = await asyncio.gather(*(scheduler.submit(kit.images(70 + k), batch_size=20) for k in range(12)))
        views = await asyncio.gather(*(scheduler.finished(job["id"]) for job in jobs))
        for k, view in enumerate(views):
            assert (view["state"], view["answered_fine"]) == ("completed", 70 + k)
            results = await scheduler.results(view["id"])
            assert [result["fine"]["index"] for result in results] == [index % 100 for index in range(70 + k)]


async def test_a_repeated_submission_is_answered_though_no_further_job_is_taken(kit, settings):
    async with kit.scheduler(settings.model_copy(update={"max_unfinished_jobs": 1})) as scheduler:
        body, headers = kit.tensor_body(kit.images(2))
        first = await scheduler.http.post("/v1/jobs", content=body, headers={**headers, "Idempotency-Key": "k1"})
        other = await scheduler.http.post("/v1/jobs", content=body, headers={**headers, "Idempotency-Key": "k2"})
        again = await scheduler.http.post("/v1/jobs", content=body, headers={**headers, "Idempotency-Key": "k1"})
    assert (first.status_code, other.status_code, again.status_code) == (202, 503, 200)
    assert again.json()["id"] == first.json()["id"]


async def test_uploads_under_way_count_as_unfinished_jobs(kit, settings):
    body, headers = kit.tensor_body(kit.images(2))
    finish = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:1000]
        await finish.wait()
        yield body[1000:]

    async with kit.scheduler(settings.model_copy(update={"max_unfinished_jobs": 2})) as scheduler:

        async def refused() -> bool:
            answer = await scheduler.http.post("/v1/jobs", content=b"")
            return (answer.status_code, answer.headers.get("Retry-After")) == (503, "5")

        async def free() -> bool:
            return not await refused()

        async def upload() -> int:
            answer = await scheduler.http.post("/v1/jobs", content=slowly(), headers=headers)
            return int(answer.status_code)

        uploads = [asyncio.create_task(upload()) for _ in range(2)]
        await wait_for(refused, what="two uploads that have begun")
        uploads.pop().cancel()  # whoever hangs up gives his place back
        await wait_for(free, what="a place")
        await scheduler.submit(kit.images(1))
        assert await refused()
        finish.set()
        assert await asyncio.gather(*uploads) == [202]
        assert await refused()
