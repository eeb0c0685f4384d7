"""Kept pictures that a device gives to an edge node, and to nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.kept.page import PageEnd, SentPicture, read_page
from tests.integration.end_node.aids import PixelModel, serve_upper
from tests.integration.end_node.observing import RunningNode, SaidScheduler, observing, png, said_scheduler
from tests.integration.end_node.test_keeping import LEARNING, labelled, routed, settled
from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.testing import wait_for
from tierkit.wire.messages import Encoding

GIVES: dict[str, Any] = LEARNING | {"learn": {"size": "4MB", "pictures_to": ["edge"]}}
EDGE, OTHER_EDGE, NO_TIER, TWO_TIERS, CLOUD, ANNA, OLGA = TOKENS = [new_token() for _ in range(7)]
RIGHTS: tuple[dict[str, Any], ...] = (
    {"name": "edge-1", "role": "node", "tiers": ("edge",)},
    {"name": "edge-2", "role": "node", "tiers": ("edge",)},
    {"name": "edge-3", "role": "node"},
    {"name": "edge-4", "role": "node", "tiers": ("edge", "end")},
    {"name": "cloud-1", "role": "node", "tiers": ("cloud",)},
    {"name": "anna", "role": "user"},
    {"name": "olga", "role": "operator"},
)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def book(folder: Path) -> Path:
    path = folder / "tokens.toml"
    path.touch(mode=0o600)
    entries = zip(TOKENS, RIGHTS, strict=True)
    path.write_text(write_book(TokenEntry(sha256=digest_of(token.encode()).hex(), **each) for token, each in entries))
    return path


@asynccontextmanager
async def world(folder: Path, **values: Any) -> AsyncIterator[tuple[RunningNode, SaidScheduler, httpx.AsyncClient]]:
    """A device with a scheduler and an edge node that gets pixels; requests are a user's unless they say otherwise."""
    given = {"tokens": book(folder), **GIVES, **values}
    async with (
        said_scheduler() as (scheduler, url),
        serve_upper(PixelModel("fine", 4)) as upper,
        httpx.AsyncClient(timeout=20, trust_env=False, headers=bearer(ANNA)) as http,
    ):
        routed(scheduler, upper)
        async with observing(folder / "spool", http, url, **given) as node:
            await wait_for(lambda: node.node.uplink.route is not None)
            yield node, scheduler, http


async def keep(node: RunningNode, scheduler: SaidScheduler, *labels: int) -> None:
    """Let the device keep pictures."""
    for label in labels:
        assert (await node.push(png(label))).status_code == 201
    await settled(scheduler, len(labels))
    keeping = node.node.keeping
    assert keeping is not None
    await wait_for(lambda: keeping.state.pictures == len(labels))


async def ask(
    node: RunningNode, http: httpx.AsyncClient, token: str = EDGE, **query: int
) -> tuple[list[SentPicture], PageEnd]:
    answer = await http.get(f"{node.url}/v1/kept/pictures", params=query, headers=bearer(token))
    assert answer.status_code == 200, answer.text
    return read_page(answer.content, query.get("after", 0))


async def test_the_edge_node_gets_the_pictures_that_it_answered(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, scheduler, http):
        await keep(node, scheduler, 1, 2, 3)
        scheduler.labels = [labelled(1, 2, 0)]
        await wait_for(lambda: node.node.keeping is not None and node.node.keeping.state.labelled == 1)
        pictures, end = await ask(node, http)
        assert [content for _, _, content in pictures] == [png(1), png(2), png(3)]
        assert [picture.sequence for _, picture, _ in pictures] == [1, 2, 3]
        assert {(picture.tier, picture.node_id, picture.form) for _, picture, _ in pictures} == {
            ("edge", "edge-1", "pixels")
        }
        second = pictures[1][1]
        assert (second.person, second.person_name, second.person_at) == (0, None, None), "names stay on the device"
        assert (end.more, end.withheld) == (False, 0)
        # In pages, to the end and past it.
        first, more = await ask(node, http, limit=2)
        assert (len(first), more.more) == (2, True)
        rest, last = await ask(node, http, after=more.after)
        assert ([*first, *rest], last.more) == (pictures, False)
        assert (await ask(node, http, after=last.after))[0] == []


async def test_another_node_of_the_tier_gets_none(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, scheduler, http):
        await keep(node, scheduler, 1, 2)
        pictures, end = await ask(node, http, OTHER_EDGE)
    assert (pictures, end.withheld, end.more) == ([], 2, False)


async def test_a_node_that_gets_features_by_now_gets_no_pictures(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, scheduler, http):
        await keep(node, scheduler, 1, 2)
        hidden = Encoding(name="fine.conv1", head="a" * 64, tail="b" * 64)
        (trusted,) = scheduler.route.upstreams
        changed = {"version": f"{2:016x}", "upstreams": (trusted.model_copy(update={"encoding": hidden}),)}
        scheduler.route = scheduler.route.model_copy(update=changed)
        wanted = scheduler.route.version
        await wait_for(lambda: node.node.uplink.route is not None and node.node.uplink.route.version == wanted)
        pictures, end = await ask(node, http)
    assert (pictures, end.withheld) == ([], 2)


async def test_no_picture_leaves_a_device_whose_fleet_learns_no_more(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, scheduler, http):
        await keep(node, scheduler, 1)
        scheduler.route = scheduler.route.model_copy(update={"version": f"{2:016x}", "learn": False})
        await wait_for(lambda: node.node.uplink.route is not None and not node.node.uplink.route.learn)
        answer = await http.get(f"{node.url}/v1/kept/pictures", headers=bearer(EDGE))
    assert (answer.status_code, "--learn" in answer.text) == (403, True)


async def test_who_may_ask(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, scheduler, http):
        await keep(node, scheduler, 1)
        statuses = {EDGE: 200, NO_TIER: 403, TWO_TIERS: 403, CLOUD: 403, ANNA: 403, OLGA: 403, new_token(): 401}
        for token, status in statuses.items():
            answer = await http.get(f"{node.url}/v1/kept/pictures", headers=bearer(token))
            assert answer.status_code == status, answer.text
            assert png(1) not in answer.content or status == 200
        # The token of a node opens this and nothing else.
        for method, path in (
            ("GET", "/v1/sources"),
            ("GET", "/v1/kept"),
            ("GET", "/v2/models/coarse"),
            ("POST", "/v1/tasks/one"),
            ("POST", "/v1/sources/gate/pictures"),
            ("GET", "/v1/kept/pictures/"),
        ):
            answer = await http.request(method, node.url + path, headers=bearer(EDGE))
            assert answer.status_code == 403, path


@pytest.mark.parametrize(
    ("values", "status", "words"),
    [
        (LEARNING, 403, "pictures_to"),
        ({"learn": {"size": "4MB", "pictures_to": ["cloud"]}}, 403, "pictures_to"),
        ({"learn": None}, 404, "[learn]"),
        ({"tokens": None}, 403, "--tokens"),
    ],
    ids=["nobody", "another tier", "nothing kept", "open to all"],
)
async def test_a_device_gives_nothing_unless_its_settings_say_so(
    values: dict[str, Any], status: int, words: str, tmp_path: Path
) -> None:
    async with world(tmp_path, **values) as (node, _, http):
        answer = await http.get(f"{node.url}/v1/kept/pictures", headers=bearer(EDGE))
    assert (answer.status_code, words in answer.text) == (status, True)


async def test_kept_pictures_leave_only_in_the_hours_of_the_uplink(tmp_path: Path) -> None:
    opens = datetime.now() + timedelta(hours=5)
    closes = opens + timedelta(hours=2)
    hours = f"{opens:%H:%M}-{closes:%H:%M}"
    async with world(tmp_path, uplink={"hours": hours}) as (node, _, http):
        answer = await http.get(f"{node.url}/v1/kept/pictures", headers=bearer(EDGE))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 1


@pytest.mark.parametrize("query", ["limit=0", "limit=201", "limit=x", "after=-1", "after=1e3", "after=9" * 30, "a=1"])
async def test_a_wrong_question_is_refused(query: str, tmp_path: Path) -> None:
    async with world(tmp_path) as (node, _, http):
        answer = await http.get(f"{node.url}/v1/kept/pictures?{query}", headers=bearer(EDGE))
    assert answer.status_code == 400


async def test_one_node_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path) as (node, scheduler, http):
        await keep(node, scheduler, 1)
        keeping = node.node.keeping
        assert keeping is not None
        real, seen = keeping.page, []

        async def slow(*given: Any) -> bytes:
            seen.append(await http.get(f"{node.url}/v1/kept/pictures", headers=bearer(EDGE)))
            return await real(*given)

        monkeypatch.setattr(keeping, "page", slow)
        pictures, _ = await ask(node, http)
        assert len(pictures) == 1
        assert seen[0].status_code == 503
        monkeypatch.setattr(keeping, "page", real)
        assert len((await ask(node, http))[0]) == 1
