"""Devices that are there and answer wrongly: whom that costs what."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, StreamingResponse

from tests.integration.scheduler.test_dispatching import counts, has
from tierkit.testing import wait_for


async def garbage(end, task_id, upstreams, lines):
    return ["\x00garbage"]


async def health(scheduler) -> dict[str, tuple[str, str]]:
    """Health and reason of each node."""
    devices = (await scheduler.http.get("/v1/devices")).json()["devices"]
    return {device["node_id"]: (device["health"], device["reason"]) for device in devices}


async def outcomes(scheduler, job) -> list[tuple[str, str, str]]:
    attempts = (await scheduler.http.get(f"/v1/jobs/{job['id']}/attempts")).json()["attempts"]
    return [(attempt["node"], attempt["outcome"], attempt["reason"]) for attempt in attempts]


@pytest.mark.parametrize(("coarse_timeout_s", "blamed"), [(30.0, False), (1.0, True)])
async def test_a_device_is_not_blamed_for_a_task_in_a_hurry(kit, settings, coarse_timeout_s, blamed):
    """What a client's deadline leaves no time for must not cost other clients the device."""

    async def no_time(end, task_id, upstreams, lines):
        return PlainTextResponse("64 images take 17 ms here, 11 ms are left", status_code=504)

    settings = settings.model_copy(update={"coarse_timeout_s": coarse_timeout_s, "set_aside_s": 60.0})
    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0", script=no_time):
        job = await scheduler.submit(kit.images(10), scheme="end", batch_size=10, task_deadline_s=5)

        async def failed() -> bool:
            return any(outcome == "error" for _, outcome, _ in await outcomes(scheduler, job))

        await wait_for(failed, what="the end of an attempt")
        state, reason = (await health(scheduler))["end-0"]
    assert (state == "suspect", "504" in reason) == (blamed, blamed)


async def test_a_device_that_refuses_a_task_in_a_hurry_is_there_for_others(kit, settings):
    """It may have refused for want of this task's time alone: it is left alone for no longer than that."""
    refused = False

    async def script(end, task_id, upstreams, lines):
        nonlocal refused
        if refused:
            return lines
        refused = True
        return PlainTextResponse("busy", status_code=503, headers={"Retry-After": "30"})

    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0", script=script):
        await scheduler.submit(kit.images(10), scheme="end", batch_size=10, task_deadline_s=0.3)
        await wait_for(lambda: refused, what="the refusal")
        job = await scheduler.submit(kit.images(10), scheme="end", batch_size=10)
        async with asyncio.timeout(10):
            assert counts(await scheduler.finished(job["id"])) == ("completed", 10, 0, 0, 0)


@pytest.mark.parametrize("scheme", ["mapping", "end-edge", "adaptive"])
async def test_a_device_that_refuses_upstream_nodes_costs_no_coarse_answer(kit, settings, scheme):
    """As an end node of another version may that has a list of its own."""

    async def refuse(end, task_id, upstreams, lines):
        return PlainTextResponse("not there", status_code=403) if upstreams else lines

    async with kit.scheduler(settings) as scheduler, kit.uppers(scheduler, "edge-0"):
        async with kit.end(scheduler, "end-0", script=refuse):
            job = await scheduler.submit(kit.images(10), scheme=scheme, batch_size=10)
            async with asyncio.timeout(20):
                assert counts(await scheduler.finished(job["id"])) == ("completed", 10, 0, 10, 0)
        results = await scheduler.results(job["id"])
    assert {result["fallback"].split(":")[0] for result in results} == {"upstream_unavailable"}


@pytest.mark.parametrize("scheme", ["mapping", "end-edge", "adaptive"])
async def test_a_device_is_sent_only_upstream_nodes_of_its_own_list(kit, settings, scheme):
    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0", beating=False) as end:
        for number in range(3):
            place = kit.registration(f"edge-{number}", "edge", url=f"http://127.0.0.1:{number + 1}")
            assert (await scheduler.http.post("/v1/devices", json=place)).status_code == 200
        place = {**kit.registration("end-0", "end", url=end.url), "allowed_upstreams": ["http://127.0.0.1:3"]}
        assert (await scheduler.http.post("/v1/devices", json=place)).status_code == 200
        job = await scheduler.submit(kit.images(30), scheme=scheme, batch_size=10)
        async with asyncio.timeout(20):
            assert counts(await scheduler.finished(job["id"])) == ("completed", 30, 30, 0, 0)
        (listed,) = [
            device
            for device in (await scheduler.http.get("/v1/devices")).json()["devices"]
            if device["node_id"] == "end-0"
        ]
    assert set(end.routes) == {("edge-2",)}
    assert listed["allowed_upstreams"] == ["http://127.0.0.1:3"]


@pytest.mark.parametrize("scheme", ["mapping", "adaptive"])
async def test_a_device_that_answers_garbage_at_once_costs_no_image_its_answer(kit, settings, scheme):
    """It is the only one with room at all times, so it must not be asked because of that."""

    async def slow(end, task_id, upstreams, lines):
        await asyncio.sleep(0.04)
        return lines

    # It is hardly set aside here: where the task goes is what counts.
    settings = settings.model_copy(update={"window": 1, "set_aside_s": 0.001})
    async with (
        kit.scheduler(settings) as scheduler,
        kit.end(scheduler, "end-0", script=garbage) as liar,
        kit.end(scheduler, "end-1", script=slow),
        kit.uppers(scheduler, "edge-0"),
    ):
        job = await scheduler.submit(kit.images(400), scheme=scheme, batch_size=10)
        assert counts(await scheduler.finished(job["id"])) == ("completed", 400, 400, 0, 0)
    assert liar.tasks
    assert max(Counter(liar.tasks).values()) == 1


@pytest.mark.parametrize("scheme", ["mapping", "adaptive"])
async def test_devices_that_are_known_to_answer_wrongly_use_up_no_tasks_attempts(kit, settings, scheme):
    """Five of them, as many as a task has attempts, always on trial and always free; one good one that is busy."""

    async def slow(end, task_id, upstreams, lines):
        await asyncio.sleep(0.02)
        return lines

    settings = settings.model_copy(update={"window": 1, "set_aside_s": 0.001})
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(kit.scheduler(settings))
        liars = [await stack.enter_async_context(kit.end(scheduler, f"end-{k}", script=garbage)) for k in range(5)]
        await stack.enter_async_context(kit.end(scheduler, "end-5", script=slow))
        first = await scheduler.submit(kit.images(200), scheme="end", batch_size=10)
        assert counts(await scheduler.finished(first["id"])) == ("completed", 200, 0, 0, 0)
        job = await scheduler.submit(kit.images(200), scheme=scheme, batch_size=10, on_upstream_loss="wait")
        # Without an upstream node the coarse answers come, and the fine stage waits to be passed on.
        await wait_for(lambda: has(scheduler, job, ("running", 200, 0, 0, 0)), what="all coarse answers")
        await stack.enter_async_context(kit.uppers(scheduler, "edge-0"))
        assert counts(await scheduler.finished(job["id"])) == ("completed", 200, 200, 0, 0)
        told = [await outcomes(scheduler, which) for which in (first, job)]
    tasks = Counter(task for liar in liars for task in liar.tasks)
    assert max(tasks.values()) == 1, "a task that had failed was given to one of them"
    assert {stage for liar in liars for stage in liar.stages} == {"all"}
    assert {node for attempts in told for node, outcome, _ in attempts if outcome == "ok"} == {"end-5"}


async def test_a_device_whose_own_way_up_is_broken_costs_no_image_its_fine_answer(kit, settings):
    async def cut_off(end, task_id, upstreams, lines):
        fallback = {"reason": "upstream_unavailable", "detail": "refused", "tried": ["edge-0"]}
        return [lines[0], {"event": "fallback", "task_id": task_id, **fallback}]

    async def slow(end, task_id, upstreams, lines):
        await asyncio.sleep(0.04)
        return lines

    async with (
        kit.scheduler(settings.model_copy(update={"window": 1})) as scheduler,
        kit.end(scheduler, "end-0", script=cut_off),
        kit.end(scheduler, "end-1", script=slow),
        kit.uppers(scheduler, "edge-0"),
    ):
        job = await scheduler.submit(kit.images(200), batch_size=10)
        assert counts(await scheduler.finished(job["id"])) == ("completed", 200, 200, 0, 0)


async def test_a_device_whose_answers_are_wrong_is_suspect_until_one_is_right(kit, settings):
    lies = True

    async def script(end, task_id, upstreams, lines):
        return ["\x00garbage"] if lies else lines

    async with (
        kit.scheduler(settings.model_copy(update={"window": 1, "set_aside_s": 1.0})) as scheduler,
        kit.end(scheduler, "end-0", script=script),
        kit.end(scheduler, "end-1"),
    ):

        async def suspect() -> bool:
            state, reason = (await health(scheduler))["end-0"]
            wrong = "its last answer was wrong: end-0 sent an invalid line ("
            return state == "suspect" and reason.startswith(wrong)

        job = await scheduler.submit(kit.images(20), scheme="end", batch_size=10)
        # Right away: it is suspect for a second.
        await wait_for(suspect, what="suspicion")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 20, 0, 0, 0)
        lies = False

        async def on_trial() -> bool:
            state, reason = (await health(scheduler))["end-0"]
            return state == "alive" and "gets one task as a trial: its last answer was wrong" in reason

        await wait_for(on_trial, what="the end of its rest, heartbeats or not")
        job = await scheduler.submit(kit.images(20), scheme="end", batch_size=10)
        assert counts(await scheduler.finished(job["id"])) == ("completed", 20, 0, 0, 0)

        async def trusted() -> bool:
            return (await health(scheduler))["end-0"] == ("alive", "heartbeats on time")

        await wait_for(trusted, what="trust")


async def test_a_task_that_no_device_can_do_leaves_the_fleet_alive(kit, settings):
    async def broken(end, task_id, upstreams, lines):
        return PlainTextResponse("broken", status_code=500)

    async with AsyncExitStack() as stack:
        longest = settings.model_copy(update={"set_aside_s": 30.0})
        scheduler = await stack.enter_async_context(kit.scheduler(longest))
        for number in range(3):
            await stack.enter_async_context(kit.end(scheduler, f"end-{number}", script=broken))
        job = await scheduler.submit(kit.images(10), scheme="end")
        assert counts(await scheduler.finished(job["id"])) == ("failed", 0, 0, 0, 10)
        assert {state for state, _ in (await health(scheduler)).values()} == {"alive"}


async def test_devices_that_could_not_do_what_another_one_can_are_blamed_each(kit, settings):
    async with AsyncExitStack() as stack:
        longest = settings.model_copy(update={"set_aside_s": 30.0})
        scheduler = await stack.enter_async_context(kit.scheduler(longest))
        for number, script in enumerate((garbage, garbage, None)):
            await stack.enter_async_context(kit.end(scheduler, f"end-{number}", script=script))
        job = await scheduler.submit(kit.images(10), scheme="end")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 10, 0, 0, 0)
        told = await health(scheduler)
    assert {node: state for node, (state, _) in told.items()} == {
        "end-0": "suspect",
        "end-1": "suspect",
        "end-2": "alive",
    }
    assert told["end-1"][1] == "its last answer was wrong: a task that end-2 could do"


def nonsense_from(*liars: str) -> Any:
    """End devices that had nonsense from these upstream nodes, and ask the next one then."""

    async def script(end, task_id, upstreams, lines):
        rest = [upstream for upstream in upstreams if upstream.node_id not in liars]
        asked = upstreams[: upstreams.index(rest[0])] if rest else upstreams
        wrong = [{"node_id": upstream.node_id, "detail": "no probabilities"} for upstream in asked]
        if rest:
            first = rest[0]
            who = {"node_id": first.node_id, "tier": first.tier, "model": first.model, "sha256": first.sha256}
            return [lines[0], {**lines[1], **who, "wrong": wrong}]
        tried = [upstream.node_id for upstream in asked]
        fallback = {"reason": "upstream_error", "detail": "no probabilities", "tried": tried, "wrong": wrong}
        return [lines[0], {"event": "fallback", "task_id": task_id, **fallback}]

    return script


@pytest.mark.parametrize("scheme", ["end-edge", "mapping", "adaptive"])
async def test_an_upper_node_whose_answers_are_wrong_is_asked_no_more(kit, settings, scheme):
    async with (
        kit.scheduler(settings.model_copy(update={"window": 1, "set_aside_s": 30.0})) as scheduler,
        kit.end(scheduler, "end-0", script=nonsense_from("edge-0")) as end,
        kit.uppers(scheduler, "edge-0", "edge-1"),
    ):
        # Adaptive may know the other one as quicker for a while; it is the only way once the first has been asked.
        while "edge-0" not in [route[0] for route in end.routes]:
            job = await scheduler.submit(kit.images(40), scheme=scheme, batch_size=10)
            assert counts(await scheduler.finished(job["id"])) == ("completed", 40, 40, 0, 0)
        state, reason = (await health(scheduler))["edge-0"]
        assert (state, reason) == ("suspect", "its last answer was wrong: no probabilities")
        assert [route[0] for route in end.routes].count("edge-0") == 1


async def test_an_upper_node_is_trusted_again_when_its_answer_to_a_trial_is_right(kit, settings):
    async with (
        kit.scheduler(settings.model_copy(update={"set_aside_s": 0.001})) as scheduler,
        kit.end(scheduler, "end-0", script=nonsense_from("edge-0")) as end,
        kit.uppers(scheduler, "edge-0", "edge-1"),
    ):

        async def after_a_job() -> tuple[str, str]:
            job = await scheduler.submit(kit.images(20), scheme="end-edge", batch_size=10)
            assert counts(await scheduler.finished(job["id"])) == ("completed", 20, 20, 0, 0)
            return (await health(scheduler))["edge-0"]

        state, reason = await after_a_job()
        assert state == "suspect" or reason.endswith(
            "gets one task as a trial: its last answer was wrong: no probabilities"
        )
        end.script = None

        async def trusted() -> bool:
            return await after_a_job() == ("alive", "heartbeats on time")

        await wait_for(trusted, what="a right answer")


async def test_a_tier_whose_answers_are_wrong_is_left_out_beside_another(kit, settings):
    async with (
        kit.scheduler(settings.model_copy(update={"window": 1, "set_aside_s": 30.0})) as scheduler,
        kit.end(scheduler, "end-0", script=nonsense_from("edge-0")) as end,
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        job = await scheduler.submit(kit.images(40), scheme="mapping", batch_size=10)
        assert counts(await scheduler.finished(job["id"])) == ("completed", 40, 40, 0, 0)
        assert end.routes == [("edge-0", "cloud-0"), ("cloud-0",), ("cloud-0",), ("cloud-0",)]
        # Where there is no other, it is asked all the same: the worst that comes of it is the coarse answer.
        job = await scheduler.submit(kit.images(10), scheme="end-edge", batch_size=10, recovery="none")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 10, 0, 10, 0)
        assert end.routes[-1] == ("edge-0",)


async def test_a_task_that_no_upper_node_can_do_leaves_the_upper_nodes_alive(kit, settings):
    async with (
        kit.scheduler(settings.model_copy(update={"set_aside_s": 30.0})) as scheduler,
        kit.end(scheduler, "end-0", script=nonsense_from("edge-0", "edge-1", "cloud-0")),
        kit.uppers(scheduler, "edge-0", "edge-1", "cloud-0"),
    ):
        job = await scheduler.submit(kit.images(10), scheme="mapping")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 10, 0, 10, 0)
        assert {state for state, _ in (await health(scheduler)).values()} == {"alive"}


async def test_what_is_said_of_nodes_that_were_not_asked_counts_for_nothing(kit, settings):
    async def slander(end, task_id, upstreams, lines):
        return [lines[0], {**lines[1], "wrong": [{"node_id": "cloud-0", "detail": "nonsense"}]}]

    async with (
        kit.scheduler(settings) as scheduler,
        kit.end(scheduler, "end-0", script=slander),
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        job = await scheduler.submit(kit.images(10), scheme="end-edge")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 10, 10, 0, 0)
        assert (await health(scheduler))["cloud-0"][0] == "alive"


async def test_the_row_of_an_attempt_comes_with_the_answer_that_it_brought(kit, scheduler):
    """Its connection may stay open for a while."""
    over = asyncio.Event()

    async def lingering(end, task_id, upstreams, lines):
        async def answer() -> AsyncIterator[bytes]:
            yield kit.json_response(lines[0]).body + b"\n"
            await over.wait()

        return StreamingResponse(answer(), media_type="application/x-ndjson")

    async with kit.end(scheduler, "end-0", script=lingering):
        job = await scheduler.submit(kit.images(10), scheme="end")
        assert counts(await scheduler.finished(job["id"])) == ("completed", 10, 0, 0, 0)
        assert await outcomes(scheduler, job) == [("end-0", "ok", "")]
        over.set()


@pytest.mark.parametrize("who", ["the scheduler", "the device"])
async def test_an_attempt_whose_time_was_over_is_no_success(kit, scheduler, who):
    async def late(end, task_id, upstreams, lines):
        fallback = {"reason": "deadline", "detail": "the budget is spent", "tried": []}
        return [lines[0], {"event": "fallback", "task_id": task_id, **fallback}]

    script = late if who == "the device" else None
    async with kit.end(scheduler, "end-0", script=script) as end, kit.uppers(scheduler, "edge-0"):
        if script is None:
            end.fine_gate.clear()
        job = await scheduler.submit(kit.images(50), task_deadline_s=0.3)
        view = await scheduler.finished(job["id"])
        assert counts(view) == ("completed", 50, 0, 50, 0)
        assert view["reason"] == "50 of 50 images got no finer answer in time; what they have stands"
        why = "no final answer within 0.3 s" if script is None else "deadline: the budget is spent"
        assert await outcomes(scheduler, job) == [("end-0", "deadline", why)]


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        ({"form": "pixels", "upload_bytes": 1, "encode_ms": 1.7e308}, "end-0 sent an invalid line (Expected"),
        ({"form": "bottleneck", "upload_bytes": 1}, "end-0 sent what it had sent on as 'bottleneck', where 'pixels'"),
    ],
)
async def test_what_a_device_says_of_its_sending_is_not_believed_blindly(kit, settings, sent, sentence):
    async def script(end, task_id, upstreams, lines):
        return [lines[0], {**lines[1], "sent": sent}]

    async with (
        kit.scheduler(settings.model_copy(update={"max_attempts": 1, "set_aside_s": 0.001})) as scheduler,
        kit.end(scheduler, "end-0", script=script),
        kit.uppers(scheduler, "edge-0"),
    ):
        job = await scheduler.submit(kit.images(30), batch_size=10, scheme="end-edge", recovery="none")
        view = await scheduler.finished(job["id"])
        assert sentence in view["reason"]
        # The scheduler lives, and says so of the next job.
        assert (await scheduler.finished((await scheduler.submit(kit.images(10), scheme="end"))["id"]))["state"]


async def test_a_device_cannot_talk_an_upper_node_slow(kit, settings):
    async def script(end, task_id, upstreams, lines):
        slow = {"queue_ms": 0.0, "compute_ms": 1e8, "batch_images": 10}
        return [{**lines[0], "compute_ms": 1e8}, *({**line, "timing": slow} for line in lines[1:])]

    async with (
        kit.scheduler(settings) as scheduler,
        kit.end(scheduler, "end-0", script=script),
        kit.uppers(scheduler, "edge-0"),
    ):
        job = await scheduler.submit(kit.images(100), batch_size=10, scheme="end-edge")
        assert (await scheduler.finished(job["id"]))["state"] == "completed"
        job = await scheduler.submit(kit.images(100), batch_size=10, scheme="adaptive")
        view = await scheduler.finished(job["id"])
    assert (view["state"], view["fallback"]) == ("completed", 0)


async def test_no_device_knows_that_a_task_kills_nodes(kit, settings):
    async def script(end, task_id, upstreams, lines):
        reason = {"reason": "quarantined", "detail": "x", "tried": []}
        return [lines[0], {"event": "fallback", "task_id": task_id, **reason}]

    async with (
        kit.scheduler(settings) as scheduler,
        kit.end(scheduler, "end-0", script=script),
        kit.uppers(scheduler, "edge-0"),
    ):
        job = await scheduler.submit(kit.images(10), batch_size=10, scheme="end-edge", recovery="none")
        view = await scheduler.finished(job["id"])
    assert "end-0 sent the reason 'quarantined', which no device can know" in view["reason"]


def spoiled(kind: str):
    """A device whose answer begins well and proves to be none."""

    async def script(end, task_id, upstreams, said):
        return {
            "garbage": [said[0], "\x00garbage"],
            "a second coarse answer": [said[0], said[0]],
            "another task": [said[0], {**said[1], "task_id": "other"}],
            "nothing": [said[0]],
            "too many labels": [said[0], {**said[1], "labels": [1] * 999}],
        }[kind]

    return script


@pytest.mark.parametrize("kind", ["garbage", "a second coarse answer", "another task", "nothing", "too many labels"])
async def test_nothing_of_an_answer_that_proves_invalid_stands(kit, settings, kind):
    settings = settings.model_copy(update={"max_attempts": 1000})
    async with kit.scheduler(settings) as scheduler, kit.uppers(scheduler, "edge-0"):
        async with kit.end(scheduler, "end-0", script=spoiled(kind)) as liar:
            job = await scheduler.submit(kit.images(20), batch_size=10)
            await wait_for(lambda: len(liar.tasks) > 2, what="a further attempt")
            async with kit.end(scheduler, "end-1") as honest:
                events = await scheduler.events(job["id"])
        assert honest.stages == ["all", "all"]
        view, results = events[-1][2], await scheduler.results(job["id"])
    assert counts(view) == ("completed", 20, 20, 0, 0)
    assert view["by_node"]["end-1"]["coarse_images"] == 20
    assert view["by_node"].get("end-0", {"coarse_images": 0})["coarse_images"] == 0
    assert {result["coarse"]["node"] for result in results} == {"end-1"}
    final = [result for name, _, data in events if name == "fine" for result in data["results"]]
    assert {result["coarse"]["node"] for result in final} == {"end-1"}


async def test_where_nobody_else_is_left_an_invalid_answer_is_none(kit, settings):
    settings = settings.model_copy(update={"max_attempts": 2})
    async with (
        kit.scheduler(settings) as scheduler,
        kit.uppers(scheduler, "edge-0"),
        kit.end(scheduler, "end-0", script=spoiled("garbage")),
    ):
        job = await scheduler.submit(kit.images(10), batch_size=10)
        events = await scheduler.events(job["id"])
        results = await scheduler.results(job["id"])
    assert counts(events[-1][2]) == ("failed", 0, 0, 0, 10)
    assert all(result["coarse"] is None and "sent an invalid line" in result["error"] for result in results)
    failed = [result for name, _, data in events if name == "failed" for result in data["results"]]
    assert [result["coarse"] for result in failed] == [None] * 10


async def test_whoever_waits_for_an_answer_gets_another_one_for_one_that_proves_invalid(kit, scheduler):
    async with (
        kit.uppers(scheduler, "edge-0"),
        kit.end(scheduler, "end-0", script=spoiled("garbage")) as liar,
    ):
        body, headers = kit.tensor_body(kit.images(2))
        asking = asyncio.create_task(scheduler.http.post("/v1/classify", content=body, headers=headers))
        await wait_for(lambda: bool(liar.tasks), what="the first attempt")
        async with kit.end(scheduler, "end-1"):
            lines = [json.loads(line) for line in (await asking).text.splitlines()]
    assert lines[-2]["event"] == "fine"
    assert [result["coarse"]["node"] for result in lines[-2]["results"]] == ["end-1"] * 2


async def test_a_device_that_says_that_it_failed_keeps_the_coarse_answer_that_it_gave(kit, scheduler):
    """It says so in a line that is as it should be: nothing contradicts what came before."""

    async def failing(end, task_id, upstreams, lines):
        return [lines[0], {"event": "error", "task_id": task_id, "error": "internal error"}]

    async with kit.uppers(scheduler, "edge-0"), kit.end(scheduler, "end-0", script=failing) as end:
        job = await scheduler.submit(kit.images(10), batch_size=10)
        await wait_for(lambda: len(end.tasks) > 1, what="a further attempt")
        assert end.stages[:2] == ["all", "fine"]
        await scheduler.http.delete(f"/v1/jobs/{job['id']}")
        assert {result["coarse"]["node"] for result in await scheduler.results(job["id"])} == {"end-0"}
