"""Learning at the scheduler: labels, disagreements, agreement of audited pictures, and improvements."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from models.hierarchy import bundled_hierarchy
from scheduler.store import learning
from tests.integration.scheduler.test_access import (
    ALICE,
    ANY,
    BOB,
    EVE,
    LAPTOP,
    OLGA,
    bearer,
    closed as closed,
    registration,
    tokens as tokens,
)
from tests.integration.scheduler.test_observations import Camera, camera, finer, gate as gate, local, picture, seen

COARSE, FINE = bundled_hierarchy().coarse, bundled_hierarchy().fine
DIGEST = bundled_hierarchy().digest
ID = "1" * 32


@pytest.fixture
async def either(request: Any, kit: Any, settings: Any, database_url: str) -> AsyncIterator[Camera]:
    """A camera, on each database."""
    async with kit.scheduler(settings.model_copy(update={"database": database_url})) as running:
        yield await camera(running, kit, lease_s=600.0)


def sure(label: int, **changes: Any) -> dict[str, Any]:
    """An answer from above of the superclass 4."""
    return {**finer(), "coarse_label": label, **changes}


async def send_pictures(camera: Camera, *observations: dict[str, Any]) -> None:
    await camera.send(*observations)
    for each in observations:
        path = f"/v1/observations/{camera.node_id}/{each['source']}/{each['sequence']}/picture"
        assert (await camera.running.http.put(path, content=picture(each["sequence"]))).status_code == 204


async def listed(camera: Camera, **query: Any) -> list[int]:
    """Numbers of the pictures, page by page."""
    numbers: list[int] = []
    while True:
        reply = await camera.running.http.get("/v1/learning/pictures", params={"limit": 2, **query})
        assert reply.status_code == 200, reply.text
        numbers += [each["sequence"] for each in reply.json()["observations"]]
        if (cursor := reply.json()["next_cursor"]) is None:
            return numbers
        query["cursor"] = cursor


async def label(camera: Camera, number: int, name: str) -> int:
    path = f"/v1/observations/end-0/gate/{number}/label"
    code: int = (await camera.running.http.put(path, json={"label": name})).status_code
    return code


async def test_the_most_useful_disagreement_comes_first(either: Camera) -> None:
    await send_pictures(
        either,
        seen(1, local=local(4, 0.5), finer=finer(), unsure=True),
        seen(2, local=local(3, 0.5), finer=finer()),
        seen(3, local=local(4, 0.9), finer=finer()),
        seen(4, local=local(4, 0.2), finer=finer(), unsure=True),
        seen(5, local=local(3, 0.9), finer=finer()),
        seen(6, local=local(3, 0.4), unsure=True, waits=True),
        seen(7, local=local(3, 0.7), finer=finer(), source="yard"),
    )
    await either.send(seen(8, local=local(3), finer=finer()))  # a picture that the scheduler does not have
    assert await listed(either) == [5, 7, 2, 4, 1], "neither 3, where all agree, nor 6 without an answer from above"
    assert await listed(either, source="gate") == [5, 2, 4, 1]
    assert await listed(either, which="answered", node="end-0", least=0.9) == [1, 2, 3, 4, 5, 7]
    assert await listed(either, which="answered", least=0.91) == []
    # An answer from above that comes after the picture counts too.
    await either.send(seen(6, local=local(3, 0.4), unsure=True, finer=finer(), revision=1))
    assert await listed(either) == [5, 7, 2, 6, 4, 1]
    for number in (5, 1):
        assert await label(either, number, FINE[3]) == 204
    assert await listed(either) == [7, 2, 6, 4]
    assert await listed(either, which="labelled") == [1, 5]
    http = either.running.http
    for query in ({"cursor": "x"}, {"cursor": "a" * 450}, {"which": "all"}, {"least": 2}, {"color": 1}):
        assert (await http.get("/v1/learning/pictures", params=query)).status_code == 400, query


async def test_the_last_label_counts_and_the_device_hears_of_it(either: Camera) -> None:
    http = either.running.http
    await send_pictures(either, *(seen(number, finer=finer()) for number in (1, 2)))
    news = "/v1/devices/end-0/labels"
    assert (await http.get(news)).json() == {"labels": [], "more": False}
    assert [await label(either, 1, FINE[3]), await label(either, 2, FINE[5]), await label(either, 1, FINE[4])] == [
        204
    ] * 3
    found = (await http.get(news)).json()["labels"]
    assert [(each["sequence"], each["label"], each["classes"]) for each in found] == [(2, 5, DIGEST), (1, 4, DIGEST)]
    line = (await either.lines())[0]
    assert (line["person"], line["person_by"], line["label"]) == (FINE[4], None, FINE[7])
    assert line["person_at"] is not None
    beat = await either.running.beat("end-0", either.incarnation)
    assert int(beat.headers["terrace-labels"]) == found[-1]["number"], "a device without new pictures hears of it, too"
    told = await either.try_send(seen(3))
    assert int(told.headers["terrace-labels"]) == found[-1]["number"]
    path = "/v1/observations/end-0/gate/{}/label".format
    assert (await http.delete(path(1))).status_code == 204
    (back,) = (await http.get(news, params={"after": found[-1]["number"]})).json()["labels"]
    assert (back["sequence"], back["label"]) == (1, None)
    assert (await either.lines())[0]["person"] is None
    assert (await http.delete(path(1))).status_code == 404
    for number, body, code in (
        (3, {"label": FINE[0]}, 404),  # no picture
        (9, {"label": FINE[0]}, 404),
        (1, {"label": "unicorn"}, 422),
        (1, {"label": COARSE[0]}, 422),
        (1, {}, 422),
        (1, {"label": FINE[0], "color": 1}, 422),
    ):
        reply = await http.put(path(number), json=body)
        assert reply.status_code == code, (body, reply.text)
    assert (await http.get("/v1/learning")).json()["labels"] == 1


async def test_labelled_pictures_stay_beyond_the_latest(gate: Camera, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "MOST_LABELLED", 2)
    await send_pictures(gate, *(seen(number, finer=finer()) for number in (1, 2, 3)))
    assert [await label(gate, number, FINE[1]) for number in (1, 2, 3, 2)] == [204, 204, 409, 204]
    await send_pictures(gate, *(seen(number) for number in range(4, 104)))
    there = [line["sequence"] for line in await gate.lines() if line["picture"]]
    assert there == [1, 2, *range(4, 104)]


async def test_a_label_and_what_is_known_outlive_the_scheduler(kit: Any, settings: Any, database_url: str) -> None:
    settings = settings.model_copy(update={"database": database_url})
    async with kit.scheduler(settings) as running:
        first = await camera(running, kit, lease_s=600.0)
        await send_pictures(first, seen(1, local=local(4, 0.9), audit=True, finer=finer()))
        assert await label(first, 1, FINE[3]) == 204
        assert (await running.http.put(f"/v1/improvements/{ID}", json=improvement())).status_code == 200
        before = [(await running.http.get(path)).json() for path in ("/v1/learning", "/v1/improvements")]
        number = (await first.try_send(seen(2))).headers["terrace-labels"]
    async with kit.scheduler(settings) as running:
        again = await camera(running, kit, lease_s=600.0)
        assert [(await running.http.get(path)).json() for path in ("/v1/learning", "/v1/improvements")] == before
        assert (await again.try_send(seen(3))).headers["terrace-labels"] == number


async def test_audited_pictures_show_how_far_the_tiers_agree(gate: Camera) -> None:
    http = gate.running.http

    async def now() -> dict[str, Any]:
        found: dict[str, Any] = (await http.get("/v1/learning")).json()
        return found

    assert await now() == {"nodes": [], "audited": 0, "agreement": None, "labels": 0}
    kept = {"pictures": 2**31 - 1, "differs": 4, "bytes": 5, "size_bytes": 6, "reason": "no room"}
    await gate.send(
        seen(1, local=local(4, 0.9), finer=finer(), audit=True),
        seen(2, local=local(3, 0.9), finer=finer(), audit=True),
        seen(3, local=local(3, 0.9), finer=finer(), audit=True),
        seen(4, local=local(3, 0.9), audit=True, waits=True),
        seen(5, local=local(4, 0.9), finer=finer()),
        device={"kept": kept},
    )
    found = await now()
    assert (found["audited"], found["agreement"]) == (3, pytest.approx(1 / 3))
    (node,) = found["nodes"]
    assert (node["node"], node["audited"], node["kept"]["pictures"]) == ("end-0", 3, 2**31 - 1), "a claim costs nothing"
    # An amended answer replaces the one before.
    await gate.send(seen(2, local=local(3, 0.9), finer=sure(3), audit=True, revision=1))
    assert (await now())["agreement"] == pytest.approx(2 / 3)
    assert REGISTRY.get_sample_value("terrace_tier_agreement") == pytest.approx(2 / 3)
    assert REGISTRY.get_sample_value("terrace_audited_pictures") == 3
    assert REGISTRY.get_sample_value("terrace_device_kept_pictures", {"node_id": "end-0"}) == 2**31 - 1
    for wrong in ({"pictures": -1}, {"pictures": 0.5}, {"color": 1}):
        assert (await gate.try_send(seen(9), device={"kept": wrong})).status_code == 400


def improvement(**changes: Any) -> dict[str, Any]:
    return {
        "id": ID,
        "release": "flowers@7",
        "tier": "end",
        "state": "training",
        "figures": {"validation": 0.5},
        **changes,
    }


async def test_improvements_are_told_and_the_newest_are_kept(gate: Camera) -> None:
    http = gate.running.http
    first = (await http.put(f"/v1/improvements/{ID}", json=improvement())).json()
    again = (await http.put(f"/v1/improvements/{ID}", json=improvement(state="released", figures={}))).json()
    assert (again["created_at"], again["state"], again["figures"]) == (first["created_at"], "released", {})
    assert first["created_at"] == first["told_at"] < again["told_at"]
    assert (await http.put(f"/v1/improvements/{ID}", json=improvement(state="paused"))).status_code == 200
    for wrong in ({"figures": {"a": "x"}}, {"id": "2" * 32}, {"state": "done"}, {"release": "x"}, {"rounds": -1}):
        reply = await http.put(f"/v1/improvements/{ID}", json=improvement(**wrong))
        assert reply.status_code in (400, 422), wrong
    for number in range(100, 200):
        each = f"{number:032x}"
        assert (await http.put(f"/v1/improvements/{each}", json=improvement(id=each))).status_code == 200
    ids = [each["id"] for each in (await http.get("/v1/improvements")).json()["improvements"]]
    assert ids == [f"{number:032x}" for number in range(199, 99, -1)]


async def test_each_labels_what_they_may_see(closed: Any) -> None:
    place = registration("any-1", spool="5" * 16, lease_s=600.0)
    http, own = closed.http, bearer(ANY)
    assert (await http.post("/v1/devices", json=place, headers=own)).status_code == 200
    pictures = [seen(1, source=source, finer=finer()) for source in ("gate", "hall")]
    batch = {"node_id": "any-1", "incarnation": place["incarnation"], "spool": "a" * 16, "observations": pictures}
    assert (await http.post("/v1/observations", json=batch, headers=own)).status_code == 200
    for source in ("gate", "hall"):
        path = f"/v1/observations/any-1/{source}/1/picture"
        assert (await http.put(path, content=picture(), headers=own)).status_code == 204
    rights = {"owner": "alice", "readers": ["bob"]}
    assert (await http.put("/v1/sources/any-1/gate/rights", json=rights, headers=bearer(OLGA))).status_code == 200

    async def call(method: str, token: str, source: str = "gate", name: str = FINE[0]) -> int:
        content = {"json": {"label": name}} if method == "PUT" else {}
        path = f"/v1/observations/any-1/{source}/1/label"
        code: int = (await http.request(method, path, headers=bearer(token), **content)).status_code
        return code

    async def sight(token: str) -> set[str]:
        page = (await http.get("/v1/learning/pictures", headers=bearer(token))).json()["observations"]
        return {each["source"] for each in page}

    assert [await sight(token) for token in (OLGA, ALICE, BOB, EVE)] == [{"gate", "hall"}, {"gate"}, {"gate"}, set()]
    assert [await call("PUT", token) for token in (EVE, LAPTOP, ANY)] == [404, 403, 403]
    assert await call("PUT", ALICE, "hall") == 404
    assert [await call("PUT", ALICE), await call("PUT", BOB, name=FINE[1])] == [204, 204], "the last one counts"
    assert await call("PUT", OLGA, "hall") == 204
    learned = [(await http.get("/v1/learning", headers=bearer(token))).json() for token in (OLGA, ALICE, BOB, EVE)]
    assert [each["labels"] for each in learned] == [2, 1, 1, 0]
    assert await call("DELETE", OLGA, "hall") == 204
    assert [await call("DELETE", ALICE), await call("DELETE", EVE)] == [403, 404], "it is Bob's"
    news = (await http.get("/v1/devices/any-1/labels", headers=own)).json()["labels"]
    assert [(each["label"], each["by"]) for each in news if each["source"] == "gate"] == [(1, "bob")]
    assert [await call("DELETE", BOB), await call("PUT", ALICE), await call("DELETE", OLGA)] == [204] * 3
    assert (await http.get("/v1/devices/any-1/labels", headers=bearer(ALICE))).status_code == 403
    for token, code in ((ALICE, 403), (OLGA, 200)):
        reply = await http.put(f"/v1/improvements/{ID}", json=improvement(), headers=bearer(token))
        assert reply.status_code == code
    assert reply.json()["by"] == "olga"
