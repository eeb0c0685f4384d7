"""What becomes of tasks when devices are slow, wrong, silent or gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, StreamingResponse

from tierkit.testing import listening, wait_for


def counts(view) -> tuple[str, int, int, int, int]:
    return (
        view["state"],
        view["answered_coarse"],
        view["answered_fine"],
        view["fallback"],
        view["failed_images"],
    )


async def test_a_device_never_has_more_tasks_than_its_window(kit, settings):
    async with (
        kit.scheduler(settings.model_copy(update={"window": 2})) as scheduler,
        kit.end(scheduler, "end-0") as first,
        kit.end(scheduler, "end-1") as second,
    ):
        first.gate.clear()
        second.gate.clear()
        job = await scheduler.submit(kit.images(500), scheme="end")
        await wait_for(lambda: first.waiting == 2 and second.waiting == 2, what="full windows")
        # One more answer, one more task: the order over the devices goes on.
        assert [task.rpartition("-")[2] for task in first.tasks] == ["0", "2"]
        assert [task.rpartition("-")[2] for task in second.tasks] == ["1", "3"]
        first.gate.set()
        second.gate.set()
        assert counts(await scheduler.finished(job["id"])) == ("completed", 500, 0, 0, 0)
        assert first.most_waiting == second.most_waiting == 2


async def test_end_edge_goes_over_the_edge_nodes_in_sequential_order(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0", "edge-1", "cloud-0"):
        job = await scheduler.submit(kit.images(200), scheme="end-edge")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 200, 200, 0, 0)
        assert sorted(end.routes) == sorted([("edge-0", "edge-1"), ("edge-1", "edge-0")] * 2)


async def test_without_an_upper_node_the_coarse_answer_stands(kit, settings):
    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0"):
        job = await scheduler.submit(kit.images(60))
        view = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    assert counts(view) == ("completed", 60, 0, 60, 0)
    assert results[0]["fallback"].startswith("no_upstream: no upstream node of scheme mapping")
    assert results[0]["coarse"] is not None
    assert results[0]["fine"] is None


WRONG: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "garbage": lambda lines: ["{not json", *lines],
    "another task": lambda lines: [{**lines[0], "task_id": "other-0"}],
    "too few labels": lambda lines: [{**lines[0], "labels": lines[0]["labels"][1:]}],
    "a label that does not exist": lambda lines: [{**lines[0], "labels": [20, *lines[0]["labels"][1:]]}],
    "another node's name": lambda lines: [{**lines[0], "node_id": "end-9"}],
    "a fine answer from nobody asked": lambda lines: [lines[0], {**lines[1], "node_id": "edge-7"}],
    "a fine label that does not exist": lambda lines: [lines[0], {**lines[1], "labels": [100] * 50}],
    "fine before coarse": lambda lines: [lines[1], lines[0]],
    "coarse twice": lambda lines: [lines[0], lines[0], lines[1]],
    "broken off after coarse": lambda lines: lines[:1],
    "nothing": lambda lines: [],
    "an error line": lambda lines: [lines[0], {"event": "error", "task_id": lines[0]["task_id"], "error": "boom"}],
    "another kind of answer": lambda lines: PlainTextResponse("hello"),
    "500": lambda lines: PlainTextResponse("broken", status_code=500),
    "404": lambda lines: PlainTextResponse("what?", status_code=404),
    "an endless refusal": lambda lines: StreamingResponse(iter([b"x" * 65536] * 100), status_code=500),
    "an endless line": lambda lines: StreamingResponse(iter([b"x" * 65536] * 100), media_type="application/x-ndjson"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_device_that_answers_nonsense_is_believed_nothing(kit, scheduler, wrong):
    """Its tasks are answered by the other device; no image twice, none wrong. What it has said of a task before that is
    told once more, by another one."""

    async def script(end, task_id, upstreams, lines):
        return WRONG[wrong](lines)

    async with (
        kit.end(scheduler, "end-0", script=script) as liar,
        kit.end(scheduler, "end-1"),
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        job = await scheduler.submit(kit.images(200))
        events = await scheduler.events(job["id"])
    assert counts(events[-1][2]) == ("completed", 200, 200, 0, 0)
    assert liar.tasks
    coarse, fine = (
        [result["index"] for kind, _, data in events if kind == stage for result in data["results"]]
        for stage in ("coarse", "fine")
    )
    assert sorted(fine) == sorted(set(coarse)) == list(range(200))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
async def test_a_device_that_cannot_be_reached_loses_its_task_to_another(kit, scheduler, url):
    await scheduler.register("end-0", "end", url=url)
    async with kit.end(scheduler, "end-1"):
        job = await scheduler.submit(kit.images(100), scheme="end")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 100, 0, 0, 0)


async def test_a_refused_connection_makes_a_device_suspect_until_its_next_heartbeat(kit, scheduler):
    incarnation = await scheduler.register("end-0", "end", url="http://127.0.0.1:9")
    job = await scheduler.submit(kit.images(50), scheme="end", deadline_s=30)
    await wait_for(lambda: says(scheduler, job, "end-0: suspect: end-0 cannot be reached"), what="the accusation")
    assert await health(scheduler) == "suspect"
    await scheduler.http.delete(f"/v1/jobs/{job['id']}")
    await scheduler.beat("end-0", incarnation)
    assert await health(scheduler) == "alive"


async def health(scheduler) -> str:
    return str((await scheduler.http.get("/v1/devices")).json()["devices"][0]["health"])


async def test_a_silent_device_loses_its_tasks_when_its_lease_runs_out(kit, scheduler):
    async with kit.end(scheduler, "end-0") as silent, kit.end(scheduler, "end-1"):
        silent.gate.clear()
        job = await scheduler.submit(kit.images(300), scheme="end")
        await wait_for(lambda: silent.waiting > 0, what="a task on the device")
        silent.beats.cancel()
        view = await scheduler.finished(job["id"])
        assert counts(view) == ("completed", 300, 0, 0, 0)
        assert set(view["by_node"]) == {"end-1"}
        device = (await scheduler.http.get("/v1/devices")).json()["devices"][0]
        assert (device["health"], device["outstanding"]) == ("dead", 0)
        assert "has run out" in device["reason"]


@pytest.mark.parametrize("how", ["removed", "registered again", "moved"])
async def test_a_device_that_leaves_loses_its_tasks_at_once(kit, scheduler, how):
    other_place = kit.fake_end("end-0")
    async with (
        kit.end(scheduler, "end-0") as gone,
        kit.end(scheduler, "end-1"),
        kit.serving(other_place, []) as url,
    ):
        gone.gate.clear()
        job = await scheduler.submit(kit.images(300), scheme="end")
        await wait_for(lambda: gone.waiting > 0, what="a task on the device")
        gone.beats.cancel()
        if how == "removed":
            assert (await scheduler.http.delete("/v1/devices/end-0")).status_code == 204
        elif how == "moved":
            place = kit.registration("end-0", url=url) | {"incarnation": gone.incarnation}
            assert (await scheduler.http.post("/v1/devices", json=place)).json() == {"lease_s": 1.0, "heartbeat_s": 0.1}
        else:
            await scheduler.register("end-0", "end", url=gone.url)
            gone.gate.set()
        assert counts(await scheduler.finished(job["id"])) == ("completed", 300, 0, 0, 0)


async def test_a_draining_device_finishes_what_it_has_and_gets_nothing_new(kit, scheduler):
    async with kit.end(scheduler, "end-0") as leaving, kit.end(scheduler, "end-1") as other:
        leaving.gate.clear()
        other.gate.clear()
        job = await scheduler.submit(kit.images(500), scheme="end")
        await wait_for(lambda: leaving.waiting == 3, what="a full window")
        assert (await scheduler.http.post("/v1/devices/end-0/drain")).status_code == 204
        leaving.gate.set()
        other.gate.set()
        view = await scheduler.finished(job["id"])
        assert counts(view) == ("completed", 500, 0, 0, 0)
        assert len(leaving.tasks) == 3
        assert view["by_node"]["end-0"]["coarse_images"] == 150


async def test_a_drained_device_is_given_tasks_again(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end:
        assert (await scheduler.http.post("/v1/devices/end-0/drain")).status_code == 204
        job = await scheduler.submit(kit.images(100), scheme="end")
        assert (await scheduler.http.get("/v1/devices")).json()["devices"][0]["health"] == "draining"
        assert end.tasks == []
        assert (await scheduler.http.delete("/v1/devices/end-0/drain")).status_code == 204
        assert counts(await scheduler.finished(job["id"])) == ("completed", 100, 0, 0, 0)
        # What drains because it is being stopped does so whatever the scheduler is told. It beats once more, and no
        # other beat says the contrary.
        end.beats.cancel()
        await asyncio.gather(end.beats, return_exceptions=True)
        await scheduler.beat("end-0", end.incarnation, draining=True)
        refused = await scheduler.http.delete("/v1/devices/end-0/drain")
        assert refused.status_code == 409
        assert "by its own word" in refused.json()["error"]
    assert (await scheduler.http.delete("/v1/devices/none/drain")).status_code == 404


async def test_each_task_leaves_one_line_with_its_request_id(kit, scheduler, caplog):
    caplog.set_level(logging.DEBUG)
    async with kit.end(scheduler, "end-0"), kit.uppers(scheduler, "edge-0"):
        job = await scheduler.submit(kit.images(100))
        await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    lines = [vars(record) for record in caplog.records if record.message == "task done"]
    assert {line["request_id"] for line in lines} == {result["request_id"] for result in results}
    assert sorted((line["job"], line["task"], line["outcome"]) for line in lines) == [
        (job["id"], task, "fine") for task in range(2)
    ]
    assert all(line["ms"] > 0 for line in lines)
    (ended,) = [vars(record) for record in caplog.records if record.message == "job ended"]
    assert "why" not in ended


async def test_a_device_that_says_not_now_is_left_alone_and_blamed_for_nothing(kit, scheduler):
    refusals = 0

    async def script(end, task_id, upstreams, lines):
        nonlocal refusals
        refusals += 1
        if refusals <= 8:  # more often than attempts may fail
            return PlainTextResponse("busy", status_code=503, headers={"Retry-After": "0.1"})
        return lines

    async with kit.end(scheduler, "end-0", script=script):
        job = await scheduler.submit(kit.images(50), scheme="end")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 50, 0, 0, 0)
        assert refusals == 9


async def always_broken(end, task_id, upstreams, lines) -> PlainTextResponse:
    return PlainTextResponse("broken", status_code=500)


async def test_a_task_that_nobody_can_do_is_given_up_and_the_rest_completes(kit, scheduler):
    async def script(end, task_id, upstreams, lines):
        return await always_broken(end, task_id, upstreams, lines) if task_id.endswith("-1") else lines

    async with kit.end(scheduler, "end-0", script=script) as end:
        job = await scheduler.submit(kit.images(150), scheme="end")
        view = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    assert counts(view) == ("completed", 100, 0, 0, 50)
    assert view["reason"] == "50 of 150 images have no answer; their results say why"
    assert sum(task.endswith("-1") for task in end.tasks) == 5
    errors = {result["index"]: result["error"] for result in results if result["error"]}
    assert sorted(errors) == list(range(50, 100))
    assert errors[50].startswith("given up after 5 attempts; the last: end-0 answered 500: broken")


async def test_a_job_without_any_answer_has_failed(kit, scheduler):
    async with kit.end(scheduler, "end-0", script=always_broken):
        job = await scheduler.submit(kit.images(10), scheme="end")
        view = await scheduler.finished(job["id"])
    assert counts(view) == ("failed", 0, 0, 0, 10)


async def test_recovery_none_fails_the_job_at_once_and_says_why(kit, scheduler):
    async def script(end, task_id, upstreams, lines):
        return await always_broken(end, task_id, upstreams, lines) if task_id.endswith("-3") else lines

    async with kit.end(scheduler, "end-0", script=script) as end:
        job = await scheduler.submit(kit.images(500), scheme="end", recovery="none")
        view = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    assert view["state"] == "failed"
    assert view["reason"].startswith("task 3 failed on end-0 (recovery=none): end-0 answered 500")
    assert view["failed_images"] == 500 - view["answered_coarse"]
    assert sum(task.endswith("-3") for task in end.tasks) == 1
    assert len(results) == 500
    assert results[160]["error"].startswith("not answered: the job is failed")


async def test_reassign_goes_on_with_the_devices_of_the_beginning(kit, scheduler):
    await scheduler.register("end-0", "end", url="http://127.0.0.1:9")
    async with kit.end(scheduler, "end-1") as end:
        job = await scheduler.submit(kit.images(300), scheme="end", recovery="reassign")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 300, 0, 0, 0)
        # What failed on the dead device came after all tasks had been assigned once.
        numbers = [int(task.rpartition("-")[2]) for task in end.tasks]
        assert sorted(numbers) == list(range(6))
        assert numbers != sorted(numbers)


async def test_a_late_fine_answer_leaves_the_coarse_one(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0"):
        end.fine_gate.clear()
        job = await scheduler.submit(kit.images(50), task_deadline_s=2)
        view = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    assert counts(view) == ("completed", 50, 0, 50, 0)
    assert results[0]["fallback"] == "deadline: no final answer within 2 s"


async def test_no_answer_at_all_in_time_is_an_error(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0"):
        end.gate.clear()
        job = await scheduler.submit(kit.images(50), task_deadline_s=0.3)
        view = await scheduler.finished(job["id"])
        results = await scheduler.results(job["id"])
    assert counts(view) == ("failed", 0, 0, 0, 50)
    assert results[0]["error"] == "deadline: no final answer within 0.3 s"


async def test_a_slow_coarse_answer_is_asked_of_another_device(kit, settings):
    async with (
        kit.scheduler(settings.model_copy(update={"coarse_timeout_s": 0.2})) as scheduler,
        kit.end(scheduler, "end-0") as slow,
        kit.end(scheduler, "end-1"),
    ):
        slow.gate.clear()
        job = await scheduler.submit(kit.images(100), scheme="end")
        view = await scheduler.finished(job["id"])
        assert counts(view) == ("completed", 100, 0, 0, 0)
        assert set(view["by_node"]) == {"end-1"}


async def test_without_an_end_device_a_job_waits_until_its_deadline_and_says_so(kit, scheduler):
    job = await scheduler.submit(kit.images(120), scheme="end", deadline_s=1.0)
    view = await scheduler.job(job["id"])
    assert view["state"] == "queued"
    await wait_for(lambda: says(scheduler, job, "none has registered"), what="the reason")
    events = await scheduler.events(job["id"])
    view = events[-1][2]
    assert counts(view) == ("failed", 0, 0, 0, 120)
    assert view["reason"].startswith("its deadline of 1 s is over; 120 of 120 images have no answer")
    failed = [result["error"] for kind, _, data in events if kind == "failed" for result in data["results"]]
    assert failed == ["deadline: the job's 1 s are over"] * 120


async def says(scheduler, job, words: str) -> bool:
    return words in (await scheduler.job(job["id"]))["reason"]


async def has(scheduler, job, wanted: tuple[str, int, int, int, int]) -> bool:
    return counts(await scheduler.job(job["id"])) == wanted


async def test_a_waiting_job_goes_on_when_a_device_comes(kit, scheduler):
    job = await scheduler.submit(kit.images(120), scheme="end")
    await wait_for(lambda: says(scheduler, job, "waiting for an end device"), what="the reason")
    async with kit.end(scheduler, "end-0"):
        assert counts(await scheduler.finished(job["id"])) == ("completed", 120, 0, 0, 0)


async def test_waiting_for_an_upper_node_gives_the_coarse_answers_at_once_and_the_fine_ones_later(kit, settings):
    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0"):
        job = await scheduler.submit(kit.images(120), on_upstream_loss="wait")
        await wait_for(lambda: says(scheduler, job, "waiting for an upstream node (all coarse"), what="the reason")
        await wait_for(lambda: has(scheduler, job, ("running", 120, 0, 0, 0)), what="all coarse answers")
        async with kit.uppers(scheduler, "edge-0"):
            events = await scheduler.events(job["id"])
    assert counts(events[-1][2]) == ("completed", 120, 120, 0, 0)
    assert [kind for kind, _, _ in events].count("coarse") == 3


async def test_an_upper_node_that_fails_is_waited_for(kit, scheduler):
    lost = 0

    async def script(end, task_id, upstreams, lines):
        nonlocal lost
        lost += 1
        if lost > 2:
            return lines
        fallback = {"reason": "upstream_unavailable", "detail": "refused", "tried": [upstreams[0].node_id]}
        return [lines[0], {"event": "fallback", "task_id": task_id, **fallback}]

    async with kit.end(scheduler, "end-0", script=script), kit.uppers(scheduler, "edge-0"):
        job = await scheduler.submit(kit.images(50), on_upstream_loss="wait")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 50, 50, 0, 0)
        again = await scheduler.submit(kit.images(50), on_upstream_loss="wait", batch_size=25)
        assert counts(await scheduler.finished(again["id"])) == ("completed", 50, 50, 0, 0)


@pytest.mark.parametrize("loss", ["fallback", "wait"])
async def test_nobody_waits_for_an_upper_node_that_fell_silent(kit, scheduler, loss):
    async def script(end, task_id, upstreams, lines):
        if upstreams[0].node_id == "edge-0":
            end.fine_gate.clear()
        return lines

    async with (
        kit.end(scheduler, "end-0", script=script) as end,
        kit.uppers(scheduler, "cloud-0"),
        AsyncExitStack() as edge,
    ):
        await edge.enter_async_context(kit.uppers(scheduler, "edge-0"))
        job = await scheduler.submit(kit.images(100), on_upstream_loss=loss)
        await wait_for(lambda: has(scheduler, job, ("running", 100, 0, 0, 0)), what="all coarse answers")
        await edge.aclose()  # its heartbeats stop
        await wait_for(lambda: ("cloud-0",) in end.routes, what="another route")
        end.fine_gate.set()
        view = await scheduler.finished(job["id"])
    assert counts(view) == ("completed", 100, 100, 0, 0)
    assert set(view["by_node"]) == {"end-0", "cloud-0"}
    assert end.stages == ["all", "all", "fine", "fine"]


async def test_a_job_that_waits_for_upper_nodes_gives_a_silent_one_up_in_time(kit, settings):
    async with (
        kit.scheduler(settings.model_copy(update={"task_deadline_s": 0.3})) as scheduler,
        kit.end(scheduler, "end-0") as end,
        kit.uppers(scheduler, "edge-0"),
    ):
        end.fine_gate.clear()
        job = await scheduler.submit(kit.images(50), on_upstream_loss="wait")
        await wait_for(lambda: len(end.tasks) == 2, what="a second attempt")
        end.fine_gate.set()
        assert counts(await scheduler.finished(job["id"])) == ("completed", 50, 50, 0, 0)


async def test_the_reason_of_a_fallback_comes_from_the_device(kit, scheduler):
    async def script(end, task_id, upstreams, lines):
        fallback = {"reason": "upstream_timeout", "detail": "edge-0 was silent", "tried": ["edge-0"]}
        return [lines[0], {"event": "fallback", "task_id": task_id, **fallback}]

    async with kit.end(scheduler, "end-0", script=script) as end, kit.uppers(scheduler, "edge-0"):
        job = await scheduler.submit(kit.images(50))
        assert counts(await scheduler.finished(job["id"])) == ("completed", 50, 0, 50, 0)
        assert (await scheduler.results(job["id"]))[7]["fallback"] == "upstream_timeout: edge-0 was silent"
        assert end.stages == ["all", "fine", "fine", "fine", "fine"]


async def test_jobs_share_the_fleet_and_an_interactive_request_overtakes_them(kit, settings):
    async with (
        kit.scheduler(settings.model_copy(update={"window": 1})) as scheduler,
        kit.end(scheduler, "end-0") as end,
    ):
        end.gate.clear()
        jobs = [await scheduler.submit(kit.images(100), scheme="end", batch_size=10) for _ in range(2)]
        await wait_for(lambda: end.waiting == 1, what="the first task")
        body, headers = kit.tensor_body(kit.images(3))
        asked = asyncio.create_task(
            scheduler.http.post("/v1/classify", content=body, headers=headers, params={"scheme": "end"})
        )
        await wait_for(lambda: end.waiting == 2, what="the interactive request beside the full window")
        end.gate.set()
        assert (await asked).status_code == 200
        for job in jobs:
            assert counts(await scheduler.finished(job["id"])) == ("completed", 100, 0, 0, 0)
        batch = [task.partition("-")[0] for task in end.tasks if not task.startswith("live")]
        assert batch == [job["id"] for _ in range(10) for job in jobs]


async def test_a_device_that_swallows_the_connection_is_passed_over(kit, settings):
    """It accepts, reads and never answers: only the bound on the coarse answer helps."""

    async def swallow(reader, writer) -> None:
        while await reader.read(65536):
            pass

    async with (
        kit.scheduler(settings.model_copy(update={"coarse_timeout_s": 0.3})) as scheduler,
        listening(swallow) as url,
        kit.end(scheduler, "end-1"),
    ):
        incarnation = await scheduler.register("end-0", "end", url=url)
        beats = asyncio.create_task(scheduler.keep_alive("end-0", "end", incarnation, url=url))
        job = await scheduler.submit(kit.images(200), scheme="end")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 200, 0, 0, 0)
        beats.cancel()


async def test_a_device_that_trickles_bytes_does_not_hold_a_task(kit, settings):
    async def trickle(end, task_id, upstreams, lines):
        async def drops() -> AsyncIterator[bytes]:
            yield json.dumps(lines[0]).encode()[:40]
            await asyncio.Event().wait()

        return StreamingResponse(drops(), media_type="application/x-ndjson")

    async with (
        kit.scheduler(settings.model_copy(update={"coarse_timeout_s": 0.3})) as scheduler,
        kit.end(scheduler, "end-0", script=trickle),
        kit.end(scheduler, "end-1"),
    ):
        job = await scheduler.submit(kit.images(200), scheme="end")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 200, 0, 0, 0)


async def test_an_answer_that_goes_on_after_its_end_is_cut(kit, scheduler):
    async def chatter(end, task_id, upstreams, lines):
        return [*lines, *lines, "more"]

    async with kit.end(scheduler, "end-0", script=chatter):
        job = await scheduler.submit(kit.images(100), scheme="end")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 100, 0, 0, 0)


async def test_heartbeats_of_strangers_and_ghosts(kit, scheduler):
    assert (await scheduler.beat("end-0", "nobody00")).status_code == 404
    old = await scheduler.register("end-0", "end")
    new = await scheduler.register("end-0", "end")
    assert (await scheduler.beat("end-0", old)).status_code == 409
    assert (await scheduler.beat("end-0", new)).status_code == 204
    response = await scheduler.http.delete("/v1/devices/end-0", params={"incarnation": old})
    assert response.status_code == 409
    assert (await scheduler.http.get("/v1/devices")).json()["devices"][0]["incarnation"] == new


async def test_connections_to_a_device_are_kept_for_the_next_task(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end:
        job = await scheduler.submit(kit.images(500), scheme="end", batch_size=10)
        assert counts(await scheduler.finished(job["id"])) == ("completed", 500, 0, 0, 0)
        assert len(end.ports) <= scheduler.settings.window
