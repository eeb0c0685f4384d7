"""One connection pool per peer."""

from __future__ import annotations

import httpx

from tierkit.pools import OriginPools


class Pool(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        return httpx.Response(204)

    async def aclose(self) -> None:
        self.closed = True


async def test_each_origin_has_a_pool_of_its_own_and_all_are_closed() -> None:
    made: list[Pool] = []

    def make() -> Pool:
        made.append(Pool())
        return made[-1]

    async with httpx.AsyncClient(transport=OriginPools(make)) as http:
        for url in ("http://a:1/x", "http://b:1/x", "http://a:2/x", "http://a:1/y", "https://a:1/x"):
            await http.get(url)
        assert [pool.asked for pool in made] == [
            ["http://a:1/x", "http://a:1/y"],
            ["http://b:1/x"],
            ["http://a:2/x"],
            ["https://a:1/x"],
        ]
    assert all(pool.closed for pool in made)


async def test_origins_without_end_share_one_pool_in_the_end() -> None:
    made: list[Pool] = []

    def make() -> Pool:
        made.append(Pool())
        return made[-1]

    async with httpx.AsyncClient(transport=OriginPools(make)) as http:
        for number in range(1000):
            await http.get(f"http://node-{number}/")
        await http.get("http://node-1/again")
    assert len(made) == 257
    assert len(made[256].asked) == 744
    assert made[1].asked == ["http://node-1/", "http://node-1/again"]
