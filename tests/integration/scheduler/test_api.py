"""Submission, cancellation, streams and reports of the job API."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from scheduler.store.jobs import JobStore
from tierkit.testing import wait_for
from tierkit.wire.api import ImageResult


async def test_the_same_key_and_content_is_the_same_job(kit, scheduler):
    key = {"Idempotency-Key": "holiday-1"}
    first = await scheduler.try_submit(kit.images(10), headers=key, scheme="end")
    assert first.status_code == 202
    again = await scheduler.try_submit(kit.images(10), headers=key, scheme="end")
    assert again.status_code == 200
    assert again.headers["Location"] == first.headers["Location"] == f"/v1/jobs/{first.json()['id']}"
    assert again.json()["id"] == first.json()["id"]
    for other in (
        await scheduler.try_submit(kit.images(11), headers=key, scheme="end"),
        await scheduler.try_submit(kit.images(10), headers=key, scheme="mapping"),
        await scheduler.try_submit(kit.images(10), headers=key, scheme="end", labels=[0] * 10),
    ):
        assert other.status_code == 409
        assert "belongs to job" in other.json()["error"]
    assert len((await scheduler.http.get("/v1/jobs")).json()["jobs"]) == 1
    assert len(list((scheduler.settings.state / "inputs").iterdir())) == 1


async def test_one_key_sent_many_times_at_once_is_one_job(kit, scheduler):
    key = {"Idempotency-Key": "k"}
    responses = await asyncio.gather(*(scheduler.try_submit(kit.images(10), headers=key) for _ in range(8)))
    assert sorted(response.status_code for response in responses) == [200] * 7 + [202]
    assert len({response.json()["id"] for response in responses}) == 1


async def test_a_key_answers_with_the_job_even_when_that_is_done(kit, scheduler):
    async with kit.end(scheduler, "end-0"):
        key = {"Idempotency-Key": "k"}
        job = (await scheduler.try_submit(kit.images(10), headers=key, scheme="end")).json()
        await scheduler.finished(job["id"])
        again = await scheduler.try_submit(kit.images(10), headers=key, scheme="end")
        assert (again.status_code, again.json()["state"]) == (200, "completed")


async def test_jobs_with_the_same_images_share_a_file_until_the_last_has_ended(kit, scheduler):
    inputs = scheduler.settings.state / "inputs"
    first = await scheduler.submit(kit.images(10))
    second = await scheduler.submit(kit.images(10))
    assert len(list(inputs.iterdir())) == 1
    await scheduler.http.delete(f"/v1/jobs/{first['id']}")
    assert len(list(inputs.iterdir())) == 1
    await scheduler.http.delete(f"/v1/jobs/{second['id']}")
    assert list(inputs.iterdir()) == []


async def test_cancelling(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end:
        job = await scheduler.submit(kit.images(500), scheme="end")
        await scheduler.finished(job["id"])
        end.gate.clear()
        job = await scheduler.submit(kit.images(500), scheme="end")
        await wait_for(lambda: end.waiting == 3, what="tasks under way")
        watching = asyncio.create_task(scheduler.events(job["id"]))
        response = await scheduler.http.delete(f"/v1/jobs/{job['id']}")
        assert response.status_code == 200
        assert (response.json()["state"], response.json()["reason"]) == ("cancelled", "cancelled by the user")
        assert (await watching)[-1][2]["state"] == "cancelled"
        results = await scheduler.results(job["id"])
        assert len(results) == 500
        assert results[499]["error"] == "not answered: the job is cancelled (cancelled by the user)"
        again = await scheduler.http.delete(f"/v1/jobs/{job['id']}")
        assert (again.status_code, again.json()) == (409, {"error": f"job {job['id']} is cancelled already"})
        # The device is free for others at once: nothing of the job is left.
        end.gate.set()
        other = await scheduler.submit(kit.images(50), scheme="end")
        assert (await scheduler.finished(other["id"]))["state"] == "completed"


async def test_what_a_cancelled_job_has_stays_and_is_marked(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0"):
        end.fine_gate.clear()
        job = await scheduler.submit(kit.images(500))
        await wait_for(lambda: coarse_count(scheduler, job, 150), what="the first window")
        assert (await scheduler.http.delete(f"/v1/jobs/{job['id']}")).json()["answered_coarse"] == 150
        results = await scheduler.results(job["id"])
    assert all(result["coarse"] and not result["error"] for result in results[:150])
    assert results[0]["fallback"] == "not answered: the job is cancelled (cancelled by the user)"
    assert all(result["error"] and not result["coarse"] for result in results[150:])


async def test_an_event_stream_is_taken_up_again_where_it_broke(kit, scheduler):
    async with kit.end(scheduler, "end-0"), kit.uppers(scheduler, "edge-0"):
        job = await scheduler.submit(kit.images(250))
        whole = await scheduler.events(job["id"])
    numbered = [(kind, number) for kind, number, _ in whole if kind != "state"]
    assert [number for _, number in numbered] == sorted({number for _, number in numbered})
    assert len(numbered) == 10
    for seen in (1, 4, 10):
        rest = await scheduler.events(job["id"], after=numbered[seen - 1][1])
        assert [(kind, number) for kind, number, _ in rest if kind != "state"] == numbered[seen:]
        assert rest[-1][0] == "state"
        assert rest[-1][2]["state"] == "completed"
    fine = next(data for kind, _, data in whole if kind == "fine")
    assert fine["first_index"] == fine["results"][0]["index"] == 50 * fine["task"]
    assert fine["results"][0]["coarse"] is not None
    # Whoever comes back between the two answers of a task sees the coarse one in the fine event as well.
    task = next(data["task"] for kind, _, data in whole if kind == "coarse")
    coarse_at = next(number for kind, number, data in whole if kind == "coarse" and data["task"] == task)
    rest = await scheduler.events(job["id"], after=coarse_at)
    late = next(data for kind, _, data in rest if kind == "fine" and data["task"] == task)
    assert late["results"][0]["coarse"] is not None


async def test_a_job_that_ends_while_its_stream_is_opened_tells_its_results_before_its_end(kit, scheduler, monkeypatch):
    """The stream reads the results that there are, and before it says in which state the job is that has ended."""
    read, submitted = JobStore.results_after, asyncio.Event()

    async def read_then_wait(self, job_id, seq, *, limit):
        found = await read(self, job_id, seq, limit=limit)
        submitted.set()
        await wait_for(lambda: state_is(scheduler, job, "completed"), what="the end of the job")
        return found

    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0"):
        end.gate.clear()
        job = await scheduler.submit(kit.images(2))
        with monkeypatch.context() as patched:
            patched.setattr(JobStore, "results_after", read_then_wait)
            following = asyncio.create_task(scheduler.events(job["id"]))
            await submitted.wait()
            end.gate.set()
            events = await following
    kinds = [kind if kind != "state" else data["state"] for kind, _, data in events]
    assert [kind for kind in kinds if kind not in ("queued", "running")] == ["coarse", "fine", "completed"]


async def state_is(scheduler, job, state) -> bool:
    return bool((await scheduler.job(job["id"]))["state"] == state)


async def test_whoever_waits_for_the_end_gets_the_states_alone(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end:
        end.gate.clear()
        job = await scheduler.submit(kit.images(120), scheme="end")
        async with scheduler.http.stream("GET", f"/v1/jobs/{job['id']}/events", params={"only": "state"}) as response:
            events = kit.read_events(response)
            kind, _, first = await anext(events)
            end.gate.set()
            rest = [event async for event in events]
    assert (kind, first["answered_coarse"]) == ("state", 0)
    assert {kind for kind, _, _ in rest} == {"state"}
    assert rest[-1][2]["state"] == "completed"
    assert rest[-1][2]["answered_coarse"] == 120
    # From here on, the whole stream: nothing has been seen of it.
    assert [kind for kind, _, _ in await scheduler.events(job["id"], after=rest[-1][1])].count("coarse") == 3
    wrong = await scheduler.http.get(f"/v1/jobs/{job['id']}/events", params={"only": "coarse"})
    assert wrong.status_code == 400


async def test_a_quiet_stream_is_kept_open(kit, scheduler, monkeypatch):
    monkeypatch.setattr("scheduler.jobs.follow._KEEP_ALIVE_S", 0.02)
    job = await scheduler.submit(kit.images(1))
    async with scheduler.http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
        lines = response.aiter_lines()
        while await anext(lines) != ": waiting":
            pass


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_a_key_that_cannot_be_stored_is_refused(kit, scheduler, key):
    response = await scheduler.try_submit(kit.images(1), headers={"Idempotency-Key": key})
    assert (response.status_code, response.json()["error"]) == (400, "an Idempotency-Key has 1 to 255 characters")


async def test_many_followers_see_the_same(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end:
        end.gate.clear()
        job = await scheduler.submit(kit.images(500), scheme="end")
        following = [asyncio.create_task(scheduler.events(job["id"])) for _ in range(10)]
        await wait_for(lambda: end.waiting == 3, what="tasks under way")
        end.gate.set()
        streams = [[number for kind, number, _ in await one if kind == "coarse"] for one in following]
    assert all(stream == streams[0] for stream in streams)
    assert len(streams[0]) == 10


async def test_results_as_lines_and_as_csv_say_the_same(kit, scheduler):
    async with kit.end(scheduler, "end-0"), kit.uppers(scheduler, "edge-0"):
        job = await scheduler.submit(kit.images(120), labels=[5] * 60 + [-1] * 60)
        await scheduler.finished(job["id"])
    lines = await scheduler.results(job["id"])
    response = await scheduler.http.get(f"/v1/jobs/{job['id']}/results", params={"format": "csv"})
    assert response.headers["Content-Type"].startswith("text/csv")
    assert response.headers["Terrace-Job-State"] == "completed"
    rows = list(csv.DictReader(io.StringIO(response.text)))
    assert len(rows) == len(lines) == 120
    for row, line in zip(rows, lines, strict=True):
        ImageResult.model_validate(line)
        assert set(line) == {*ImageResult.model_fields, *ImageResult.model_computed_fields}
        assert row["label"] == line["label"] == line["fine"]["label"]
        assert row["index"] == str(line["index"])
        assert row["fine_label"] == line["fine"]["label"]
        assert row["fine_tier"] == "edge"
        assert float(row["coarse_ms"]) == line["coarse"]["ms"]
        assert row["true_fine"] == (line["true_fine"] or "")
    assert lines[0]["true_fine"] == "bed"
    assert lines[119]["true_fine"] is None


async def test_results_of_a_running_job_are_those_that_there_are(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0"):
        end.fine_gate.clear()
        job = await scheduler.submit(kit.images(500))
        await wait_for(lambda: coarse_count(scheduler, job, 150), what="the first window")
        response = await scheduler.http.get(f"/v1/jobs/{job['id']}/results")
        assert response.headers["Terrace-Job-State"] == "running"
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert [line["index"] for line in lines] == list(range(150))
        assert all(line["coarse"] and not line["fine"] and not line["error"] for line in lines)


async def coarse_count(scheduler, job, count: int) -> bool:
    return bool((await scheduler.job(job["id"]))["answered_coarse"] == count)


async def test_the_list_of_jobs_is_paged_newest_first(kit, scheduler):
    ids = [(await scheduler.submit(kit.images(1), name=f"job {k}"))["id"] for k in range(5)]
    await scheduler.http.delete(f"/v1/jobs/{ids[0]}")
    page = (await scheduler.http.get("/v1/jobs", params={"limit": 2})).json()
    seen = [job["id"] for job in page["jobs"]]
    while page["next_cursor"]:
        page = (await scheduler.http.get("/v1/jobs", params={"limit": 2, "cursor": page["next_cursor"]})).json()
        seen += [job["id"] for job in page["jobs"]]
    assert seen == ids[::-1]
    cancelled = (await scheduler.http.get("/v1/jobs", params={"state": "cancelled"})).json()["jobs"]
    assert [job["name"] for job in cancelled] == ["job 0"]


async def test_policy_fields_stand_in_the_form_or_in_the_query(kit, scheduler):
    held = io.BytesIO()
    np.save(held, kit.images(7))
    form = await scheduler.http.post(
        "/v1/jobs",
        params={"name": "by query"},
        data={"scheme": "end", "batch_size": "3", "labels": json.dumps([0, "bear", None, 1, 1, 1, 1])},
        files=[("images", ("x.npy", held.getvalue()))],
    )
    assert form.status_code == 202, form.text
    view = form.json()
    assert (view["name"], view["scheme"], view["tasks"]) == ("by query", "end", 3)
    assert view["policy"]["deadline_s"] == 86400
    body = await scheduler.http.post(
        "/v1/jobs", params={"scheme": "end"}, content=held.getvalue(), headers={"Content-Type": "application/x-npy"}
    )
    assert body.json()["images"] == 7


@pytest.mark.parametrize(
    ("trusted", "nodes", "scheme", "words"),
    [
        (("end", "edge"), [], "mapping", None),
        (("end", "edge"), ["edge-0"], "mapping", None),
        (
            ("end", "edge"),
            ["edge-0", "cloud-0"],
            "mapping",
            "pixels to cloud-0, .* scheme end-edge or end, .*--trusted end,edge,cloud-0$",
        ),
        (("end", "edge"), [], "end-cloud", "pixels to the cloud tier, .* --trusted end,edge,cloud"),
        (("end", "edge"), ["cloud-0"], "end-cloud", "pixels to cloud-0"),
        (("end", "edge", "cloud-0"), ["cloud-0"], "end-cloud", None),
        (("end", "edge", "cloud-0"), ["cloud-0", "cloud-1"], "end-cloud", "pixels to cloud-1"),
        (("end",), [], "mapping", "the edge and cloud tier"),
        (("end",), ["edge-0"], "end-edge", "pixels to edge-0.* scheme end, .*--trusted end,edge-0$"),
        (("end", "edge-0"), ["edge-0", "edge-1", "cloud-0"], "mapping", "--trusted end,edge-0,cloud-0,edge-1$"),
        (("end",), ["edge-0", "cloud-0"], "end", None),
        (("end", "edge", "cloud"), ["edge-0", "cloud-0"], "mapping", None),
    ],
)
async def test_pixels_never_go_to_an_untrusted_node(kit, settings, trusted, nodes, scheme, words):
    async with (
        kit.scheduler(settings.model_copy(update={"trusted": trusted})) as scheduler,
        kit.uppers(scheduler, *nodes),
    ):
        response = await scheduler.try_submit(kit.images(1), scheme=scheme)
        if words is None:
            assert response.status_code == 202, response.text
        else:
            assert response.status_code == 403
            assert re.search(words, response.json()["error"])
        body, headers = kit.tensor_body(kit.images(1))
        live = await scheduler.http.post(
            "/v1/classify", content=body, headers=headers, params={"scheme": scheme, "deadline_s": 0.1}
        )
        assert live.status_code == (200 if words is None else 403)


async def test_an_untrusted_node_that_joins_later_is_left_out(kit, settings):
    settings = settings.model_copy(update={"trusted": ("end", "edge")})
    async with kit.scheduler(settings) as scheduler, kit.end(scheduler, "end-0") as end:
        end.gate.clear()
        job = await scheduler.submit(kit.images(500))
        async with kit.uppers(scheduler, "cloud-0", "edge-0"):
            end.gate.set()
            view = await scheduler.finished(job["id"])
        assert "cloud-0" not in view["by_node"]
        assert all("cloud-0" not in route for route in end.routes)
        devices = {d["node_id"]: d for d in (await scheduler.http.get("/v1/devices")).json()["devices"]}
        assert (devices["cloud-0"]["trusted"], devices["edge-0"]["trusted"]) == (False, True)


async def classify(kit, scheduler, count: int, **params):
    body, headers = kit.tensor_body(kit.images(count))
    response = await scheduler.http.post("/v1/classify", content=body, headers=headers, params=params)
    return response, [json.loads(line) for line in response.text.splitlines()]


async def test_classify_answers_coarse_then_fine_and_stores_nothing(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0"):
        response, lines = await classify(kit, scheduler, 64)
    assert response.headers["Content-Type"] == "application/x-ndjson"
    assert [line["event"] for line in lines] == ["coarse", "fine", "done"]
    assert [result["fine"]["index"] for result in lines[1]["results"]] == list(range(64))
    assert lines[2]["request_id"] == response.headers["X-Request-Id"] == lines[0]["results"][0]["request_id"]
    assert end.priorities == ["interactive"]
    assert (await scheduler.http.get("/v1/jobs")).json()["jobs"] == []
    assert list((scheduler.settings.state / "inputs").iterdir()) == []


async def test_classify_takes_a_plain_image_file(kit, scheduler):
    held = io.BytesIO()
    Image.new("RGB", (50, 50), (7, 0, 0)).save(held, "PNG")
    async with kit.end(scheduler, "end-0"):
        response = await scheduler.http.post(
            "/v1/classify?scheme=end", content=held.getvalue(), headers={"Content-Type": "image/png"}
        )
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["event"] for line in lines] == ["coarse", "done"]
    assert lines[0]["results"][0]["resized_from"] == [50, 50]


async def test_classify_says_the_coarse_answer_before_the_fine_one_is_there(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0"):
        end.fine_gate.clear()
        body, headers = kit.tensor_body(kit.images(1))
        async with scheduler.http.stream("POST", "/v1/classify", content=body, headers=headers) as response:
            lines = response.aiter_lines()
            assert json.loads(await anext(lines))["event"] == "coarse"
            end.fine_gate.set()
            assert json.loads(await anext(lines))["event"] == "fine"


async def test_classify_refuses_more_than_a_few_images(kit, scheduler):
    response, lines = await classify(kit, scheduler, 65)
    assert response.status_code == 413
    assert "submit a job (POST /v1/jobs)" in lines[0]["error"]


async def test_classify_ends_at_its_deadline(kit, scheduler):
    response, lines = await classify(kit, scheduler, 2, deadline_s=0.2)
    assert response.status_code == 200
    assert [line["event"] for line in lines] == ["failed", "done"]
    assert lines[0]["results"][1]["error"].startswith("deadline: ")


async def test_classify_says_at_once_that_all_end_devices_are_about_to_leave(kit, scheduler):
    async with kit.end(scheduler, "end-0"), kit.end(scheduler, "end-1"):
        for node_id in ("end-0", "end-1"):
            await scheduler.http.post(f"/v1/devices/{node_id}/drain")
        response, lines = await classify(kit, scheduler, 1, scheme="end")
        assert response.status_code == 503
        assert lines[0]["error"].startswith("no end device takes work now (end-0: draining: ")
        assert "end-1: draining: " in lines[0]["error"]
        await scheduler.http.delete("/v1/devices/end-1/drain")
        assert (await classify(kit, scheduler, 1, scheme="end"))[0].status_code == 200


async def test_whoever_hangs_up_on_classify_frees_the_device(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end, kit.uppers(scheduler, "edge-0"):
        end.fine_gate.clear()
        body, headers = kit.tensor_body(kit.images(1))
        async with scheduler.http.stream("POST", "/v1/classify", content=body, headers=headers) as response:
            await anext(response.aiter_lines())
        await wait_for(lambda: free(scheduler), what="the place on the device")


async def free(scheduler) -> bool:
    devices = (await scheduler.http.get("/v1/devices")).json()["devices"]
    return all(device["outstanding"] == 0 for device in devices)


async def test_the_mapping_of_a_fleet_without_edge_nodes_has_no_n_map(kit, settings):
    async with kit.scheduler(settings.model_copy(update={"n_map": None})) as scheduler:
        empty = (await scheduler.http.get("/v1/mapping")).json()
        await scheduler.register("end-0", "end")
        await scheduler.register("cloud-0", "cloud")
        report = (await scheduler.http.get("/v1/mapping", params={"scheme": "mapping"})).json()
    assert (empty["n_map"], empty["n_map_reason"]) == (None, "there is no end device to compute it for")
    assert (report["n_map"], report["n_map_reason"]) == (None, "there is no edge node to compute it for")
    assert report["formulas"]["N_map"]["value"] is None
    assert report["theta_cloud"] == 1
    assert report["pairs"][0]["upstream"] == ["cloud-0"]


async def test_the_mapping_shows_pairs_reasons_and_the_formulas_with_their_figures(kit, settings):
    settings = settings.model_copy(update={"n_map": None, "edge_link_s": 0.5})
    async with (
        kit.scheduler(settings) as scheduler,
        kit.end(scheduler, "end-0"),
        kit.end(scheduler, "end-1"),
        kit.end(scheduler, "end-2"),
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        report = (await scheduler.http.get("/v1/mapping")).json()
        edge = (await scheduler.http.get("/v1/mapping", params={"scheme": "end-edge"})).json()
    # 1 ms an image: 0.05 s a task on each tier, and half a second to the edge node: N_map = ceil(0.55 / 0.05).
    assert (report["n_map"], report["n_map_reason"]) == (11, "ceil(0.550 s / 0.050 s), Eq. 4")
    assert [pair["upstream"] for pair in report["pairs"]] == [["edge-0", "cloud-0"]] * 3
    assert all(pair["reason"] for pair in report["pairs"])
    formulas = report["formulas"]
    assert formulas["T_End"]["value"] == pytest.approx(200 / 3 * 0.05, rel=1e-4)
    assert formulas["T_End-Edge"]["value"] == pytest.approx(200 / 3 * 0.05 + 200 * 0.55, rel=1e-4)
    assert formulas["theta_cloud"]["value"] == 0
    assert formulas["T_Mapping"]["value"] == formulas["T_End-Edge"]["value"]
    assert edge["pairs"][0]["upstream"] == ["edge-0"]


async def with_times(end, task_id, upstreams, lines):
    """Answers as real nodes give them: with the time that the upstream node took."""
    timing = {"queue_ms": 0.0, "compute_ms": 1.0, "batch_images": 1}
    return [lines[0], *({**line, "round_trip_ms": 5.0, "timing": timing} for line in lines[1:])]


async def test_the_mapping_shows_the_cloud_s_planned_and_actual_share_and_the_measured_links(kit, settings):
    settings = settings.model_copy(update={"n_map": 1, "window": 1, "order": "sequential", "edge_link_s": 0.25})
    async with (
        kit.scheduler(settings) as scheduler,
        kit.end(scheduler, "end-0", script=with_times),
        kit.end(scheduler, "end-1", script=with_times),
        kit.end(scheduler, "end-2", script=with_times),
        kit.uppers(scheduler, "edge-0", "cloud-0"),
    ):
        before = (await scheduler.http.get("/v1/mapping")).json()
        job = await scheduler.submit(np.zeros((30, 32, 32, 3), np.uint8), batch_size=1, scheme="mapping")
        done = await scheduler.finished(job["id"])
        after = (await scheduler.http.get("/v1/mapping")).json()
        fleet = (await scheduler.http.get("/v1/fleet")).json()
        other = await scheduler.submit(np.zeros((3, 32, 32, 3), np.uint8), batch_size=1, scheme="end-cloud")
        other = await scheduler.finished(other["id"])
    assert (done["fallback"], other["fallback"]) == (0, 0)
    shares = [(each["theta_cloud"], each["cloud_share"]) for each in (done, fleet, other)]
    assert shares == [(pytest.approx(2 / 3, abs=1e-6),) * 2, (pytest.approx(2 / 3, abs=1e-6),) * 2, (None, None)]
    assert (before["theta_cloud"], before["cloud_share"]) == (pytest.approx(2 / 3, abs=1e-6), None)
    assert (after["theta_cloud"], after["cloud_share"]) == (pytest.approx(2 / 3, abs=1e-6),) * 2
    edge, cloud = after["links"]["edge"], after["links"]["cloud"]
    assert (edge["set_s"], edge["used_s"]) == (0.25, 0.25)
    assert edge["measured_s"] > 0
    assert (cloud["set_s"], cloud["used_s"]) == (None, cloud["measured_s"])
    assert before["links"]["cloud"] == {"set_s": None, "measured_s": None, "used_s": 0.0}


async def test_models_are_listed_and_served_by_digest(kit, settings, weights, tmp_path, caplog):
    folder = shutil.copytree(weights, tmp_path / "weights")
    manifest = json.loads((folder / "manifest.json").read_text())
    content = b"weights of the small network"
    digest = hashlib.sha256(content).hexdigest()
    manifest["models"][0]["sha256"] = digest
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "small.onnx").write_bytes(content)
    async with kit.scheduler(settings.model_copy(update={"models": folder})) as scheduler:
        models = (await scheduler.http.get("/v1/models")).json()["models"]
        assert [model["name"] for model in models] == ["small", "middle", "large"]
        response = await scheduler.http.get("/v1/models/small/file", params={"sha256": digest})
        assert (response.content, response.headers["ETag"]) == (content, f'"{digest}"')
        cached = await scheduler.http.get("/v1/models/small/file", headers={"If-None-Match": f'"{digest}"'})
        assert cached.status_code == 304
        for asked in (
            "",
            "bytes",
            "bytes=x",
            "bytes=,",
            "bytes=9-5",
            "lines=1-2",
            "bytes=" + "9" * 5000,
        ):
            wrong = await scheduler.http.get("/v1/models/small/file", headers={"Range": asked})
            assert (wrong.status_code, wrong.json()) == (
                400,
                {"error": "Range must name bytes of the file, such as bytes=0-99"},
            ), asked
        beyond = await scheduler.http.get("/v1/models/small/file", headers={"Range": "bytes=99-"})
        assert (beyond.status_code, beyond.json()) == (416, {"error": "Range names no bytes that the file has"})
        assert beyond.headers["Content-Range"] == f"bytes */{len(content)}"
        part = await scheduler.http.get("/v1/models/small/file", headers={"Range": "bytes=3-5"})
        assert (part.status_code, part.content) == (206, content[3:6])
        other = await scheduler.http.get("/v1/models/small/file", params={"sha256": "0" * 64})
        assert (other.status_code, digest in other.json()["error"]) == (404, True)
        missing = await scheduler.http.get("/v1/models/middle/file")
        assert missing.status_code == 404
        kept = settings.state / "networks" / digest
        await wait_for(kept.is_file, what="the scheduler's own copy")
        (folder / "small.onnx").write_bytes(b"written over")
        again = await scheduler.http.get("/v1/models/small/file")
        assert (again.status_code, again.content) == (200, content)
        kept.write_bytes(b"damaged")
        damaged = await scheduler.http.get("/v1/models/small/file")
        assert (damaged.status_code, "damaged" in damaged.json()["error"]) == (404, True)
    records = [vars(record) for record in caplog.records if record.levelname == "ERROR"]
    assert [digest in record["why"] for record in records] == [False, True]


async def test_info_says_what_a_client_needs(scheduler):
    info = (await scheduler.http.get("/v1/info")).json()
    assert info["input_shape"] == [32, 32, 3]
    assert info["limits"]["max_images"] == 100_000
    assert info["limits"]["classify_max_images"] == 64
    assert info["hierarchy"]["name"] == "cifar-100"
    assert len(info["hierarchy"]["fine"]) == len(info["hierarchy"]["parent"]) == 100


@pytest.mark.parametrize(
    "page", ["/docs", "/ui", "/ui/try", "/ui/jobs", "/ui/jobs/a-job", "/ui/timeline", "/ui/privacy"]
)
async def test_the_pages_need_nothing_from_elsewhere(scheduler, page):
    shell = await scheduler.http.get(page)
    assert shell.status_code == 200
    assert shell.headers["content-security-policy"].startswith("default-src 'none'")
    assert "'unsafe" not in shell.headers["content-security-policy"]
    assert re.search(r"<script[^>]*>[^<]|<style| style=| on[a-z]+=", shell.text) is None
    paths = re.findall(r"(?:src|href)=[\"']?([^\"'> ]+)", shell.text)
    assert all(path.startswith(("/", "#")) and not path.startswith("//") for path in paths)
    files = [path for path in paths if path.startswith("/ui/files/")]
    assert len(files) >= 3
    kinds = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
    for path in files:
        answer = await scheduler.http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, kinds[path.rpartition(".")[2]])
        assert "immutable" in answer.headers["cache-control"]
        older = await scheduler.http.get(re.sub("/files/[^/]+", "/files/older", path))
        assert (older.content, older.headers["cache-control"]) == (answer.content, "no-store")


@pytest.mark.parametrize("path", ["README.md", "..%2fdocs.js", "%2fetc%2fpasswd", "page.html", "types.d.ts", ""])
async def test_the_pages_give_no_other_files(scheduler, path):
    assert (await scheduler.http.get(f"/ui/files/older/{path}")).status_code == 404


async def test_the_description_names_every_route(scheduler):
    paths = (await scheduler.http.get("/openapi.json")).json()["paths"]
    assert {"/v1/jobs", "/v1/jobs/{job_id}/events", "/v1/classify", "/v1/mapping"} <= set(paths)
    assert all(operation["summary"] for path in paths.values() for operation in path.values())


async def test_readiness_includes_the_database(scheduler):
    answer = (await scheduler.http.get("/readyz")).json()
    assert answer["status"] == "ready"
    assert answer["checks"] == {"database": "ok"}


async def test_metrics_count_jobs_tasks_and_devices(kit, scheduler):
    async def metrics() -> str:
        return str((await scheduler.http.get("/metrics")).text)

    async def devices_are_counted() -> bool:
        return 'terrace_scheduler_devices{health="alive",tier="end"} 1.0' in await metrics()

    async with kit.end(scheduler, "end-0"):
        job = await scheduler.submit(kit.images(100), scheme="end")
        await scheduler.finished(job["id"])
        text = await metrics()
        await wait_for(devices_are_counted, what="the next look at the device list")
    for line in ('terrace_scheduler_jobs_total{state="completed"}', 'terrace_scheduler_tasks_total{outcome="coarse"}'):
        assert float(re.search(re.escape(line) + r" (\S+)", text).group(1)) >= 1  # type: ignore[union-attr]


async def test_head_is_answered_wherever_get_is_and_405_names_all_methods(kit, scheduler):
    job = await scheduler.submit(kit.images(10))  # never done: there is no node
    for path in ("/v1/jobs", f"/v1/jobs/{job['id']}", f"/v1/jobs/{job['id']}/events", "/v1/devices", "/docs"):
        head = await scheduler.http.head(path, timeout=10)
        assert (head.status_code, head.content) == (200, b""), path
    for path in ("/v1/jobs", "/v1/info"):
        head, got = await scheduler.http.head(path), await scheduler.http.get(path)
        assert head.headers["Content-Length"] == got.headers["Content-Length"]
    assert (await scheduler.http.head("/v1/jobs/x")).status_code == 404
    refused = await scheduler.http.put("/v1/jobs")
    assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, HEAD, POST")
    assert (await scheduler.http.head("/v1/classify")).headers["Allow"] == "POST"
