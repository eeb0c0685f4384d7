"""Whatever is sent, the answer is a clear one, nothing is half-done, and the service goes on."""

from __future__ import annotations

import asyncio
import csv
import gzip
import io
import json
import socket
import zipfile
import zlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import numpy as np
import pillow_heif
import pytest
from PIL import Image

from models.manifest import load_manifest
from tierkit.testing import connected, wait_for
from tierkit.wire.messages import classes_digest


def png(size: tuple[int, int] = (32, 32)) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", size, (1, 2, 3)).save(held, "PNG")
    return held.getvalue()


def archive(*entries: tuple[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in entries:
            made.writestr(name, data)
    return held.getvalue()


def damaged(data: bytes) -> bytes:
    """An archive whose first entry cannot be unpacked."""
    return data[:45] + b"\xff" * 8 + data[53:]


def huge_png() -> bytes:
    data = bytearray(png())
    data[16:24] = (20_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def files(*named: tuple[str, bytes]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("images", entry) for entry in named]


@pytest.fixture(scope="module")
async def shared(kit, weights, tmp_path_factory):
    """One scheduler for all tests whose requests are refused, which leaves nothing behind."""
    async with kit.scheduler(kit.settings(tmp_path_factory.mktemp("refusing"), weights)) as running:
        yield running


async def nothing_is_left(scheduler) -> None:
    """No unfinished job, no input, no staged upload; and a good job still works."""
    for state in ("queued", "running"):
        assert (await scheduler.http.get(f"/v1/jobs?state={state}")).json()["jobs"] == []
    assert list((scheduler.settings.state / "inputs").iterdir()) == []
    names = {path.name.partition("-")[0].partition(".")[0] for path in scheduler.settings.state.iterdir()}
    assert names == {"inputs", "models", "networks", "scheduler"}
    job = await scheduler.submit(np.zeros((1, 32, 32, 3), np.uint8))
    assert (await scheduler.http.delete(f"/v1/jobs/{job['id']}")).is_success


@pytest.mark.parametrize(
    ("named", "status", "message"),
    [
        (("notes.txt", b"hello"), 415, "notes.txt: not a PNG, JPEG, WebP, TIFF"),
        (("cut.png", png((64, 64))[:-40]), 400, "cut.png: damaged or truncated image"),
        (("huge.png", huge_png()), 413, "huge.png: "),
        (("empty.png", b""), 400, "empty.png: an empty file"),
        (("x.zip", archive(("../../up.png", png()))), 400, "'../../up.png' leads outside the archive"),
        (("x.zip", archive(("bomb.png", bytes(50_000_000)))), 413, "a zip bomb?"),
        (("x.zip", archive(("inner.zip", archive(("a.png", png()))))), 415, "archive inside the archive"),
        (("x.npz", b"PK\x03\x04junk"), 415, "not a zip file"),
        (("x.npz", damaged(archive(("images.npy", png() * 50)))), 400, "the entry 'images.npy' is damaged"),
        (("x.zip", archive(("a.pngXb", png())).replace(b"a.pngXb", b"a.png\0b")), 400, "holds a zero byte"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
async def test_a_wrong_file_refuses_the_whole_upload(shared, named, status, message):
    response = await shared.http.post("/v1/jobs", files=files(("good.png", png()), named))
    assert response.status_code == status, response.text
    assert message in response.json()["error"]
    await nothing_is_left(shared)


async def test_all_that_is_wrong_is_named(shared):
    wrong = archive(("a/cut.png", png((64, 64))[:-40]), ("b.png", png()), ("c.png", b"none"))
    damaged_entry = damaged(archive(("d.png", png() * 50)))
    named = [("good.png", png()), ("x.zip", wrong), ("empty.png", b""), ("y.zip", damaged_entry)]
    response = await shared.http.post("/v1/jobs", files=files(*named))
    assert response.status_code == 400
    said = response.json()["error"]
    assert "4 of 6 files" in said
    assert [name in said for name in ("a/cut.png", "c.png", "empty.png", "d.png", "b.png", "good.png")] == [
        *(True,) * 4,
        False,
        False,
    ]
    await nothing_is_left(shared)


def jpeg(colour: tuple[int, int, int] = (200, 10, 20)) -> bytes:
    noise = np.random.default_rng(1).integers(0, 40, (300, 400, 3)) + np.array(colour)
    held = io.BytesIO()
    Image.fromarray(noise.astype(np.uint8)).save(held, "JPEG", quality=90)
    return held.getvalue()


def holed(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(2000) + data[middle + 2000 :]


@pytest.mark.parametrize("policy", ["fail", "skip", "answer"])
async def test_a_damaged_jpeg_is_refused_left_out_or_answered(scheduler, kit, policy):
    """With a file that is none, and a JPEG that lacks nothing but the marker at its end."""
    named = [("no-end.jpg", jpeg()[:-2]), ("hole.jpg", holed(jpeg())), ("cut.jpg", jpeg()[:9000]), ("good.png", png())]
    if policy != "fail":
        named.append(("none.jpg", b"none"))
    async with kit.end(scheduler, "end-0"):
        fields = {"on_bad_input": policy, "scheme": "end"}
        response = await scheduler.http.post("/v1/jobs", files=files(*named), data=fields)
        if policy == "fail":
            assert response.status_code == 400
            said = response.json()["error"]
            assert [name in said for name, _ in named] == [False, True, True, False]
            return
        job = await scheduler.finished(response.json()["id"])
        results = await scheduler.results(job["id"])
        table = await scheduler.http.get(f"/v1/jobs/{job['id']}/results?format=csv")
    answered = 2 if policy == "answer" else 0
    assert job["state"] == "completed"
    assert (job["answered_coarse"], job["damaged_images"]) == (2 + answered, 3 - answered)
    assert job["damaged_answered"] == answered
    assert [result["damaged"] is not None for result in results] == [False, True, True, False, True]
    assert [result["error"] is not None for result in results] == [False, *(not answered,) * 2, False, True]
    assert [row["damaged"] for row in csv.DictReader(io.StringIO(table.text))] == [
        result["damaged"] or "" for result in results
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "image/jpg",
        "image/pjpeg",
        "image/x-citrix-jpeg",
        "image/x-png",
        "application/octet-stream",
        "IMAGE/JPEG; q=1",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/classify"])
async def test_a_picture_is_taken_under_the_names_that_programs_give_it(scheduler, kit, path, kind):
    async with kit.end(scheduler, "end-0"):
        headers = {"Content-Type": kind} if kind else {}
        for body in (jpeg(), png(), archive(("a/b.png", png()))):
            answer = await scheduler.http.post(f"{path}?scheme=end", content=body, headers=headers)
            assert answer.is_success, answer.text


async def test_pictures_that_cannot_be_read_are_skipped(scheduler, kit):
    named = [("a.png", png()), ("b.png", b"none"), ("c.png", png((64, 64))[:-40]), ("d.png", png())]
    async with kit.end(scheduler, "end-0"):
        response = await scheduler.http.post(
            "/v1/jobs", files=files(*named), data={"on_bad_input": "skip", "scheme": "end", "labels": '["a", 1, 1, 1]'}
        )
        assert response.status_code == 400, response.text  # 'a' is no class: labels still belong to all files
        fields = {"on_bad_input": "skip", "scheme": "end", "labels": "[1, 1, 1, 1]"}
        response = await scheduler.http.post("/v1/jobs", files=files(*named), data=fields)
        assert response.status_code == 202, response.text
        assert [image["name"] for image in response.json()["damaged"]] == ["b.png", "c.png"]
        job = await scheduler.finished(response.json()["id"])
        results = await scheduler.results(job["id"])
    assert (job["state"], job["answered_coarse"], job["failed_images"], job["damaged_images"]) == ("completed", 2, 2, 2)
    assert [(image["index"], image["name"]) for image in job["damaged"]] == [(1, "b.png"), (2, "c.png")]
    assert [result["coarse"] is not None for result in results] == [True, False, False, True]
    assert "truncated" in results[2]["error"]


async def test_a_file_keeps_its_name(scheduler, kit):
    async with kit.end(scheduler, "end-0"):
        name = 'a "b", ü.png'
        response = await scheduler.http.post("/v1/jobs", files=files((name, png())), data={"scheme": "end"})
        job = await scheduler.finished(response.json()["id"])
        assert [result["name"] for result in await scheduler.results(job["id"])] == [name]


async def test_an_unknown_wish_for_bad_pictures_is_refused(shared):
    response = await shared.http.post("/v1/jobs", files=files(("a.png", png())), data={"on_bad_input": "ignore"})
    assert (response.status_code, "on_bad_input" in response.json()["error"]) == (400, True)


async def test_object_arrays_are_refused(shared):
    held = io.BytesIO()
    np.savez(held, images=np.array([print], dtype=object))
    response = await shared.http.post(
        "/v1/jobs", content=held.getvalue(), headers={"Content-Type": "application/x-npz"}
    )
    assert response.status_code == 400
    assert "would have to be unpickled" in response.json()["error"]
    await nothing_is_left(shared)


@pytest.mark.parametrize(
    ("upload", "sentence"),
    [
        ([("labels", ("x", b"[]"))], "no images in the upload"),
        (files(("x.zip", archive())), "x.zip: no picture in it"),
        (files(("x.zip", archive(("notes.txt", b"hello"), (".a.png", png())))), "x.zip: no picture in it"),
    ],
)
async def test_an_empty_job(shared, upload, sentence):
    response = await shared.http.post("/v1/jobs", files=upload)
    assert response.status_code == 400
    assert response.json()["error"].startswith(sentence)
    await nothing_is_left(shared)


async def test_more_images_than_the_limit(kit, settings):
    async with kit.scheduler(settings.model_copy(update={"max_images": 10})) as scheduler:
        for response in (
            await scheduler.try_submit(kit.images(11)),
            await scheduler.http.post("/v1/jobs", files=files(*((f"{k}.png", png()) for k in range(11)))),
        ):
            assert response.status_code == 413
            assert "more than 10" in response.json()["error"]
        await nothing_is_left(scheduler)


async def test_more_bytes_than_the_limit(kit, settings):
    async with kit.scheduler(settings.model_copy(update={"max_body_bytes": 10_000})) as scheduler:
        assert (await scheduler.try_submit(kit.images(10))).status_code == 413

        async def unannounced() -> AsyncIterator[bytes]:
            for _ in range(11):
                yield bytes(1000)

        response = await scheduler.http.post(
            "/v1/jobs", content=unannounced(), headers={"Content-Type": "application/x-npy"}
        )
        assert response.status_code == 413
        await nothing_is_left(scheduler)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"shceme": "end"}, "unknown field 'shceme': did you mean 'scheme'?"),
        ({"scheme": "fog"}, "scheme: "),
        ({"batch_size": "0"}, "batch_size: "),
        ({"privacy": "some"}, "privacy: "),
    ],
)
async def test_a_wrong_policy(kit, shared, query, message):
    response = await shared.try_submit(kit.images(1), **query)
    assert response.status_code == 400
    assert message in response.json()["error"]
    form = await shared.http.post("/v1/jobs", files=files(("a.png", png())), data=query)
    assert form.json() == response.json()
    await nothing_is_left(shared)


@pytest.mark.parametrize("change", [-1, +1, -3000])
async def test_a_body_that_is_not_what_its_header_says(kit, shared, change):
    body, headers = kit.tensor_body(kit.images(2))
    del headers["Content-Length"]
    body = body[:change] if change < 0 else body + bytes(change)
    response = await shared.http.post("/v1/jobs", content=body, headers=headers)
    assert response.status_code == 400, response.text
    await nothing_is_left(shared)


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Content-Type": "application/octet-stream"}, 400, "Inference-Header-Content-Length"),
        (
            {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "-5"},
            400,
            "must be a number of bytes",
        ),
        (
            {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": "99999"},
            400,
            "but the body has",
        ),
        ({"Content-Type": "text/plain"}, 415, "text/plain is not accepted; known: multipart/form-data"),
        ({}, 415, "(none) is not accepted"),
        ({"Content-Type": "multipart/form-data"}, 400, "names no boundary"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 400, "multipart form"),
        ({"Content-Type": f"multipart/form-data; boundary={'x' * 257}"}, 400, "multipart form: Boundary length 257"),
    ],
)
async def test_a_wrong_header(shared, headers, status, message):
    response = await shared.http.post("/v1/jobs", content=b"some bytes", headers=headers)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]
    await nothing_is_left(shared)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": '["kat"]'}, "'kat' of image 0 is not a fine class"),
        ({"labels": "[0, 1]"}, "labels: 2 for 1 images"),
        ({"labels": "nonsense"}, "not a JSON list"),
        ({"images": "x"}, "must hold files"),
        ({"images": b"\xff\xd8"}, "file name"),
    ],
)
async def test_wrong_form_fields(shared, fields, message):
    response = await shared.http.post("/v1/jobs", files=files(("a.png", png())), data=fields)
    assert response.status_code == 400
    assert message in response.json()["error"]
    await nothing_is_left(shared)


async def test_labels_that_are_left_empty_in_a_form_are_none(scheduler):
    response = await scheduler.http.post("/v1/jobs", files=files(("a.png", png())), data={"labels": ""})
    assert response.status_code == 202, response.text


async def test_form_fields_that_would_fill_the_memory(shared):
    part = "[" + "[]," * 1_000_000 + "[]]"
    several = {"labels": part, "name": part}
    response = await shared.http.post("/v1/jobs", files=files(("a.png", png())), data=several)
    assert response.status_code == 413
    assert "the form fields have more than 4194304 bytes" in response.json()["error"]
    large = [*files(("a.png", png())), ("labels", ("labels.json", part * 2))]
    response = await shared.http.post("/v1/jobs", files=large)
    assert response.status_code == 413
    assert "labels: 6000008 bytes; 4194304 are accepted" in response.json()["error"]
    await nothing_is_left(shared)


async def test_a_form_that_breaks_off_before_its_end(scheduler):
    body = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n' + png()
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    response = await scheduler.http.post("/v1/jobs", content=body, headers=headers)
    assert response.status_code == 400
    assert "cut short" in response.json()["error"]
    await nothing_is_left(scheduler)


async def test_a_client_that_hangs_up_in_the_middle_of_its_upload(kit, scheduler):
    body, headers = kit.tensor_body(kit.images(1000))
    address = urlsplit(scheduler.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        client.sendall(f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode() + body[: len(body) // 2])
        await wait_for(lambda: in_flight(scheduler), what="the upload to be under way")
    await wait_for(lambda: idle(scheduler), what="the scheduler to notice")
    await nothing_is_left(scheduler)


def slow_jpeg(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times: each has few bytes, and goes through all pixels."""
    held = io.BytesIO()
    Image.new("RGB", (side, side), (90, 120, 40)).save(held, "JPEG", progressive=True)
    data = held.getvalue()
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * scans + data[-2:]


async def test_a_client_that_hangs_up_while_its_pictures_are_decoded(scheduler):
    # Without an end they would take a minute.
    picture = slow_jpeg(4000, 80)
    body = archive(*((f"{number}.jpg", picture) for number in range(100)))
    address = urlsplit(scheduler.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/zip\r\nContent-Length: {len(body)}"
        await asyncio.to_thread(client.sendall, f"{head}\r\n\r\n".encode() + body)
        inputs = scheduler.settings.state / "inputs"
        await wait_for(lambda: any(inputs.iterdir()), what="the decoding to begin")
    await wait_for(lambda: idle(scheduler), what="the scheduler to notice")
    await nothing_is_left(scheduler)


async def test_pictures_that_take_long_do_not_hold_up_others(scheduler):
    picture = slow_jpeg(4200, 80)
    slow = files(*((f"{number}.jpg", picture) for number in range(30)))
    hostile = [asyncio.create_task(scheduler.http.post("/v1/jobs", files=slow)) for _ in range(3)]
    inputs = scheduler.settings.state / "inputs"
    await wait_for(lambda: len(list(inputs.iterdir())) == 3, what="all to be looked at")
    assert (await scheduler.http.post("/v1/jobs", files=files(("a.png", png())))).status_code == 202
    assert not any(upload.done() for upload in hostile)
    for upload in hostile:
        upload.cancel()
    await wait_for(lambda: idle(scheduler), what="the scheduler to notice")


async def in_flight(scheduler) -> bool:
    return bool((await scheduler.http.get("/readyz")).json()["in_flight"] == 1)


async def idle(scheduler) -> bool:
    return bool((await scheduler.http.get("/readyz")).json()["in_flight"] == 0)


async def test_a_client_that_hangs_up_in_the_middle_of_an_event_stream(kit, scheduler):
    async with kit.end(scheduler, "end-0") as end:
        end.gate.clear()
        job = await scheduler.submit(kit.images(100), scheme="end")
        async with scheduler.http.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
            async for kind, _, _ in kit.read_events(response):
                assert kind == "state"
                break
        end.gate.set()
        assert (await scheduler.finished(job["id"]))["answered_coarse"] == 100


async def test_what_does_not_exist(shared):
    for path in ("", "/results", "/events"):
        response = await shared.http.get(f"/v1/jobs/none{path}")
        assert (response.status_code, response.json()) == (404, {"error": "no job 'none'"})
    assert (await shared.http.delete("/v1/jobs/none")).status_code == 404
    assert (await shared.http.get("/v1/models/none/file")).status_code == 404
    assert (await shared.http.post("/v1/devices/none/drain")).status_code == 404
    for path in ("/v1/nothing", "/v1/jobs/", "/docs/"):
        response = await shared.http.get(path)
        assert (response.status_code, response.json()) == (404, {"error": f"no such route: {path}"})
    assert (await shared.http.get("/v1/jobs", params={"state": "odd"})).status_code == 400


@pytest.mark.parametrize("number", ["x", "-1", "1.5", "9" * 30])
async def test_a_wrong_last_event_id(kit, scheduler, number):
    job = await scheduler.submit(kit.images(1))
    response = await scheduler.http.get(f"/v1/jobs/{job['id']}/events", headers={"Last-Event-ID": number})
    assert response.status_code == 400


@pytest.mark.parametrize(
    "change",
    [
        {"tier": "fog"},
        {"node_id": "UPPER"},
        {"url": "ftp://x"},
        {"url": "http://"},
        {"url": "http://a b"},
        {"url": "http://["},
        {"url": "http://h:99999"},
        {"url": "http://h\n"},
        {"url": "http://h/?q=1"},
        {"url": f"http://{'h' * 600}"},
        {"version": ""},
        {"version": "1" * 65},
        {"version": "1\x1b[2J"},
        {"models": []},
        {"extra": 1},
    ],
)
async def test_a_wrong_registration(shared, change):
    registration = {
        "node_id": "end-0",
        "incarnation": "a" * 16,
        "tier": "end",
        "url": "http://127.0.0.1:9",
        "models": [{"name": "small", "sha256": "0" * 64, "ms_per_image": 1}],
        "version": "0",
    }
    response = await shared.http.post("/v1/devices", json={**registration, **change})
    assert response.status_code == 422
    assert next(iter(change)) in response.json()["error"]
    assert (await shared.http.get("/v1/devices")).json() == {"devices": []}


OFFER = {"name": "small", "sha256": "0" * 64, "ms_per_image": 1}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            {"models": [{**OFFER, "ms_per_image": 0}]},
            "body.models.0.ms_per_image is 0: Input should be greater than or equal to 0.000001",
        ),
        (
            {"models": [{**OFFER, "ms_per_image": 5e-324}]},
            "body.models.0.ms_per_image is 5e-324: Input should be greater than or equal to 0.000001",
        ),
        (
            {"models": [{**OFFER, "ms_per_image": 1e99}]},
            "body.models.0.ms_per_image is 1e+99: Input should be less than or equal to 1000000000",
        ),
        ({"images_per_minute": 1e308}, "body.images_per_minute is too large"),
        (
            {"node_id": "edge", "tier": "cloud"},
            "body.node_id: must not be the name of a tier, as 'edge' is: add a number or a name, such as edge-1",
        ),
        ({"models": 1}, "body.models should be a list"),
        ({"models": [OFFER, OFFER]}, "body.models: must name each version of a model once, and names 'small' twice"),
        (
            {"models": [{**OFFER, "name": "m\x1b[2J"}]},
            "body.models.0.name: must be 1 to 120 letters, digits, dots, dashes and underscores, beginning with a "
            "letter or digit",
        ),
        ({"url": "http://me:secret@h:1"}, "body.url: must hold no user name and no password"),
        ({"models": []}, "body.models has too few entries"),
        ({"frob": 1}, "body.frob is unknown"),
        (b"[[[[", "the body is no JSON: Expecting value, at character 4"),
        (b"[]", "body should be a JSON object, sent as application/json"),
        (b"", "body is missing"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_wrong_with_a_registration_is_said_in_plain_words(shared, body, sentence):
    good = {"node_id": "end-0", "incarnation": "a" * 16, "tier": "end", "url": "http://127.0.0.1:9", "models": [OFFER]}
    sent = body if isinstance(body, bytes) else json.dumps({**good, "version": "0", **body}).encode()
    response = await shared.http.post("/v1/devices", content=sent, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()) == (422, {"error": sentence})


@pytest.mark.parametrize("path", ["/v1/devices", "/v1/devices/end-0/heartbeat"])
async def test_more_json_than_nodes_have_to_say_is_refused_before_its_end(shared, path):
    async with connected(shared.url) as (reader, writer):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {2**26}\r\n\r\n"
        writer.write(head.encode() + b"[" + b"[]," * 2**15)
        async with asyncio.timeout(10):
            answer = await reader.readuntil(b"}")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert "65536 bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize(
    ("labels", "status", "message"),
    [
        ("[" + "[]," * 2**18 + "[]]", 413, "characters of JSON for 1 images"),
        ("[" + "[]," * 100 + "[]]", 400, "must be a JSON list with one name, number or null per image"),
        ("[" * 500 + "]" * 500, 400, "must be a JSON list with one name, number or null per image"),
    ],
    ids=["long", "lists", "deep"],
)
@pytest.mark.parametrize("as_file", [False, True], ids=["field", "file"])
async def test_more_json_than_the_labels_of_the_images_take(shared, labels, status, message, as_file):
    named = [*files(("a.png", png())), *([("labels", ("labels.json", labels.encode()))] if as_file else [])]
    response = await shared.http.post("/v1/jobs", files=named, data={} if as_file else {"labels": labels})
    assert response.status_code == status
    assert message in response.json()["error"]
    await nothing_is_left(shared)


@pytest.mark.parametrize(
    "deep", ['{"a":' * 900 + "1" + "}" * 900, "[" * 900 + "1" + "]" * 900], ids=["objects", "lists"]
)
async def test_json_that_is_nested_deeply_is_the_senders_fault(shared, deep):
    good = {"node_id": "end-0", "incarnation": "a" * 16, "tier": "end", "url": "http://127.0.0.1:9", "models": [OFFER]}
    whole = json.dumps({**good, "version": "0"})
    sent = [
        ("/v1/devices", deep, {"Content-Type": "application/json"}),
        *(("/v1/devices", whole[:-1] + f', "{name}": {deep}}}', {"Content-Type": "application/json"}) for name in good),
        ("/v1/devices/end-0/heartbeat", deep, {"Content-Type": "application/json"}),
        (
            "/v1/jobs",
            deep,
            {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(deep))},
        ),
    ]
    for path, body, headers in sent:
        response = await shared.http.post(path, content=body, headers=headers)
        assert (response.status_code in (400, 422), list(response.json())) == (True, ["error"]), response.text
    await nothing_is_left(shared)


HUGE = int("1" + "0" * 400)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"running_images": HUGE}, "body.running_images: Input should be less than or equal to 2147483647"),
        (
            {"queued_images": 2**31},
            "body.queued_images is 2147483648: Input should be less than or equal to 2147483647",
        ),
        ({"in_flight": HUGE}, "body.in_flight: Input should be less than or equal to 2147483647"),
        ({"images_done": HUGE}, "body.images_done: Input should be less than or equal to 9007199254740992"),
        ({"images_done": -1}, "body.images_done is -1: Input should be greater than or equal to 0"),
        ({"incarnation": "x" * 65}, "body.incarnation: String should have at most 64 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_heartbeat_with_numbers_that_cannot_be_is_refused_and_costs_nothing(kit, scheduler, change, sentence):
    async with kit.end(scheduler, "end-0") as end:
        response = await scheduler.beat("end-0", **{"incarnation": end.incarnation, **change})
        assert (response.status_code, response.json()) == (422, {"error": sentence})
        job = await scheduler.submit(kit.images(2), scheme="end")
        assert (await scheduler.finished(job["id"]))["answered_coarse"] == 2


async def test_an_upper_node_that_answers_superclasses_alone_is_refused(scheduler):
    hierarchy = load_manifest().hierarchy
    coarse, fine = (
        {**OFFER, **network, "classes": classes_digest(classes)}
        for network, classes in (
            ({}, hierarchy.coarse),
            ({"name": "middle", "sha256": "1" * 64}, hierarchy.fine),
        )
    )
    node = {"incarnation": "a" * 16, "url": "http://127.0.0.1:9", "version": "0"}
    for tier, offers, status in (
        ("end", [coarse], 200),
        ("edge", [coarse], 409),
        ("cloud", [coarse], 409),
        ("edge", [coarse, fine], 200),
        ("cloud", [fine], 200),
    ):
        place = {**node, "node_id": f"{tier}-{len(offers)}", "tier": tier, "models": offers}
        response = await scheduler.http.post("/v1/devices", json=place)
        assert response.status_code == status, (tier, offers)
        assert ("answers only superclasses" in response.text) is (status == 409)


async def test_a_node_with_the_address_of_the_scheduler_is_refused(shared):
    node = {"node_id": "end-0", "incarnation": "a" * 16, "tier": "end", "models": [OFFER], "version": "0"}
    port = urlsplit(shared.url).port
    for url in (f"{shared.url}/", f"http://localhost:{port}", f"http://127.1:{port}/", f"https://127.0.0.1:{port}"):
        response = await shared.http.post("/v1/devices", json={**node, "url": url})
        assert response.status_code == 400, url
        assert response.json()["error"].startswith("url: this is the scheduler's own address")
    assert (await shared.http.get("/v1/devices")).json() == {"devices": []}


async def test_converted_and_resized_images_are_accepted_and_said(kit, scheduler):
    held = io.BytesIO()
    Image.new("CMYK", (50, 40), (0, 255, 255, 0)).save(held, "JPEG")
    async with kit.end(scheduler, "end-0"):
        response = await scheduler.http.post(
            "/v1/jobs", files=files(("a.jpg", held.getvalue()), ("b.png", png())), data={"scheme": "end"}
        )
        assert response.status_code == 202
        assert response.json()["resized_images"] == 1
        assert (await scheduler.finished(response.json()["id"]))["state"] == "completed"
        results = await scheduler.results(response.json()["id"])
        table = await scheduler.http.get(f"/v1/jobs/{response.json()['id']}/results", params={"format": "csv"})
    assert [(r["name"], r["resized_from"]) for r in results] == [("a.jpg", [40, 50]), ("b.png", None)]
    assert [row["resized_from"] for row in csv.DictReader(io.StringIO(table.text))] == ["50x40", ""]


@pytest.mark.parametrize("form", ["png", "jpeg", "webp", "tiff", "bmp", "gif", "avif", "heic", "heif"])
async def test_each_format_is_accepted_as_a_whole_body(scheduler, form):
    held = io.BytesIO()
    if form.startswith("hei"):
        pillow_heif.from_pillow(Image.new("RGB", (64, 64))).save(held)
    else:
        Image.new("RGB", (64, 64)).save(held, form)
    headers = {"Content-Type": f"image/{form}"}
    response = await scheduler.http.post("/v1/jobs", content=held.getvalue(), headers=headers)
    assert response.status_code == 202, response.text
    assert response.json()["resized_images"] == 1


async def test_many_bad_uploads_at_once_do_not_hold_up_a_good_one(kit, scheduler):
    async with kit.end(scheduler, "end-0"):
        bad = [scheduler.http.post("/v1/jobs", files=files(("x.png", b"no"))) for _ in range(20)]
        responses = await asyncio.gather(*bad, scheduler.try_submit(kit.images(10), scheme="end"))
        assert [response.status_code for response in responses] == [415] * 20 + [202]
        assert (await scheduler.finished(responses[-1].json()["id"]))["answered_coarse"] == 10


async def test_errors_have_one_form(shared):
    for response in (
        await shared.http.post("/v1/jobs", content=b"x"),
        await shared.http.put("/v1/jobs"),
        await shared.http.get("/v1/jobs", params={"limit": 0}),
    ):
        assert list(json.loads(response.text)) == ["error"]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/v1/jobs?frob=1", "unknown parameter 'frob': known are limit, cursor, state, site"),
        ("/v1/jobs?limt=1", "unknown parameter 'limt': did you mean 'limit'?"),
        ("/v1/jobs?limit=1&limit=2", "the parameter 'limit' is given twice"),
        ("/v1/jobs?cursor=zzz", "cursor is the next_cursor of the page before, not 'zzz'"),
        ("/v1/mapping?n_map=-1", "unknown parameter 'n_map': known are scheme, tasks, site"),
        ("/v1/devices?tier=end", "unknown parameter 'tier': known are site"),
        ("/v1/info?x", "unknown parameter 'x': there are none here"),
    ],
)
async def test_parameters_that_do_not_exist(shared, path, sentence):
    response = await shared.http.get(path)
    assert (response.status_code, response.json()) == (400, {"error": sentence})


async def test_a_compressed_upload(kit, scheduler):
    body = gzip.compress(png())
    headers = {"Content-Type": "image/png", "Content-Encoding": "gzip"}
    for route in ("/v1/jobs", "/v1/classify"):
        response = await scheduler.http.post(route, content=body, headers=headers)
        assert response.status_code == 415
        assert response.json()["error"] == "content encoding 'gzip': send the body uncompressed"
    await nothing_is_left(scheduler)


async def test_nothing_at_all_as_an_upload(shared):
    response = await shared.http.post("/v1/jobs")
    assert response.status_code == 400
    assert response.json()["error"] == "the job has no images: send them as the body"


@pytest.mark.parametrize("value", ["nan", "inf"])
async def test_a_deadline_that_is_no_number(shared, value):
    response = await shared.http.post(
        f"/v1/jobs?deadline_s={value}", content=png(), headers={"Content-Type": "image/png"}
    )
    assert response.status_code == 400
    assert response.json()["error"] == "deadline_s: Input should be a finite number"


async def test_a_node_id_that_is_none_is_told_the_rule_in_words(shared):
    response = await shared.http.post("/v1/devices/Edge_1/drain")
    assert response.status_code == 400
    assert "must be 1 to 63 lower-case letters" in response.json()["error"]
    assert "[a-z" not in response.json()["error"]


_POST = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nrubbish behind it\r\n\r\n", 200),
        (_POST + b"Content-Length: %d\r\n\r\n%b{}" % (len(png()), png()), 202),
        (_POST + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n", 400),
    ],
    ids=["after a request without body", "after a body", "amid chunks"],
)
async def test_rubbish_after_a_request_does_not_cost_its_answer(shared, sent, status):
    async with connected(shared.url) as (reader, writer):
        writer.write(sent)
        async with asyncio.timeout(10):
            answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in answer.lower()
