"""Observations at the scheduler: batches of nodes, their order, gaps, pictures and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import datetime
from typing import Any

import httpx
import pytest
from PIL import Image

from models.hierarchy import bundled_hierarchy
from tierkit.testing import wait_for
from tierkit.wire.api import parse
from tierkit.wire.sources import SeenGap, SeenPicture

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


@pytest.fixture(params=["sqlite", "postgresql"])
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
