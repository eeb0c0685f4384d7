"""What is tried again, where, how often, and what is left alone."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from scheduler.api.app import create_app
from scheduler.core.work import OpenJob
from scheduler.dispatch.active_job import ActiveJob
from tests.integration.scheduler.test_dispatching import counts, has
from tierkit.testing import listening, serve_app, wait_for


async def test_upper_nodes_that_fail_are_asked_again_through_another_device_without_the_coarse_work(kit, scheduler):
    async def cut_off(end, task_id, upstreams, lines):
        tried = [upstream.node_id for upstream in upstreams]
        fallback = {"reason": "upstream_unavailable", "detail": "refused", "tried": tried}
        return [lines[0], {"event": "fallback", "task_id": task_id, **fallback}]

    async with (
        kit.end(scheduler, "end-0", script=cut_off) as lonely,
        kit.end(scheduler, "end-1") as other,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        job = await scheduler.submit(kit.images(200))
        view = await scheduler.finished(job["id"])
    assert counts(view) == ("completed", 200, 200, 0, 0)
    assert (lonely.stages + other.stages).count("all") == 4
    assert "all" in lonely.stages
    assert "fine" in other.stages


async def test_an_upper_node_with_which_a_task_failed_comes_last_the_next_time(kit, scheduler):
    async def script(end, task_id, upstreams, lines):
        if len(end.tasks) > 1:
            return lines
        fallback = {"reason": "upstream_error", "detail": "500", "tried": [upstreams[0].node_id]}
        return [lines[0], {"event": "fallback", "task_id": task_id, **fallback}]

    async with kit.end(scheduler, "end-0", script=script) as end, kit.uppers(scheduler, "edge-0", "cloud-0"):
        job = await scheduler.submit(kit.images(50))
        assert counts(await scheduler.finished(job["id"])) == ("completed", 50, 50, 0, 0)
    assert end.routes == [("edge-0", "cloud-0"), ("cloud-0", "edge-0")]


async def test_the_last_upper_node_gone_the_coarse_answer_stands_at_once(kit, scheduler):
    async def script(end, task_id, upstreams, lines):
        await scheduler.http.delete("/v1/devices/edge-0")
        fallback = {"reason": "upstream_unavailable", "detail": "refused", "tried": ["edge-0"]}
        return [lines[0], {"event": "fallback", "task_id": task_id, **fallback}]

    async with kit.end(scheduler, "end-0", script=script) as end:
        await scheduler.register("edge-0", "edge")
        job = await scheduler.submit(kit.images(50))
        assert counts(await scheduler.finished(job["id"])) == ("completed", 50, 0, 50, 0)
        assert end.stages == ["all"]


async def test_after_a_restart_only_the_fine_stage_is_left(kit, settings):
    async with AsyncExitStack() as nodes, kit.scheduler(settings) as scheduler:
        end = await nodes.enter_async_context(kit.end(scheduler, "end-0"))
        await nodes.enter_async_context(kit.uppers(scheduler, "edge-0"))
        end.fine_gate.clear()
        job = await scheduler.submit(kit.images(100))
        await wait_for(lambda: has(scheduler, job, ("running", 100, 0, 0, 0)), what="all coarse answers")
    async with (
        kit.scheduler(settings) as scheduler,
        kit.end(scheduler, "end-0") as end,
        kit.uppers(scheduler, "edge-0"),
    ):
        view = await scheduler.finished(job["id"])
    assert counts(view) == ("completed", 100, 100, 0, 0)
    assert end.stages == ["fine", "fine"]


class Killers:
    """End nodes that one of the tasks kills: the connection breaks, then nobody listens any more."""

    def __init__(self, poison: str) -> None:
        self.poison = poison
        self.dead: list[str] = []
        self.over = asyncio.Event()

    async def script(self, end, task_id, upstreams, lines):
        if end.node_id in self.dead:
            await self.over.wait()
        if task_id.endswith(self.poison):
            self.dead.append(end.node_id)
            end.beats.cancel()
            await self.over.wait()
        return lines


async def test_a_task_that_kills_its_nodes_is_quarantined_and_the_rest_completes(kit, scheduler):
    killers = Killers("-3")
    async with AsyncExitStack() as nodes:
        for number in range(5):
            await nodes.enter_async_context(kit.end(scheduler, f"end-{number}", script=killers.script))
        job = await scheduler.submit(kit.images(1000), scheme="end", deadline_s=25)
        view = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
        killers.over.set()
    assert counts(view) == ("completed", 950, 0, 0, 50)
    assert view["quarantined_images"] == 50
    assert view["reason"].endswith("quarantined, since nodes died with them: images 150-199")
    assert len(killers.dead) == 3
    errors = {result["index"]: result["error"] for result in results if result["error"]}
    assert sorted(errors) == list(range(150, 200))
    assert errors[150].startswith("quarantined: 3 nodes died or got stuck with it (")


async def test_an_end_device_that_dies_while_an_upper_node_works_is_no_evidence(kit, scheduler):
    async with AsyncExitStack() as nodes:
        left = [await nodes.enter_async_context(kit.end(scheduler, f"end-{number}")) for number in range(4)]
        await nodes.enter_async_context(kit.uppers(scheduler, "edge-0"))
        for end in left:
            end.fine_gate.clear()
        job = await scheduler.submit(kit.images(50))
        while len(left) > 1:
            await wait_for(lambda: any(end.stages for end in left), what="an end device that has the task")
            holder = next(end for end in left if end.stages)
            await wait_for(lambda: has(scheduler, job, ("running", 50, 0, 0, 0)), what="the coarse answer")
            holder.beats.cancel()
            left.remove(holder)
        left[0].fine_gate.set()
        view = await scheduler.finished(job["id"])
    assert counts(view) == ("completed", 50, 50, 0, 0)
    assert view["quarantined_images"] == 0


async def test_the_end_of_a_connection_counts_as_death_once_the_node_is_known_to_be_dead(kit, scheduler):
    """A killed node breaks its connections before anybody knows that it is dead."""
    async with AsyncExitStack() as nodes:
        beats: dict[str, asyncio.Task[None]] = {}

        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/v1/tasks/" in head:
                port = writer.get_extra_info("sockname")[1]
                beats[f"http://127.0.0.1:{port}"].cancel()
            writer.close()

        # Somebody who is heard: otherwise the scheduler would doubt itself for ten seconds first.
        await nodes.enter_async_context(kit.uppers(scheduler, "edge-0"))
        for number in range(3):
            url = await nodes.enter_async_context(listening(die))
            incarnation = await scheduler.register(f"end-{number}", "end", url=url)
            beats[url] = asyncio.create_task(scheduler.keep_alive(f"end-{number}", "end", incarnation, url=url))
            nodes.callback(beats[url].cancel)
        job = await scheduler.submit(kit.images(50), scheme="end", deadline_s=20)
        view = await scheduler.finished(job["id"])
    assert counts(view) == ("failed", 0, 0, 0, 50)
    assert view["quarantined_images"] == 50


async def test_a_node_that_was_taken_off_the_list_has_not_died(kit, scheduler):
    async with AsyncExitStack() as nodes:
        ends = [await nodes.enter_async_context(kit.end(scheduler, f"end-{number}")) for number in range(4)]
        for end in ends[:3]:
            end.gate.clear()
            end.beats.cancel()
        job = await scheduler.submit(kit.images(50), scheme="end")
        for _ in range(3):
            await wait_for(lambda: ends[3].tasks or any(end.waiting for end in ends[:3]), what="the task")
            if ends[3].tasks:
                break
            holder = next(end for end in ends[:3] if end.waiting)
            await scheduler.http.delete(f"/v1/devices/{holder.node_id}")
            holder.gate.set()
        assert counts(await scheduler.finished(job["id"])) == ("completed", 50, 0, 0, 0)


@pytest.mark.parametrize("silent", [0, 1, 3])
async def test_reassign_sends_one_after_the_other_and_pays_for_each_silent_device(kit, settings, silent):
    async def never(reader, writer):
        await asyncio.Event().wait()

    settings = settings.model_copy(update={"acknowledge_s": 0.1})
    async with AsyncExitStack() as nodes:
        scheduler = await nodes.enter_async_context(kit.scheduler(settings))
        for number in range(silent):
            url = await nodes.enter_async_context(listening(never))
            incarnation = await scheduler.register(f"end-{number}", "end", url=url)
            beats = asyncio.create_task(scheduler.keep_alive(f"end-{number}", "end", incarnation, url=url))
            nodes.callback(beats.cancel)
        for number in range(silent, 4):
            await nodes.enter_async_context(kit.end(scheduler, f"end-{number}"))
        job = await scheduler.submit(kit.images(200), scheme="end", recovery="reassign", batch_size=25)
        view = await scheduler.finished(job["id"])
        attempts = (await scheduler.http.get(f"/v1/jobs/{job['id']}/attempts")).json()["attempts"]
    assert counts(view) == ("completed", 200, 0, 0, 0)
    sent_in_vain = sum(attempt["outcome"] == "unreachable" for attempt in attempts)
    assert sent_in_vain >= 2 * silent
    assert view["elapsed_s"] >= 0.1 * sent_in_vain  # Eq. 9


@pytest.mark.parametrize("stage", ["coarse", "fine"])
async def test_a_straggler_is_hedged_on_an_idle_device_and_the_loser_is_dropped(kit, settings, stage):
    slow_task, over = "-35", asyncio.Event()

    async def script(end, task_id, upstreams, lines):
        if task_id.endswith(slow_task) and stage == "coarse" and end.node_id == "end-0":
            await over.wait()
        if task_id.endswith(slow_task):
            end.fine_gate.clear()
        return lines

    async with (
        kit.scheduler(settings.model_copy(update={"hedge": True, "window": 1})) as scheduler,
        kit.end(scheduler, "end-0", script=script) as slow,
        kit.end(scheduler, "end-1") as other,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        other.gate.clear()
        job = await scheduler.submit(kit.images(360), batch_size=10)
        await wait_for(lambda: len(slow.tasks) == 35, what="the straggler")
        other.gate.set()
        view = await scheduler.finished(job["id"])
        attempts = (await scheduler.http.get(f"/v1/jobs/{job['id']}/attempts")).json()["attempts"]
        over.set()
    assert counts(view) == ("completed", 360, 360, 0, 0)
    last = [(each["node"], each["outcome"], each["hedge"]) for each in attempts if each["task"] == 35]
    assert last == [("end-0", "cancelled", False), ("end-1", "ok", True)]
    assert other.stages[-1] == ("all" if stage == "coarse" else "fine")


async def test_attempts_are_told_page_by_page_with_those_under_way(kit, scheduler):
    async def script(end, task_id, upstreams, lines):
        if task_id.endswith("-1") and end.tasks.count(task_id) == 1:
            return kit.json_response({"error": "broken"}, 500)
        return lines

    async with kit.end(scheduler, "end-0", script=script) as end, kit.uppers(scheduler, "edge-0"):
        job = await scheduler.submit(kit.images(130))
        where, cursor = f"/v1/jobs/{job['id']}/attempts", None
        seen: list[dict[str, Any]] = []

        async def all_told() -> bool:
            told = (await scheduler.http.get(where)).json()["attempts"]
            return [each["outcome"] for each in told] == ["ok", "error", "ok", "ok"]

        await wait_for(all_told, what="the rows of all attempts")
        while cursor is not None or not seen:
            query = {"limit": 1, **({"cursor": cursor} if cursor else {})}
            page = (await scheduler.http.get(where, params=query)).json()
            seen += page["attempts"]
            cursor = page["next_cursor"]
        assert seen == (await scheduler.http.get(where)).json()["attempts"]
        assert [(each["task"], each["attempt"], each["outcome"]) for each in seen] == [
            (0, 1, "ok"),
            (1, 1, "error"),
            (1, 2, "ok"),
            (2, 1, "ok"),
        ]
        wrong = seen[1]
        assert (wrong["node"], wrong["incarnation"], wrong["tier"]) == ("end-0", end.incarnation, "end")
        assert (wrong["upstream"], wrong["stage"], wrong["hedge"]) == ("edge-0", "all", False)
        assert wrong["reason"].startswith("end-0 answered 500")
        assert (wrong["first_image"], wrong["images"], seen[3]["images"]) == (50, 50, 30)
        assert wrong["ms"] > 0
        only = (await scheduler.http.get(where, params={"task": 1})).json()["attempts"]
        assert only == seen[1:3]

        end.gate.clear()
        job = await scheduler.submit(kit.images(100), scheme="end")
        await wait_for(lambda: end.waiting == 2, what="tasks under way")
        running = (await scheduler.http.get(f"/v1/jobs/{job['id']}/attempts")).json()["attempts"]
        assert [(each["task"], each["outcome"], each["ended_at"]) for each in running] == [
            (0, "running", None),
            (1, "running", None),
        ]
        await scheduler.http.delete(f"/v1/jobs/{job['id']}")

        async def cancelled() -> bool:
            told = (await scheduler.http.get(f"/v1/jobs/{job['id']}/attempts")).json()["attempts"]
            return [each["outcome"] for each in told] == ["cancelled"] * 2

        await wait_for(cancelled, what="the rows of the cancelled attempts")


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"cursor": "x"}, "cursor is the next_cursor of the page before, not 'x'"),
        ({"cursor": "1-²"}, "cursor is the next_cursor"),
        ({"limit": 0}, "limit: Input should be greater than or equal to 1"),
        ({"task": -1}, "task: Input should be greater than or equal to 0"),
    ],
)
async def test_wrong_questions_about_attempts(kit, scheduler, query, sentence):
    job = await scheduler.submit(kit.images(1))
    answer = await scheduler.http.get(f"/v1/jobs/{job['id']}/attempts", params=query)
    assert answer.status_code in (400, 422)
    assert sentence in answer.json()["error"]
    assert (await scheduler.http.get("/v1/jobs/none/attempts")).status_code == 404


async def test_a_job_whose_tasks_all_fail_pays_its_retries_from_its_budget(kit, settings):
    settings = settings.model_copy(update={"retries_per_s": 3.0, "retry_burst": 1})

    async def broken(end, task_id, upstreams, lines):
        return kit.json_response({"error": "broken"}, 500)

    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0", script=broken) as end:
        job = await scheduler.submit(kit.images(10), scheme="end")
        view = await scheduler.finished(job["id"])
        assert len(end.tasks) == 5
    assert counts(view) == ("failed", 0, 0, 0, 10)
    # Four retries: one at once, the others when their tokens are there; without a budget 0.75 s at most.
    assert view["elapsed_s"] >= 0.9


async def test_nothing_is_kept_of_jobs_that_have_ended_though_their_upper_node_was_busy(kit, scheduler):
    """A node that refuses a task may be dying, so its tasks are remembered until it is known whether it does."""

    async def script(end, task_id, upstreams, lines):
        if end.tasks.count(task_id) > 2:
            return lines
        fallback = {"reason": "upstream_unavailable", "detail": "busy", "tried": ["edge-0"]}
        return [lines[0], {"event": "fallback", "task_id": task_id, **fallback}]

    def jobs_in_memory() -> int:
        gc.collect()
        return sum(isinstance(thing, ActiveJob | OpenJob) for thing in gc.get_objects())

    before = jobs_in_memory()
    async with kit.end(scheduler, "end-0", script=script), kit.uppers(scheduler, "edge-0"):
        jobs = [await scheduler.submit(kit.images(40), batch_size=10) for _ in range(4)]
        for job in jobs:
            assert counts(await scheduler.finished(job["id"])) == ("completed", 40, 40, 0, 0)
        await wait_for(lambda: jobs_in_memory() <= before, what="the end of the last job in memory", timeout_s=10)


async def answers_500(end, task_id, upstreams, lines):
    return Response("broken", status_code=500)


def crash(*_: object, **__: object) -> float:
    raise RuntimeError("a fault in the scheduler")


async def test_a_crash_in_deciding_what_follows_an_attempt_fails_its_job_and_no_other(kit, scheduler, monkeypatch):
    monkeypatch.setattr("scheduler.core.step.retry_wait_s", crash)
    async with kit.end(scheduler, "end-0", script=answers_500) as end:
        job = await scheduler.submit(kit.images(20), scheme="end", batch_size=10)
        view = await scheduler.finished(job["id"])
        end.script = None
        other = await scheduler.submit(kit.images(20), scheme="end")
        assert counts(await scheduler.finished(other["id"])) == ("completed", 20, 0, 0, 0)
        devices = (await scheduler.http.get("/v1/devices")).json()["devices"]
    assert counts(view) == ("failed", 0, 0, 0, 20)
    assert "internal error" in view["reason"]
    assert "a fault in the scheduler" in view["reason"]
    assert [device["outstanding"] for device in devices] == [0]


async def test_a_crash_that_the_job_cannot_be_told_of_ends_the_service(kit, settings, monkeypatch):
    monkeypatch.setattr("scheduler.core.step.retry_wait_s", crash)
    monkeypatch.setattr("scheduler.core.poison.Suspicion.forget_job", crash)
    async with (
        serve_app(lambda lifecycle: create_app(settings, lifecycle), settings) as lifecycle,
        httpx.AsyncClient(base_url=lifecycle.url) as http,
    ):
        scheduler = kit.running(lifecycle.url, http, settings)
        async with kit.end(scheduler, "end-0", script=answers_500, beating=False):
            await scheduler.submit(kit.images(20), scheme="end")
            await wait_for(lambda: lifecycle.crash is not None, what="the end of the service")
            assert lifecycle.draining
