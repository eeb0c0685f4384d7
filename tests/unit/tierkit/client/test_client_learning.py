"""Labels, kept pictures and improvements in the client."""

from __future__ import annotations

import json

import pytest

from tests.unit.tierkit.client.test_client import FAST, FakeApi, answer, api
from tests.unit.tierkit.client.test_client_observations import query_of, seen
from tierkit.client import AsyncClient, Improvement
from tierkit.errors import NotFound
from tierkit.types import Tier

__all__ = ["api"]

ID = "1" * 32


async def test_pictures_are_searched_and_labelled(api: FakeApi) -> None:
    labelled = seen(7, person="oak_tree", person_by="anna", person_at="2026-01-02T03:04:05Z")
    api.on("GET /v1/learning/pictures", answer({"observations": [labelled], "next_cursor": "c"}))
    api.on("PUT /v1/observations/pi-1/gate/7/label", answer({}))
    api.on("DELETE /v1/observations/pi-1/gate/7/label", answer({}))
    async with AsyncClient(api.url, backoff=FAST) as client:
        page = await client.picture_page("labelled", limit=5, node="pi-1", least=0.5, site=None)
        (picture,) = page.observations
        assert (picture.person, picture.person_by, page.next_cursor) == ("oak_tree", "anna", "c")
        await client.label("pi-1", "gate", 7, "oak_tree")
        await client.take_label_back("pi-1", "gate", 7)
        with pytest.raises(NotFound):
            await client.label("pi-1", "../x", 7, "oak_tree")
    first, put, _ = api.requests
    assert query_of(first.target) == {"which": "labelled", "limit": "5", "node": "pi-1", "least": "0.5"}
    assert json.loads(put.body) == {"label": "oak_tree"}


async def test_learning_and_improvements(api: FakeApi) -> None:
    node = {"node": "pi-1", "kept": {"pictures": 3, "a_later_field": 1}, "audited": 4, "agreement": 0.75}
    api.on("GET /v1/learning", answer({"nodes": [node], "audited": 4, "agreement": 0.75, "labels": 2}))
    made = Improvement(id=ID, release="flowers@7", tier=Tier.END, state="training", figures={"validation": 0.5})
    stored = {**made.model_dump(mode="json"), "by": "olga", "created_at": "2026-01-02T03:04:05Z"}
    api.on("GET /v1/improvements", answer({"improvements": [stored]}))
    api.on(f"PUT /v1/improvements/{ID}", answer(stored))
    async with AsyncClient(api.url, backoff=FAST) as client:
        now = await client.learning()
        assert now.nodes[0].kept is not None
        assert (now.nodes[0].kept.pictures, now.agreement, now.labels) == (3, 0.75, 2)
        assert await client.put_improvement(made) == (await client.improvements())[0]
    assert json.loads(api.requests[1].body)["figures"] == {"validation": 0.5}
