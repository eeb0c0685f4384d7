"""Observations at the scheduler: batches of nodes, their order, gaps, pictures and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gzip
import io
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from PIL import Image

from models.hierarchy import bundled_hierarchy
from tierkit.testing import wait_for
from tierkit.wire.api import parse
from tierkit.wire.sources import ObservationPage, SeenGap, SeenPicture

SPOOL, OTHER_SPOOL = "a" * 16, "b" * 16
SHA256 = "0" * 64
COARSE, FINE = bundled_hierarchy().coarse, bundled_hierarchy().fine


def local(label: int = 3, confidence: float = 0.5) -> dict[str, Any]:
    return {"model": "small", "sha256": SHA256, "label": label, "confidence": confidence}


def finer(label: int = 7) -> dict[str, Any]:
    return {
        "node_id": "cloud-0",
        "tier": "cloud",
        "model": "large",
        "sha256": "2" * 64,
        "label": label,
        "confidence": 0.9,
        "coarse_label": 4,
        "coarse_confidence": 0.95,
        "sent": {"form": "pixels", "upload_bytes": 3321},
    }


def seen(sequence: int, *, source: str = "gate", age_s: float = 1.0, **changes: Any) -> dict[str, Any]:
    answer = local(sequence % 20)
    return {"source": source, "sequence": sequence, "age_s": age_s, "local": answer, **changes}


class Camera:
    """A node with sources, as the scheduler sees it."""

    def __init__(self, running: Any, node_id: str, incarnation: str, spool: str = SPOOL) -> None:
        self.running, self.node_id, self.incarnation, self.spool = running, node_id, incarnation, spool

    def batch(self, *observations: dict[str, Any], **changes: Any) -> dict[str, Any]:
        own = {"node_id": self.node_id, "incarnation": self.incarnation, "spool": self.spool}
        return {**own, "observations": observations, **changes}

    async def try_send(self, *observations: dict[str, Any], **changes: Any) -> httpx.Response:
        return await self.post(json.dumps(self.batch(*observations, **changes)).encode())

    async def post(self, body: bytes, **headers: str) -> httpx.Response:
        reply: httpx.Response = await self.running.http.post("/v1/observations", content=body, headers=headers)
        return reply

    async def send(self, *observations: dict[str, Any], **changes: Any) -> dict[str, Any]:
        reply = await self.try_send(*observations, **changes)
        assert reply.status_code == 200, reply.text
        return {"behind": {}, **reply.json()}

    async def lines(self, **query: Any) -> list[dict[str, Any]]:
        reply = await self.running.http.get("/v1/observations/export", params=query)
        assert reply.status_code == 200, reply.text
        return [json.loads(line) for line in reply.text.splitlines()]

    async def numbers(self, **query: Any) -> list[Any]:
        """Sequence numbers, and gaps as pairs."""
        return [
            line["sequence"] if "sequence" in line else (line["gap"]["first"], line["gap"]["last"])
            for line in await self.lines(**query)
        ]


async def camera(running: Any, kit: Any, node_id: str = "end-0", **changes: Any) -> Camera:
    place = {**kit.registration(node_id), "spool": "5" * 16, **changes}
    reply = await running.http.post("/v1/devices", json=place)
    assert reply.status_code == 200, reply.text
    return Camera(running, node_id, place["incarnation"])


@pytest.fixture
async def gate(scheduler: Any, kit: Any) -> Camera:
    """A camera whose lease lasts for the whole test."""
    return await camera(scheduler, kit, lease_s=600.0)


@pytest.fixture
async def either(request: Any, kit: Any, settings: Any, database_url: str) -> AsyncIterator[Camera]:
    """The same, on each database."""
    async with kit.scheduler(settings.model_copy(update={"database": database_url})) as running:
        yield await camera(running, kit, lease_s=600.0)


async def test_an_observation_is_shown_with_the_names_of_its_classes(gate: Camera) -> None:
    now = time.time()
    receipt = await gate.send(
        seen(1, age_s=60.0, taken_at=now - 90.0, name="a/b.jpg", finer=finer(), unsure=True, local=local(3)),
        {"source": "gate", "sequence": 2, "age_s": 5.0, "reason": "truncated"},
    )
    assert receipt == {"stored": 2, "known": 0, "behind": {}}
    first, second = await gate.lines()
    assert datetime.fromisoformat(first.pop("taken_at")).timestamp() == pytest.approx(now - 90, abs=0.01)
    coarse = {"index": 3, "label": COARSE[3], "confidence": 0.5, "node": "end-0", "model": "small", "sha256": SHA256}
    coarse["ms"] = None
    answer = {key: value for key, value in finer().items() if key not in ("node_id", "label", "coarse_label")}
    fine = {
        **answer,
        "ms": None,
        "node": "cloud-0",
        "index": 7,
        "label": FINE[7],
        "coarse_index": 4,
        "coarse_label": COARSE[4],
    }
    sent = {"form": "pixels", "upload_bytes": 3321, "encode_ms": 0.0, "encoded_by": None, "relay_bytes": 0}
    assert first == {
        "node": "end-0",
        "source": "gate",
        "sequence": 1,
        "revision": 0,
        "name": "a/b.jpg",
        "release": None,
        "label": FINE[7],
        "confidence": 0.9,
        "answered_by": "cloud",
        "coarse": coarse,
        "fine": {**fine, "sent": sent},
        "unsure": True,
        "waits": False,
        "fallback": None,
        "damaged": None,
        "picture": False,
        "audit": False,
        "person": None,
        "person_by": None,
        "person_at": None,
        "site": None,
    }
    assert datetime.fromisoformat(second["taken_at"]).timestamp() == pytest.approx(now - 5, abs=5)
    assert (second["label"], second["coarse"], second["answered_by"]) == (None, None, None)
    assert (second["damaged"], second["fallback"]) == ("truncated", None)
    for line in (first, second):
        parse(SeenPicture, json.dumps({"taken_at": "2026-01-01T00:00:00Z", **line}))


async def test_a_batch_that_comes_again_changes_nothing_and_an_amended_one_counts(either: Camera) -> None:
    batch = [seen(number) for number in range(1, 51)]
    assert await either.send(*batch) == {"stored": 50, "known": 0, "behind": {}}
    assert await either.send(*batch) == {"stored": 0, "known": 50, "behind": {}}
    before = await either.lines()
    amended = seen(7, revision=1, finer=finer(), age_s=400.0)
    assert await either.send(amended, seen(51)) == {"stored": 2, "known": 0, "behind": {}}
    assert await either.send(seen(7), amended) == {"stored": 0, "known": 2, "behind": {}}
    assert await either.send(seen(52), seen(52, revision=1)) == {"stored": 2, "known": 0, "behind": {}}
    after = await either.lines()
    assert [line["sequence"] for line in after] == list(range(1, 53))
    assert (after[6]["label"], after[6]["revision"]) == (FINE[7], 1)
    assert after[6]["taken_at"] == before[6]["taken_at"]
    assert after[:6] + after[7:50] == before[:6] + before[7:]


async def test_numbers_that_go_back_are_refused_until_the_device_counts_on(either: Camera) -> None:
    await either.send(*[seen(number) for number in range(1, 11)], seen(1, source="yard"))
    again = Camera(either.running, either.node_id, either.incarnation, OTHER_SPOOL)
    receipt = await again.send(seen(1), seen(2), seen(5, source="yard"))
    assert receipt == {"stored": 1, "known": 0, "behind": {"gate": {"first": 1, "highest": 10}}}
    assert await again.send(seen(11), seen(12)) == {"stored": 2, "known": 0, "behind": {}}
    # The first spool has lost its claim.
    assert (await either.send(seen(12)))["behind"] == {"gate": {"first": 12, "highest": 12}}
    # A copy of the spool has numbered other pictures in the same way.
    assert (await again.send(seen(12, local=local(19, 0.123)), seen(13)))["behind"] == {
        "gate": {"first": 12, "highest": 12}
    }
    assert (await again.send(seen(12, name="other.jpg")))["behind"] == {"gate": {"first": 12, "highest": 12}}
    # The numbers before the first other picture count.
    mixed = await again.send(seen(11), seen(12, name="other.jpg"))
    assert (mixed["known"], mixed["behind"]["gate"]["first"]) == (1, 12)
    assert await either.numbers() == [*range(1, 13), 1, 5]


async def test_gaps_stand_between_observations(either: Camera) -> None:
    await either.send(seen(5), gaps=[{"source": "gate", "first": 1, "last": 4}])
    await either.send(
        seen(20), gaps=[{"source": "gate", "first": 3, "last": 9}, {"source": "gate", "first": 10, "last": 12}]
    )
    await either.send(gaps=[{"source": "gate", "first": 30, "last": 40}, {"source": "yard", "first": 1, "last": 2}])
    assert await either.numbers() == [(1, 4), 5, (6, 12), 20, (30, 40), (1, 2)]
    assert await either.numbers(source="gate", after=8) == [(9, 12), 20, (30, 40)]
    assert await either.numbers(source="gate", after=35) == [(36, 40)]
    assert await either.numbers(source="yard", node="end-0") == [(1, 2)]
    assert await either.numbers(node="end-1") == []
    assert parse(SeenGap, json.dumps((await either.lines())[0])).gap.last == 4
    # It numbers on after its gaps.
    again = Camera(either.running, either.node_id, either.incarnation, OTHER_SPOOL)
    assert (await again.send(seen(40)))["behind"] == {"gate": {"first": 40, "highest": 40}}


async def test_many_observations_are_listed_page_by_page(gate: Camera) -> None:
    for first in range(1, 2001, 500):
        await gate.send(*[seen(number) for number in range(first, first + 500) if number % 7])
    assert await gate.numbers() == [number for number in range(1, 2001) if number % 7]
    assert await gate.numbers(after=1990) == [1990 + rest for rest in range(1, 11) if (1990 + rest) % 7]


async def test_a_time_label_counts_if_it_is_possible(gate: Camera) -> None:
    now = time.time()
    labels = {1: now + 1e6, 2: 1e9, 3: None, 4: now - 500.0}
    await gate.send(*[seen(number, age_s=100.0, taken_at=label) for number, label in labels.items()])

    async def times() -> list[float]:
        return [datetime.fromisoformat(line["taken_at"]).timestamp() - now for line in await gate.lines()]

    assert await times() == pytest.approx([-100, -100, -100, -500], abs=5)
    # A device that did not know the time knows it later; the others keep theirs.
    await gate.send(*[seen(number, revision=1, age_s=200.0, taken_at=now - 700.0) for number in labels])
    assert await times() == pytest.approx([-100, -100, -700, -500], abs=5)


async def test_wrong_batches_are_refused_whole(gate: Camera) -> None:
    wrong = [
        (seen(2, local=local(20)), "observations[1] (gate 2): local.label is 20, and there are 20 superclasses"),
        (seen(2, finer=finer(100)), "observations[1] (gate 2): finer.label is 100, and there are 100 classes"),
        (seen(2, finer={**finer(), "tier": "end"}), "finer.tier must be edge or cloud"),
        (seen(1, name="other.jpg"), "observations[1] (gate 1): the batch has another picture with this number"),
        (seen(0), "sequence"),
        (seen(2**60), "sequence"),
        (seen(2, source="Gate\n"), "source"),
        (seen(2, age_s=-1.0), "age_s"),
        (seen(2, local={**local(), "confidence": 1.5}), "confidence"),
        (seen(2, colour="red"), "colour"),
        (seen(2, local=local(2**40)), "label"),
    ]
    for observation, message in wrong:
        reply = await gate.try_send(seen(1), observation)
        assert (reply.status_code, message in reply.json()["error"]) == (400, True), reply.text
    for gap in ({"source": "gate", "first": 5, "last": 4}, {"source": "gate", "first": 0, "last": 4}):
        assert (await gate.try_send(seen(1), gaps=[gap])).status_code == 400
    text = json.dumps(gate.batch(seen(1)))
    for body in (b"", b"{", b"[]", text.replace("0.5", "NaN").encode(), b"\xff" + text.encode(), b"[" * 100_000):
        assert (await gate.post(body)).status_code == 400
    assert await gate.lines() == []


async def test_a_batch_may_be_packed_and_bombs_and_huge_bodies_are_refused(gate: Camera) -> None:
    batch = json.dumps(gate.batch(seen(1))).encode()
    packed = {"content-encoding": "gzip"}
    assert (await gate.post(gzip.compress(batch), **packed)).status_code == 200
    bomb = gzip.compress(batch + b" " * 17 * 1024**2)
    assert (await gate.post(bomb, **packed)).status_code == 413
    assert (await gate.post(batch, **packed)).status_code == 400
    assert (await gate.post(gzip.compress(batch)[:-9], **packed)).status_code == 400
    assert (await gate.post(batch, **{"content-encoding": "br"})).status_code == 415

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1024**2

    with contextlib.suppress(httpx.TransportError):  # it is refused while it comes
        reply = await gate.running.http.post("/v1/observations", content=endless())
        assert reply.status_code == 413
    assert await gate.numbers() == [1]


async def test_batches_are_measured(gate: Camera) -> None:
    async def measured() -> dict[str, float]:
        page = (await gate.running.http.get("/metrics")).text
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = await measured()
    status = {"sources": [{"name": "gate", "state": "running"}, {"name": "door", "state": "paused"}]}
    await gate.send(seen(1), seen(2, age_s=99.0), device={**status, "spool_bytes": 5, "spool_size_bytes": 10})
    await gate.send(seen(2, age_s=99.0), seen(1, revision=1), seen(3))
    after = await measured()
    rises = {name: after[name] - before.get(name, 0.0) for name in after}
    assert [rises[f'terrace_observations_total{{kind="{kind}"}}'] for kind in ("new", "amended", "known")] == [3, 1, 1]
    assert rises["terrace_observation_batches_total"] == 2
    assert rises["terrace_observation_bytes_total"] > 500
    assert rises["terrace_observation_age_seconds_count"] == 3
    assert rises["terrace_observation_age_seconds_sum"] == pytest.approx(101.0)
    of_gate = '{node_id="end-0",source="gate"}'
    assert after[f"terrace_source_running{of_gate}"] == 1
    assert after[f"terrace_source_heard_timestamp_seconds{of_gate}"] == pytest.approx(time.time(), abs=60)
    door = '{node_id="end-0",source="door"}'
    shown = {f"terrace_source_running{door}", f"terrace_source_heard_timestamp_seconds{door}"} & after.keys()
    assert shown == set(), "it is paused, and was never heard"
    assert after['terrace_device_spool_bytes{node_id="end-0"}'] == 5


async def test_a_node_must_have_its_place(scheduler: Any, kit: Any) -> None:
    gate = await camera(scheduler, kit)
    assert (await Camera(scheduler, "end-9", gate.incarnation).try_send(seen(1))).status_code == 404
    assert (await Camera(scheduler, "end-0", "f" * 16).try_send(seen(1))).status_code == 409

    async def given_up() -> bool:
        return bool((await gate.running.http.get("/v1/devices")).json()["devices"][0]["health"] == "dead")

    await wait_for(given_up, what="the silent node to be dead")
    assert (await gate.try_send(seen(1))).status_code == 404
    assert await gate.lines() == []


async def test_many_batches_at_a_time_are_stored_once_each(either: Camera, kit: Any) -> None:
    cameras = [either, *[await camera(either.running, kit, f"end-{number}", lease_s=600.0) for number in range(1, 5)]]
    batches = [(each, [seen(first + step) for step in range(10)]) for each in cameras for first in range(1, 101, 10)]
    receipts = await asyncio.gather(*[each.send(*batch) for each, batch in batches * 2])
    assert sum(receipt["stored"] for receipt in receipts) == 500
    assert sum(receipt["known"] for receipt in receipts) == 500
    for each in cameras:
        assert await each.numbers(node=each.node_id) == list(range(1, 101))


async def test_a_node_has_a_bounded_number_of_sources(gate: Camera) -> None:
    for first in range(0, 256, 64):
        await gate.send(*[seen(1, source=f"s{first + step}") for step in range(64)])
    reply = await gate.try_send(seen(1, source="more"))
    assert (reply.status_code, "too many sources" in reply.json()["error"]) == (400, True)
    assert (await gate.send(seen(2, source="s0")))["stored"] == 1


def picture(shade: int = 0, kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(file, kind)
    return file.getvalue()


async def test_the_latest_pictures_of_a_source_are_kept(either: Camera) -> None:
    http = either.running.http
    url = "/v1/observations/end-0/gate/{}/picture".format
    await either.send(*[seen(number) for number in range(1, 104)])
    for number in range(1, 104):
        kind = ("JPEG", "PNG", "WEBP")[number % 3]
        reply = await http.put(url(number), content=picture(number, kind))
        assert reply.status_code == 204, reply.text
    assert (await http.put(url(103), content=picture(103, "PNG"))).status_code == 204  # again
    kept = [line["sequence"] for line in await either.lines() if line["picture"]]
    assert kept == list(range(4, 104))
    found = await http.get(url(103))
    assert (found.content, found.headers["content-type"]) == (picture(103, "PNG"), "image/png")
    assert found.headers["x-content-type-options"] == "nosniff"
    assert (await http.get(url(3))).status_code == 404
    assert (await http.put(url(999), content=picture())).status_code == 404
    for content, code in ((b"", 415), (b"GIF89a", 415), (b"<html>", 415), (picture()[:30], 400)):
        assert (await http.put(url(50), content=content)).status_code == code
    assert (await http.get(url(50))).content == picture(50, "WEBP")


async def test_a_reader_that_hangs_up_frees_what_it_read(gate: Camera) -> None:
    await gate.send(*[seen(number) for number in range(1, 1001)])
    async with (
        gate.running.http.stream("GET", "/v1/observations/export") as reply,
        aclosing(reply.aiter_lines()) as lines,
    ):
        assert json.loads(await anext(lines))["sequence"] == 1
    assert await gate.numbers(after=999) == [1000]


async def pages(gate: Camera, **query: Any) -> list[list[int]]:
    """Sequence numbers, page by page."""
    found: list[list[int]] = []
    while True:
        reply = await gate.running.http.get("/v1/observations", params=query)
        assert reply.status_code == 200, reply.text
        page = parse(ObservationPage, reply.content)
        found.append([each.sequence for each in page.observations])
        if page.next_cursor is None:
            return found
        query["cursor"] = page.next_cursor


async def test_pages_show_the_newest_picture_first(gate: Camera) -> None:
    await gate.send(*[seen(number, age_s=100.0 - number) for number in range(1, 8)])
    await gate.send(seen(8, age_s=500.0))
    assert await pages(gate) == [[7, 6, 5, 4, 3, 2, 1, 8]]
    assert await pages(gate, limit=3) == [[7, 6, 5], [4, 3, 2], [1, 8]]
    first = await gate.running.http.get("/v1/observations", params={"limit": 3})
    await gate.send(seen(9, age_s=0.0), seen(5, revision=1, finer=finer()), seen(2, revision=1, finer=finer()))
    after = {"limit": 9, "cursor": first.json()["next_cursor"]}
    assert await pages(gate, **after) == [[4, 3, 2, 1, 8]], "what comes meanwhile moves nothing"
    for cursor in ("x", "W10", "", "MTIz", "A" * 500):
        assert (await gate.running.http.get("/v1/observations", params={"cursor": cursor})).status_code == 400


async def test_observations_are_found_by_their_content(gate: Camera) -> None:
    since = time.time() - 45
    await gate.send(*[seen(number, local=local(number % 20, number / 100)) for number in range(1, 41)])
    await gate.send(seen(41, finer=finer(7)), seen(42, age_s=90.0, local=local(4, 0.99)))
    await gate.send(seen(3, revision=1, local=local(3, 0.03), finer=finer(8)))
    await gate.send({"source": "yard", "sequence": 1, "age_s": 1.0, "reason": "truncated"})
    for wanted, numbers in (
        ({"label": FINE[7]}, [41]),
        ({"label": COARSE[4]}, [3, 4, 24, 41, 42]),
        ({"label": COARSE[4], "below": 0.3}, [4, 24]),
        ({"below": 0.045}, [1, 2, 4]),
        ({"below": 0}, []),
        ({"amended": True}, [3]),
        ({"source": "yard"}, [1]),
        ({"source": "attic"}, []),
        ({"node": "end-0", "source": "gate", "label": FINE[8]}, [3]),
        ({"label": COARSE[4], "since": datetime.fromtimestamp(since, UTC).isoformat()}, [3, 4, 24, 41]),
    ):
        assert sorted(itertools.chain(*await pages(gate, **wanted))) == numbers, wanted
        assert sorted(await gate.numbers(**wanted)) == numbers, wanted
    for path in ("/v1/observations", "/v1/observations/export", "/v1/observations/events"):
        reply = await gate.running.http.get(path, params={"label": f"{FINE[7]}s"})
        assert (reply.status_code, FINE[7] in reply.json()["error"]) == (404, True)
        for bad in ({"below": 2}, {"since": "0.5"}, {"since": "2026-01-01"}, {"amended": "often"}, {"colour": "red"}):
            assert (await gate.running.http.get(path, params=bad)).status_code in (400, 422)


async def test_a_table_for_spreadsheets(gate: Camera) -> None:
    hostile = '=HYPERLINK("http://x")'
    await gate.send(
        seen(1, name=hostile, finer=finer(), unsure=True), seen(2), gaps=[{"source": "gate", "first": 3, "last": 9}]
    )
    await gate.send({"source": "gate", "sequence": 10, "age_s": 1.0, "reason": "truncated"})
    reply = await gate.running.http.get("/v1/observations/export", params={"format": "csv", "bom": True})
    assert reply.headers["content-type"] == "text/csv; charset=utf-8"
    assert reply.content.startswith(b"\xef\xbb\xbf")
    first, second, third = csv.DictReader(io.StringIO(reply.content.decode("utf-8-sig")))
    assert (first["name"], first["unsure"], first["answered_by"]) == (f"'{hostile}", "true", "cloud")
    assert (first["label"], first["fine_label"], first["coarse_label"]) == (FINE[7], FINE[7], COARSE[1])
    assert (first["sent_form"], first["sent_upload_bytes"], first["fine_coarse_label"]) == ("pixels", "3321", COARSE[4])
    assert (second["label"], second["fine_label"], second["waits"]) == (COARSE[2], "", "false")
    assert (third["label"], third["damaged"], third["sequence"]) == ("", "truncated", "10")
    assert datetime.fromisoformat(first["taken_at"]).tzinfo is not None


class Events:
    """The events of a stream of the scheduler, one by one."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self) -> tuple[str, int | None, Any]:
        """Kind, number and data of the next one."""
        event: dict[str, str] = {}
        async for line in self._lines:
            name, _, value = line.partition(": ")
            if line and name:
                event[name] = value
            elif "data" in event:
                number = event.get("id")
                return event["event"], None if number is None else int(number), json.loads(event["data"])
            else:
                event = {}
        raise AssertionError("the stream has ended")


@contextlib.asynccontextmanager
async def events(running: Any, path: str, headers: dict[str, str] | None = None, **query: Any) -> AsyncIterator[Events]:
    async with running.http.stream("GET", path, params=query, headers=headers or {}) as reply:
        assert reply.status_code == 200
        yield Events(reply.aiter_lines())


async def test_readers_follow_what_comes_and_continue_where_they_were(either: Camera) -> None:
    running, path = either.running, "/v1/observations/events"
    await either.send(seen(1))
    async with events(running, path) as all_of_it, events(running, path, label=FINE[7]) as sevens:
        assert (await all_of_it.next())[0] == (await sevens.next())[0] == "begin"
        await either.send(*[seen(number) for number in range(2, 5)])
        assert [(await all_of_it.next())[2]["sequence"] for _ in range(3)] == [2, 3, 4]
        await either.send(seen(2, revision=1, finer=finer()))
        kind, at, data = await all_of_it.next()
        assert (kind, data["sequence"], data["label"]) == ("amended", 2, FINE[7])
        kind, _, data = await sevens.next()
        assert (kind, data["sequence"]) == ("amended", 2)
    for first in (5, 553):
        await either.send(*[seen(number) for number in range(first, min(first + 548, 1100))])
    async with events(running, path, {"Last-Event-ID": str(at)}) as continued:
        assert await continued.next() == ("begin", at, {})
        missed = [await continued.next() for _ in range(1095)]
        assert [data["sequence"] for _, _, data in missed] == list(range(5, 1100))
        numbers = [number or 0 for _, number, _ in missed]
        assert numbers == sorted(set(numbers))
        await either.send(seen(2000))
        assert (await continued.next())[2]["sequence"] == 2000
    reply = await running.http.get(path, headers={"Last-Event-ID": "latest"})
    assert reply.status_code == 400


async def test_what_each_source_saw_last_is_shown(gate: Camera, kit: Any) -> None:
    running = gate.running

    async def listed() -> dict[str, Any]:
        """Sources by name, made again for the state of now."""
        async with events(running, "/v1/sources/events") as snapshots:
            kind, _, data = await snapshots.next()
        assert kind == "snapshot"
        return {each["source"]: each for each in data["sources"]}

    async def shows(name: str, **fields: Any) -> bool:
        found = (await listed()).get(name, {})
        return {key: found.get(key) for key in fields} == fields

    assert (await running.http.get("/v1/sources")).json() == {"sources": []}
    device = {
        "sources": [{"name": "gate", "state": "running"}, {"name": "yard", "state": "waiting", "reason": "refused"}],
        "waiting_pictures": 3,
        "spool_bytes": 1000,
        "spool_size_bytes": 50_000_000,
        "bytes_per_day": 5_000_000,
    }
    await gate.send(seen(1), seen(2, finer=finer()), device=device)
    await wait_for(lambda: shows("gate", state="running", waiting_pictures=3, health="alive"), what="the list")
    found = await listed()
    assert (found["gate"]["last"]["sequence"], found["gate"]["last"]["label"]) == (2, FINE[7])
    assert 0 <= found["gate"]["heard_s"] < 60
    assert (found["yard"]["state"], found["yard"]["reason"]) == ("waiting", "refused")
    assert (found["yard"]["last"], found["yard"]["heard_s"]) == (None, None)
    await gate.send(seen(1, revision=1, finer=finer(3)))
    await running.http.put("/v1/observations/end-0/gate/2/picture", content=picture(2))
    await gate.send(device={"sources": [{"name": "gate", "state": "paused"}]})
    await wait_for(lambda: shows("gate", state="paused", last_picture=2, bytes_per_day=None), what="the picture")
    found = await listed()
    assert (found["gate"]["last"]["sequence"], found["gate"]["last"]["picture"]) == (2, True)
    assert "yard" not in found, "it has sent nothing, and its device has it no longer"


async def test_the_list_of_sources_outlives_the_scheduler(kit: Any, settings: Any, database_url: str) -> None:
    settings = settings.model_copy(update={"database": database_url})
    async with kit.scheduler(settings) as running:
        before = await camera(running, kit, lease_s=600.0)
        lost = {"source": "yard", "first": 2, "last": 9}
        await before.send(seen(1), seen(2), seen(1, source="yard"), gaps=[lost])
        await running.http.put("/v1/observations/end-0/gate/1/picture", content=picture(1))
        await running.http.put("/v1/sources/end-0/gate/rights", json={"owner": "anna", "readers": ["ben", "anna"]})
    async with kit.scheduler(settings) as running:
        gate, yard = (await running.http.get("/v1/sources")).json()["sources"]
        only = {"node": "end-0", "source": "yard"}
        assert (await running.http.get("/v1/sources", params=only)).json()["sources"][0]["source"] == "yard"
        for nothing in ({"node": "end-1"}, {"source": "attic"}, {**only, "source": "attic"}):
            assert (await running.http.get("/v1/sources", params=nothing)).json() == {"sources": []}
        assert (gate["last"]["sequence"], gate["last_picture"], gate["last"]["picture"]) == (2, 1, False)
        assert (gate["owner"], gate["readers"]) == ("anna", ["ben"])
        assert (yard["source"], yard["last"]) == ("yard", None), "its highest number was lost"


async def test_pictures_in_small(gate: Camera) -> None:
    await gate.send(seen(1), seen(2))
    http, url = gate.running.http, "/v1/observations/end-0/gate/1/picture"
    large = io.BytesIO()
    Image.new("RGB", (64, 48)).save(large, "PNG")
    await http.put(url, content=large.getvalue())
    reply = await http.get(url, params={"size": 16})
    assert reply.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(reply.content)).size == (16, 12)
    assert "immutable" in reply.headers["cache-control"]
    for bad in (0, 513, "large"):
        assert (await http.get(url, params={"size": bad})).status_code in (400, 422)
