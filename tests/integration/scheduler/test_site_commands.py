"""Sites of a real scheduler on the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from terrace.cli import run

Command = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def shops(settings: Any, kit: Any) -> AsyncIterator[Any]:
    """Two shops with two devices and an edge node each, and a cloud node of no site; they need no heartbeats."""
    changed = {"lease_s": 600.0, "suspect_s": 500.0, "share": ("cloud", "shop-10=none", "shop-3=none")}
    async with kit.scheduler(settings.model_copy(update=changed)) as running:
        for site in ("shop-10", "shop-2"):
            for tier, number in (("end", 1), ("end", 2), ("edge", 1)):
                place = {**kit.registration(f"{site}-{tier}-{number}", tier), "site": site}
                assert (await running.http.post("/v1/devices", json=place)).status_code == 200
        await running.register("office", "cloud")
        yield running


@pytest.fixture
def terrace(shops: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("TERRACE_SCHEDULER", shops.url)
    monkeypatch.setenv("COLUMNS", "200")

    async def call(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, words)
        return code, *capsys.readouterr()

    return call


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()[2:]]


async def test_sites_are_listed_in_their_order_and_shown(terrace: Command) -> None:
    code, out, _ = await terrace("sites", "list")
    assert code == 0
    assert [row[:7] for row in rows(out)] == [
        ["shop-2", "ok", "2/2", "1/1", "0.0", "cloud", "all"],
        ["shop-10", "ok", "2/2", "1/1", "0.0", "none", "all"],
    ]
    code, out, _ = await terrace("sites", "list", "--json")
    assert [site["site"] for site in json.loads(out)["sites"]] == ["shop-2", "shop-10"]
    code, out, _ = await terrace("sites", "show", "shop-10")
    assert (code, "shop-10  ok" in out, "share none" in out) == (0, True, True)
    assert [name for name in ("shop-10-end-2", "shop-2-end-2", "office") if name in out] == ["shop-10-end-2"]
    code, out, _ = await terrace("sites", "show", "shop-10", "--json")
    assert len(json.loads(out)["devices"]) == 3
    code, _, err = await terrace("sites", "show", "shop-3")
    assert code == 2
    assert "unknown site 'shop-3'" in err
    assert "shop-10" in err


async def test_a_whole_site_is_drained_resumed_and_removed(terrace: Command) -> None:
    code, out, _ = await terrace("sites", "drain", "shop-2")
    assert (code, out) == (0, "shop-2-edge-1, shop-2-end-1, shop-2-end-2 get no new tasks\n")
    _, out, _ = await terrace("sites", "list")
    assert [row[:2] for row in rows(out)] == [["shop-2", "drained"], ["shop-10", "ok"]]
    code, out, _ = await terrace("sites", "resume", "shop-2", "--json")
    assert len(json.loads(out)["nodes"]) == 3
    code, out, _ = await terrace("sites", "remove", "shop-2", "--forget")
    assert (code, out) == (0, "nothing changed: no node of shop-2 is in a state for it\n")
    code, out, _ = await terrace("sites", "remove", "shop-2")
    assert "'terrace sites resume shop-2' lets them come back" in out
    code, out, _ = await terrace("sites", "remove", "shop-2", "--forget")
    assert (code, out) == (0, "shop-2-edge-1, shop-2-end-1, shop-2-end-2 are off the list\n")
    code, out, _ = await terrace("sites", "list")
    assert [row[0] for row in rows(out)] == ["shop-10"]


async def test_other_commands_take_a_site(terrace: Command) -> None:
    code, out, _ = await terrace("devices", "list")
    assert out.splitlines()[0].split()[:3] == ["node", "site", "tier"]
    assert len(rows(out)) == 7
    code, out, _ = await terrace("devices", "list", "--site", "shop-2")
    assert [row[:2] for row in rows(out)] == [
        ["shop-2-end-1", "shop-2"],
        ["shop-2-end-2", "shop-2"],
        ["shop-2-edge-1", "shop-2"],
    ]
    code, out, _ = await terrace("top", "--site", "shop-2")
    assert (code, "shop-2-end-1" in out, "shop-10-end-1" in out) == (0, True, False)
    assert "sites: 1 ok" in out
    for command in (("devices", "list"), ("jobs", "list"), ("sources", "list"), ("observations",), ("top",)):
        code, out, _ = await terrace(*command, "--site", "shop-2")
        assert code == 0, command
    # Jobs and observations of a site stay when the site has no node any more.
    for command in (("devices", "list"), ("sources", "list"), ("top",), ("classify", "sample")):
        code, _, err = await terrace(*command, "--site", "shop-3")
        assert code == 2, command
        assert "known are shop-2, shop-10" in err


@pytest.mark.parametrize("name", ["../devices", "Shop 2", "s" * 64, "shöp", "a/b", "--"])
async def test_what_is_no_name_of_a_site_is_one_sentence(terrace: Command, name: str) -> None:
    calls: list[tuple[str, ...]] = [("sites", action, "--", name) for action in ("show", "drain", "resume", "remove")]
    calls += [(*command, f"--site={name}") for command in (("devices", "list"), ("jobs", "list"), ("observations",))]
    calls.append(("classify", "sample", f"--site={name}"))
    for words in calls:
        code, out, err = await terrace(*words)
        assert (code, out) == (2, ""), words
        assert err.startswith("terrace: "), words
        assert err.count("\n") == 1, words


async def test_the_doctor_examines_sites(terrace: Command, shops: Any, kit: Any) -> None:
    await shops.register("stray", "end")
    _, out, _ = await terrace("doctor", "--json")
    found = {check["name"]: check for check in json.loads(out)["checks"]}
    assert [found[f"site {name}"]["verdict"] for name in ("shop-2", "shop-10")] == ["ok", "ok"]
    assert found["end nodes without a site"]["detail"] == "stray"
    assert found["site shop-3"]["detail"] == "has the rule shop-3=none and no node"


async def test_a_fleet_without_sites_looks_as_before(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    await scheduler.register("end-1", "end")

    async def shown(*words: str) -> str:
        assert await asyncio.to_thread(run, (*words, "--scheduler", scheduler.url)) == 0
        return capsys.readouterr().out

    assert "no node names a site" in await shown("sites", "list")
    for command in (("devices", "list"), ("top",)):
        assert "site" not in (await shown(*command)).replace(scheduler.url, "")
