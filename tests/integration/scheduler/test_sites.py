"""A fleet of several sites at a real scheduler: jobs, retries, rights, and changes of a whole site."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tierkit.access.tokens import TokenEntry, digest_of, new_token, write_book
from tierkit.testing import wait_for


@dataclass
class Shops:
    """Two shops with two end devices and an edge node each, and a cloud node of no site."""

    running: Any
    ends: dict[str, Any]

    def used(self, site: str) -> set[str]:
        """Upstream nodes that the tasks of a shop's devices named."""
        return {
            node for name, end in self.ends.items() if f"-{site}-" in name for route in end.routes for node in route
        }

    def tasks(self, site: str) -> list[str]:
        return [task for name, end in self.ends.items() if f"-{site}-" in name for task in end.tasks]


@asynccontextmanager
async def shops(kit: Any, settings: Any, **more: Any) -> AsyncIterator[Shops]:
    async with kit.scheduler(settings.model_copy(update=more)) as running, AsyncExitStack() as stack:
        ends = {}
        for site in ("a", "b"):
            running.sites |= {f"{node}-{site}-{n}": site for node in ("end", "edge") for n in range(2)}
        await stack.enter_async_context(kit.uppers(running, "edge-a-0", "edge-b-0", "cloud-0"))
        for name in ("end-a-0", "end-a-1", "end-b-0", "end-b-1"):
            ends[name] = await stack.enter_async_context(kit.end(running, name))
        yield Shops(running, ends)


SCHEMES = ["mapping", "end-edge", "adaptive"]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_job_of_a_site_runs_there_and_nowhere_else(kit, settings, scheme):
    async with shops(kit, settings) as fleet:
        job = await fleet.running.submit(kit.images(200), batch_size=10, scheme=scheme, site="a")
        ended = await fleet.running.finished(job["id"])
        assert (ended["site"], ended["answered_fine"]) == ("a", 200)
        assert len(fleet.tasks("a")) == 20
        assert fleet.tasks("b") == []
        assert fleet.used("a") <= {"edge-a-0", "cloud-0"}
        assert {result["site"] for result in await fleet.running.results(job["id"])} == {"a"}


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_job_of_no_site_uses_all_and_pictures_go_up_within_their_site(kit, settings, scheme):
    async with shops(kit, settings) as fleet:
        job = await fleet.running.submit(kit.images(400), batch_size=10, scheme=scheme)
        ended = await fleet.running.finished(job["id"])
        assert (ended["site"], ended["answered_fine"]) == (None, 400)
        for site in ("a", "b"):
            assert fleet.tasks(site)
            assert fleet.used(site) <= {f"edge-{site}-0", "cloud-0"}
        assert {result["site"] for result in await fleet.running.results(job["id"])} == {"a", "b"}


async def test_a_failed_task_of_a_site_is_tried_again_in_that_site(kit, settings):
    async def breaks(end: Any, task_id: str, upstreams: Any, lines: Any) -> Any:
        return kit.json_response({"error": "out of memory"}, 500) if end.node_id == "end-a-0" else lines

    async with shops(kit, settings) as fleet:
        fleet.ends["end-a-0"].script = breaks
        job = await fleet.running.submit(kit.images(60), batch_size=10, site="a")
        assert (await fleet.running.finished(job["id"]))["answered_fine"] == 60
        assert fleet.ends["end-a-0"].tasks
        assert fleet.tasks("b") == []


async def test_a_job_waits_for_the_devices_of_its_site_and_no_other_takes_it(kit, settings):
    async with shops(kit, settings) as fleet:
        for name in ("end-a-0", "end-a-1"):
            assert (await fleet.running.http.post(f"/v1/devices/{name}/drain")).status_code == 204
        job = await fleet.running.submit(kit.images(20), batch_size=10, site="a")

        async def waits() -> bool:
            return "of the site a" in (await fleet.running.job(job["id"]))["reason"]

        await wait_for(waits, what="the reason")
        assert fleet.tasks("b") == []
        answer = await fleet.running.http.post(
            "/v1/classify",
            content=kit.tensor_body(kit.images(1))[0],
            headers=kit.tensor_body(kit.images(1))[1],
            params={"site": "a"},
        )
        assert answer.status_code == 503
        assert "site a" in answer.json()["error"]
        assert (await fleet.running.http.delete("/v1/sites/a/drain")).status_code == 200
        assert (await fleet.running.finished(job["id"]))["answered_coarse"] == 20


async def test_nothing_of_a_site_that_shares_nothing_goes_to_the_cloud(kit, settings):
    async with shops(kit, settings, share=("none",), n_map=2) as fleet:
        assert (await fleet.running.http.delete("/v1/devices/edge-a-0")).status_code == 204
        job = await fleet.running.submit(kit.images(40), batch_size=10, site="a")
        ended = await fleet.running.finished(job["id"])
        assert (ended["answered_coarse"], ended["answered_fine"], ended["fallback"]) == (40, 0, 40)
        assert all("the site a" in result["fallback"] for result in await fleet.running.results(job["id"]))
        assert fleet.used("a") == set()
        (site_a, _) = (await fleet.running.http.get("/v1/sites")).json()["sites"]
        assert (site_a["health"], site_a["share"]) == ("coarse", "none")
        assert "share = none" in site_a["reason"]
        # A job of no site goes to the other shop, whose devices get fine answers.
        before = len(fleet.tasks("a"))
        for scheme in SCHEMES:
            whole = await fleet.running.submit(kit.images(40), batch_size=10, scheme=scheme)
            assert (await fleet.running.finished(whole["id"]))["answered_fine"] == 40
        assert fleet.used("b") == {"edge-b-0"}
        assert len(fleet.tasks("a")) == before


async def test_edge_nodes_of_other_sites_answer_when_the_own_one_is_gone_if_a_site_shares_them(kit, settings):
    async with shops(kit, settings, share=("cloud", "a=sites")) as fleet:
        job = await fleet.running.submit(kit.images(40), batch_size=10, site="a", scheme="end-edge")
        await fleet.running.finished(job["id"])
        assert {route[0] for end in ("end-a-0", "end-a-1") for route in fleet.ends[end].routes} == {"edge-a-0"}
        assert (await fleet.running.http.delete("/v1/devices/edge-a-0")).status_code == 204
        for scheme in ("end-edge", "adaptive"):
            fleet.ends["end-a-0"].routes.clear()
            fleet.ends["end-a-1"].routes.clear()
            job = await fleet.running.submit(kit.images(40), batch_size=10, site="a", scheme=scheme)
            assert (await fleet.running.finished(job["id"]))["answered_fine"] == 40
            assert "edge-b-0" in fleet.used("a")
        # Site b keeps to the rule of all.
        assert (await fleet.running.http.delete("/v1/devices/edge-b-0")).status_code == 204
        assert (await fleet.running.http.delete("/v1/devices/edge-a-0/drain")).status_code in (204, 404)
        job = await fleet.running.submit(kit.images(20), batch_size=10, site="b")
        await fleet.running.finished(job["id"])
        assert fleet.ends["end-b-0"].routes[-1] == ("cloud-0",)


async def test_a_hedge_stays_in_the_site_of_its_straggler(kit, settings):
    hangs = asyncio.Event()

    async def slow(end: Any, task_id: str, upstreams: Any, lines: Any) -> Any:
        if task_id.endswith("-59"):
            await hangs.wait()
        return lines

    async with shops(kit, settings, hedge=True, window=1) as fleet:
        for name in ("end-a-0", "end-a-1"):
            fleet.ends[name].script = slow
        job = await fleet.running.submit(kit.images(60), batch_size=1, site="a")

        async def hedged() -> bool:
            attempts = (await fleet.running.http.get(f"/v1/jobs/{job['id']}/attempts")).json()["attempts"]
            return any(each["hedge"] for each in attempts)

        await wait_for(hedged, what="the hedge")
        hangs.set()
        assert (await fleet.running.finished(job["id"]))["answered_coarse"] == 60
        assert fleet.tasks("b") == []


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/classify"])
async def test_an_unknown_site_is_refused_with_the_known_ones(kit, settings, path):
    async with shops(kit, settings) as fleet:
        body, headers = kit.tensor_body(kit.images(1))
        for site in ("c", "A b"):
            answer = await fleet.running.http.post(path, content=body, headers=headers, params={"site": site})
            assert answer.status_code == 400, answer.text
        answer = await fleet.running.http.post(path, content=body, headers=headers, params={"site": "c"})
        assert "known are a, b" in answer.json()["error"]


async def test_what_is_asked_of_one_site_is_of_that_site(kit, settings):
    async with shops(kit, settings) as fleet:
        http = fleet.running.http

        async def get(path: str, **query: Any) -> Any:
            answer = await http.get(path, params=query)
            assert answer.status_code == 200, answer.text
            return answer.json()

        devices = (await get("/v1/devices", site="a"))["devices"]
        assert {each["node_id"] for each in devices} == {"end-a-0", "end-a-1", "edge-a-0"}
        shown = await get("/v1/fleet", site="a")
        assert {node["node_id"] for node in shown["nodes"]} == {"end-a-0", "end-a-1", "edge-a-0", "cloud-0"}
        assert ([each["site"] for each in shown["sites"]], shown["site"]) == (["a"], "a")
        assert {(link["end"], link["upper"]) for link in shown["links"] if link["mapped"]} == {
            ("end-a-0", "edge-a-0"),
            ("end-a-1", "cloud-0"),
        }
        whole = await get("/v1/fleet")
        assert {node["site"] for node in whole["nodes"]} == {"a", "b", None}
        mapping = await get("/v1/mapping", site="b")
        assert [pair["end"] for pair in mapping["pairs"]] == ["end-b-0", "end-b-1"]
        assert mapping["formulas"]["figures"]["N_cloud"] == 0.5
        assert mapping["theta_cloud"] == 0.5
        every = await get("/v1/mapping", scheme="adaptive")
        assert len(every["pairs"]) == 4
        assert [(each["site"], each["cloud_nodes"]) for each in every["sites"]] == [("a", 0.5), ("b", 0.5)]
        job = await fleet.running.submit(kit.images(2), site="a")
        await fleet.running.finished(job["id"])
        assert [each["id"] for each in (await get("/v1/jobs", site="a"))["jobs"]] == [job["id"]]
        assert (await get("/v1/jobs", site="b"))["jobs"] == []

        async def told() -> set[str | None]:
            return {event["site"] for event in (await get("/v1/history", site="a"))["events"]}

        await wait_for(lambda: _is(told, {"a"}), what="the events")
        for path in ("/v1/devices", "/v1/fleet", "/v1/mapping", "/v1/history", "/v1/sources", "/v1/fleet/events"):
            assert (await http.get(path, params={"site": "c"})).status_code == 404, path


async def _is(told: Any, wanted: set[str]) -> bool:
    return bool(await told() == wanted)


async def test_a_whole_site_is_drained_resumed_removed_and_forgotten(kit, settings):
    async with shops(kit, settings) as fleet:
        http, own = fleet.running.http, ["edge-a-0", "end-a-0", "end-a-1"]

        async def health() -> tuple[str, str]:
            found = (await http.get("/v1/sites")).json()["sites"]
            return tuple(each["health"] for each in found)

        assert await health() == ("ok", "ok")
        assert (await http.post("/v1/sites/a/drain")).json() == {"nodes": own}
        assert await health() == ("drained", "ok")
        fleet.running.sites["edge-a-1"] = "a"
        await fleet.running.register("edge-a-1", "edge")
        (late,) = [
            each
            for each in (await http.get("/v1/devices", params={"site": "a"})).json()["devices"]
            if each["node_id"] == "edge-a-1"
        ]
        assert late["health"] == "draining"
        assert (await http.delete("/v1/devices/edge-a-1")).status_code == 204
        assert (await http.delete("/v1/devices/edge-a-1", params={"forget": True})).status_code == 204
        job = await fleet.running.submit(kit.images(20), batch_size=10)
        assert (await fleet.running.finished(job["id"]))["answered_coarse"] == 20
        assert fleet.tasks("a") == []
        assert (await http.delete("/v1/sites/a/drain")).json() == {"nodes": own}
        assert await health() == ("ok", "ok")
        assert (await http.delete("/v1/sites/a", params={"forget": True})).json() == {"nodes": []}
        assert (await http.delete("/v1/sites/a")).json() == {"nodes": own}
        assert await health() == ("down", "ok")
        refused = await http.post("/v1/devices", json={**kit.registration("end-a-9"), "site": "a"})
        assert (refused.status_code, "terrace sites resume a" in refused.json()["error"]) == (403, True)
        assert (await http.delete("/v1/sites/a", params={"forget": True})).json() == {"nodes": own}
        assert (await http.post("/v1/sites/c/drain")).status_code == 404


async def test_a_site_and_what_is_wanted_with_it_outlast_its_nodes_and_the_scheduler(kit, settings):
    async with kit.scheduler(settings) as running:
        for site in ("a", "b"):
            running.sites[f"end-{site}"] = site
            incarnation = await running.register(f"end-{site}", "end")
            leaves = await running.http.delete(f"/v1/devices/end-{site}", params={"incarnation": incarnation})
            assert leaves.status_code == 204
        assert (await running.http.post("/v1/sites/a/drain")).json() == {"nodes": []}
        shown = (await running.http.get("/v1/sites")).json()["sites"]
        assert [(each["site"], each["health"]) for each in shown] == [("a", "down"), ("b", "down")]
        job = await running.submit(kit.images(2), site="a")
        assert (await running.http.delete(f"/v1/jobs/{job['id']}")).status_code == 200
    async with kit.scheduler(settings) as running:
        running.sites["end-a"] = "a"
        await running.register("end-a", "end")
        (device,) = (await running.http.get("/v1/devices")).json()["devices"]
        assert device["health"] == "draining"
        assert (await running.http.delete("/v1/sites/b", params={"forget": True})).json() == {"nodes": []}
        assert [each["site"] for each in (await running.http.get("/v1/sites")).json()["sites"]] == ["a"]


async def test_a_job_of_all_sites_leaves_out_one_that_cannot_encode_even_with_reassign(kit, settings):
    async with shops(kit, settings) as fleet:
        for edge in ("edge-a-0", "cloud-0"):
            assert (await fleet.running.http.delete(f"/v1/devices/{edge}")).status_code == 204
        job = await fleet.running.submit(kit.images(60), batch_size=10, recovery="reassign", scheme="mapping")
        ended = await fleet.running.finished(job["id"])
        assert (ended["answered_fine"], fleet.tasks("a")) == (60, [])


async def test_tokens_are_limited_to_sites(kit, settings, tmp_path):
    texts = {name: new_token() for name in ("admin", "berta", "carl", "nodes-a", "nodes")}
    rights: dict[str, dict[str, Any]] = {
        "admin": {"role": "admin"},
        "berta": {"role": "user", "sites": ("a",)},
        "carl": {"role": "user", "sites": ("a", "b")},
        "nodes-a": {"role": "node", "nodes": ("*",), "sites": ("a",)},
        "nodes": {"role": "node", "nodes": ("*",)},
    }
    book = [TokenEntry(name=name, sha256=digest_of(texts[name].encode()).hex(), **of) for name, of in rights.items()]
    tokens = tmp_path / "tokens.toml"
    tokens.touch(mode=0o600)
    tokens.write_text(write_book(book))

    def held_by(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {texts[name]}"}

    async with kit.scheduler(settings.model_copy(update={"tokens": tokens})) as running:
        http: httpx.AsyncClient = running.http

        async def register(name: str, node_id: str, site: str | None) -> httpx.Response:
            place = {**kit.registration(node_id, node_id.split("-")[0]), "site": site}
            return await http.post("/v1/devices", json=place, headers=held_by(name))

        assert (await register("nodes-a", "end-1", None)).status_code == 200
        assert (await register("nodes-a", "end-2", "b")).status_code == 403
        assert (await register("nodes", "end-3", "b")).status_code == 200
        assert (await register("nodes", "cloud-1", None)).status_code == 200
        assert (await register("nodes", "edge-1", None)).status_code == 200
        every = (await http.get("/v1/devices", headers=held_by("admin"))).json()["devices"]
        sites = {each["node_id"]: each["site"] for each in every if each["health"] != "dead"}
        assert sites == {"end-1": "a", "end-3": "b", "cloud-1": None, "edge-1": None}

        async def sees(name: str) -> set[str]:
            shown = (await http.get("/v1/devices", headers=held_by(name))).json()["devices"]
            in_map = (await http.get("/v1/fleet", headers=held_by(name))).json()
            assert {node["node_id"] for node in in_map["nodes"]} == {each["node_id"] for each in shown}
            assert {each["site"] for each in in_map["sites"]} <= {node["site"] for node in in_map["nodes"]}
            return {each["node_id"] for each in shown}

        assert await sees("berta") == {"end-1", "cloud-1"}
        assert await sees("carl") == {"end-1", "end-3", "cloud-1"}
        assert [each["site"] for each in (await http.get("/v1/sites", headers=held_by("berta"))).json()["sites"]] == [
            "a"
        ]
        assert (await http.get("/v1/sites/b", headers=held_by("berta"))).status_code == 403
        assert (await http.get("/v1/mapping", headers=held_by("berta"))).json()["pairs"][0]["end"] == "end-1"
        assert (await http.get("/metrics", headers=held_by("berta"))).status_code == 403
        assert (await http.get("/metrics", headers=held_by("nodes-a"))).status_code == 403
        assert (await http.get("/metrics", headers=held_by("nodes"))).status_code == 200
        assert (await http.post("/v1/sites/a/drain", headers=held_by("berta"))).status_code == 403

        body, own = kit.tensor_body(kit.images(1))

        async def submit(name: str, **policy: str) -> httpx.Response:
            return await http.post("/v1/jobs", content=body, headers={**own, **held_by(name)}, params=policy)

        assert (await submit("berta")).json()["site"] == "a"
        assert (await submit("berta", site="b")).status_code == 403
        assert (await submit("carl")).status_code == 400
        assert (await submit("carl", site="b")).json()["site"] == "b"
        assert (await submit("admin")).json()["site"] is None
