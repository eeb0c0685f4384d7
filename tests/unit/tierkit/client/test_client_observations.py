"""The client's calls about observations and sources against scripted answers of a scheduler."""

from __future__ import annotations

import json
import os
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.unit.tierkit.client.test_client import FAST, FakeApi, Reply, answer, api, event, ndjson
from tierkit.client import AsyncClient, Backoff, SeenGap, SeenPicture, SourceRights
from tierkit.errors import NotFound, UpstreamUnavailable

__all__ = ["api"]

EVENTS = "GET /v1/observations/events"
EXPORT = "GET /v1/observations/export"


def seen(sequence: int, **changes: Any) -> dict[str, Any]:
    return {"node": "pi-1", "source": "gate", "sequence": sequence, "a_later_field": 1, **changes}


def query_of(target: str) -> dict[str, str]:
    return {name: value for name, (value,) in parse_qs(urlsplit(target).query).items()}


async def test_the_sources_are_listed_and_shared(api: FakeApi) -> None:
    known = {"node": "pi-1", "source": "gate", "owner": "anna", "health": "alive", "last": seen(7)}
    api.on("GET /v1/sources", answer({"sources": [known]}))
    api.on("PUT /v1/sources/pi-1/gate/rights", None, answer({"owner": "anna", "readers": ["ben"]}))
    async with AsyncClient(api.url, backoff=FAST) as client:
        (source,) = await client.sources()
        assert (source.owner, source.last) == ("anna", SeenPicture(**seen(7)))
        rights = await client.set_rights("pi-1", "gate", owner="anna", readers=["ben"])
        assert rights == SourceRights(owner="anna", readers=("ben",))
        with pytest.raises(NotFound, match="no source"):
            await client.set_rights("pi-1", "../x", owner=None, readers=())
    assert json.loads(api.requests[-1].body) == {"owner": "anna", "readers": ["ben"]}


async def test_filters_become_parameters(api: FakeApi, tmp_path: Path) -> None:
    api.on(
        "GET /v1/observations", answer({"observations": [seen(2)], "next_cursor": "c"}), answer({"observations": []})
    )
    lines = ndjson({"gap": {"node": "pi-1", "source": "gate", "first": 1, "last": 3}}, seen(4))
    api.on(EXPORT, Reply(body=lines), Reply(body=b"\xef\xbb\xbfnode\r\n"))
    since = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    async with AsyncClient(api.url, backoff=FAST) as client:
        page = await client.observation_page(
            limit=5, source="gate", label="fish & co", since=since, below=0.5, amended=True
        )
        assert [each.sequence for each in page.observations] == [2]
        assert await client.observation_page(cursor=page.next_cursor, amended=False, node=None) is not None
        gap, first = [each async for each in client.observations(node="pi-1", after=0)]
        await client.save_observations(tmp_path / "seen.csv", format="csv", bom=True, after=9, node="pi-1")
    assert isinstance(gap, SeenGap)
    assert first == SeenPicture(**seen(4))
    assert os.listdir(tmp_path) == ["seen.csv"]
    filtered, *others = (query_of(request.target) for request in api.requests)
    assert datetime.fromisoformat(filtered.pop("since")) == since
    assert filtered == {"limit": "5", "source": "gate", "label": "fish & co", "below": "0.5", "amended": "true"}
    assert others == [
        {"limit": "100", "cursor": "c"},
        {"format": "jsonl", "node": "pi-1"},
        {"format": "csv", "bom": "true", "node": "pi-1", "after": "9"},
    ]


async def test_a_file_of_observations_appears_whole_or_not_at_all(api: FakeApi, tmp_path: Path) -> None:
    api.on(EXPORT, Reply(body=ndjson(seen(1)), cut=True))
    async with AsyncClient(api.url, backoff=FAST) as client:
        with pytest.raises(UpstreamUnavailable):
            await client.save_observations(tmp_path / "seen.jsonl")
    assert os.listdir(tmp_path) == []


async def test_observations_are_followed_over_restarts_of_the_scheduler(api: FakeApi) -> None:
    first = event(3, "later kind", {}) + event(5, "observation", seen(1)) + event(6, "amended", seen(1, revision=1))
    api.on(EVENTS, Reply(body=first, cut=True), None, Reply(body=event(9, "observation", seen(2)), cut=True))
    api.on(EVENTS, Reply(body=event(10, "observation", seen(3)), silent=True))
    numbers = []
    async with (
        AsyncClient(api.url, backoff=FAST) as client,
        aclosing(client.follow_observations(source="gate", below=0.5)) as events,
    ):
        async for each in events:
            numbers.append((each.sequence, each.revision))
            if each.sequence == 3:
                break
    assert numbers == [(1, 0), (1, 1), (2, 0), (3, 0)]
    assert [request.headers.get("last-event-id") for request in api.requests] == [None, "6", "6", "9"]
    assert {request.target for request in api.requests} == {"/v1/observations/events?source=gate&below=0.5"}


async def test_a_quiet_stream_outlasts_one_outage_after_the_other(api: FakeApi) -> None:
    # Each outage takes most of the patience. A comment shows that the scheduler was back in between.
    patient = Backoff(attempts=1, first_s=0.001, cap_s=0.002, outage_s=0.2)
    quiet = Reply(body=b": waiting\n\n", cut=True)
    api.on(EVENTS, *[quiet] * 200, Reply(body=event(1, "observation", seen(1)), silent=True))
    async with AsyncClient(api.url, backoff=patient) as client, aclosing(client.follow_observations()) as events:
        assert (await anext(events)).sequence == 1


async def test_a_picture_comes_as_a_file(api: FakeApi) -> None:
    api.on("GET /v1/observations/pi-1/gate/7/picture", Reply(body=b"\xff\xd8\xff"), Reply(body=b"\xff\xd8\xff"))
    async with AsyncClient(api.url, backoff=FAST) as client:
        assert await client.picture("pi-1", "gate", 7) == b"\xff\xd8\xff"
        await client.picture("pi-1", "gate", 7, size=64)
    assert [query_of(request.target) for request in api.requests] == [{}, {"size": "64"}]
