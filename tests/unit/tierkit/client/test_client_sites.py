"""The client's calls about sites against scripted answers of a scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.tierkit.client.test_client import FAST, FakeApi, answer, api
from tests.unit.tierkit.client.test_client_observations import query_of
from tierkit.client import AsyncClient, SiteNow
from tierkit.errors import NotFound
from tierkit.types import Share, SiteHealth, Tier

__all__ = ["api"]


def site(name: str, **changes: Any) -> dict[str, Any]:
    counts = {"end": 3, "edge": 1}
    return {
        "site": name,
        "share": "cloud",
        "health": "ok",
        "reason": "",
        "nodes": counts,
        "alive": counts,
        "a_later_field": 1,
        **changes,
    }


async def test_sites_are_listed_and_shown(api: FakeApi) -> None:
    api.on("GET /v1/sites", answer({"sites": [site("shop-1"), site("shop-2", share="none")]}))
    api.on("GET /v1/sites/shop-2", answer(site("shop-2", share="none", health="coarse", n_map=2)))
    async with AsyncClient(api.url, backoff=FAST) as client:
        first, second = await client.sites()
        assert (first.site, first.nodes, second.share) == ("shop-1", {Tier.END: 3, Tier.EDGE: 1}, Share.NONE)
        shop = await client.site("shop-2")
        assert isinstance(shop, SiteNow)
        assert (shop.health, shop.n_map) == (SiteHealth.COARSE, 2)
        with pytest.raises(NotFound, match="no site"):
            await client.site("../devices")


async def test_a_whole_site_is_drained_resumed_removed_and_forgotten(api: FakeApi) -> None:
    changed = answer({"nodes": ["a", "b"]})
    api.on("POST /v1/sites/shop-1/drain", None, changed)
    api.on("DELETE /v1/sites/shop-1/drain", changed)
    api.on("DELETE /v1/sites/shop-1", changed, answer({"nodes": []}))
    async with AsyncClient(api.url, backoff=FAST) as client:
        assert await client.drain_site("shop-1") == ("a", "b")
        assert await client.resume_site("shop-1") == ("a", "b")
        assert await client.remove_site("shop-1") == ("a", "b")
        assert await client.remove_site("shop-1", forget=True) == ()
    assert [query_of(request.target) for request in api.requests[-2:]] == [{}, {"forget": "true"}]


async def test_calls_name_a_site_where_they_are_about_one(api: FakeApi) -> None:
    api.on("GET /v1/devices", answer({"devices": []}))
    api.on("GET /v1/sources", answer({"sources": []}))
    api.on("GET /v1/jobs", answer({"jobs": []}))
    api.on("GET /v1/mapping", answer({}))
    api.on("GET /v1/fleet", answer({}))
    api.on("GET /v1/observations", answer({"observations": []}))
    api.on("POST /v1/jobs")
    async with AsyncClient(api.url, backoff=FAST) as client:
        await client.devices(site="shop-1")
        await client.sources(site="shop-1")
        await client.jobs(site="shop-1")
        await client.mapping(site="shop-1")
        await client.fleet(site="shop-1")
        await client.observation_page(site="shop-1")
        with pytest.raises(NotFound):
            await client.submit(np.zeros((1, 32, 32, 3), np.uint8), site="shop-1")
    assert [query_of(request.target)["site"] for request in api.requests] == ["shop-1"] * 7
