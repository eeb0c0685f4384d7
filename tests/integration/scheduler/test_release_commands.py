"""`terrace models release` with a real scheduler, whose nodes only register: tests/acceptance has those that answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from models.manifest import load_manifest
from terrace.cli import run
from tests.model_sets import colour_network, colour_set
from tests.receivers import receiving
from tierkit.client import AsyncClient, SinkFilter
from tierkit.testing import wait_for

Command = Callable[..., Awaitable[tuple[int, str, str]]]
TIERS = {"end": ("end-1", "end-2", "end-3"), "cloud": ("cloud-1",)}


@pytest.fixture
def better(tmp_path: Path) -> Path:
    """A model set whose end network is another one than in `flowers`."""
    new = colour_network(tmp_path / "new.onnx", factor=20)
    large = colour_network(tmp_path / "large.onnx", factor=30)
    return colour_set(tmp_path / "better", {"end": new, "cloud": large})


class Nodes:
    """Nodes that hold the networks of some model sets, and say so when they register."""

    def __init__(self, kit: Any, running: Any) -> None:
        self._running = running
        self._places = {name: kit.registration(name, tier) for tier, names in TIERS.items() for name in names}

    async def hold(self, *sets: Path, nodes: tuple[str, ...] | None = None) -> None:
        for name, place in self._places.items():
            if nodes is not None and name not in nodes:
                continue
            entries = [entry for models in sets for entry in load_manifest(models).models]
            versions = {entry.sha256: entry for entry in entries if entry.tier == place["tier"]}
            offers = [
                {"name": each.name, "sha256": each.sha256, "reading": each.reading, "ms_per_image": 1.0}
                for each in versions.values()
            ]
            told = await self._running.http.post("/v1/devices", json={**place, "models": offers, "follows": True})
            assert told.status_code == 200, told.text


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    old = colour_network(tmp_path / "old.onnx", factor=5)
    large = colour_network(tmp_path / "large.onnx", factor=30)
    return colour_set(tmp_path / "flowers", {"end": old, "cloud": large})


@pytest.fixture
async def scheduler(flowers: Path, settings: Any, kit: Any) -> AsyncIterator[Any]:
    """A scheduler of the set `flowers`, with nodes that need no heartbeats."""
    changed = {"models": flowers, "heartbeat_s": 100.0, "lease_s": 600.0, "suspect_s": 500.0}
    changed["sink_allow_private"] = True
    async with kit.scheduler(settings.model_copy(update=changed)) as running:
        yield running


@pytest.fixture
async def nodes(scheduler: Any, kit: Any, flowers: Path) -> Nodes:
    known = Nodes(kit, scheduler)
    await known.hold(flowers)
    return known


@pytest.fixture
def terrace(scheduler: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("TERRACE_SCHEDULER", scheduler.url)
    monkeypatch.setenv("COLUMNS", "250")

    async def call(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, words)
        return code, *capsys.readouterr()

    return call


def states(out: str) -> dict[str, str]:
    """State of each release by its name, from the list as JSON."""
    return {each["release"]: each["state"] for each in json.loads(out)["releases"]}


async def test_a_release_is_made_tried_stopped_promoted_and_taken_back(
    terrace: Command, scheduler: Any, nodes: Nodes, better: Path
) -> None:
    code, out, _ = await terrace("models", "release", "list")
    assert code == 0
    assert out.splitlines()[2].split()[:3] == ["flowers@1", "in", "force"]
    code, out, _ = await terrace("models", "release", "create", "flowers", "--models", str(better))
    assert (code, out.splitlines()[0]) == (0, "flowers@2: 2 networks, 3 classes"), out
    code, out, _ = await terrace("models", "release", "create", "flowers", "--models", str(better), "--json")
    assert json.loads(out)["release"] == "flowers@2", "the same content is the same release"
    code, out, _ = await terrace("models", "release", "diff", "flowers@1", "2")
    (row,) = [line for line in out.splitlines() if "of-end" in line]
    assert "other weights" in row
    assert "of-cloud" not in out

    code, out, err = await terrace("models", "release", "start", "flowers@2", "--canary", "10%", "--for", "1h")
    assert (code, "for 1 h (agreement=0.97, p99=1.3x, errors=0.5%)" in out) == (0, True), err
    code, _, err = await terrace("models", "release", "start", "flowers@2")
    assert code == 1
    assert "flowers@2 is being tried" in err
    code, out, _ = await terrace("models", "release", "show", "flowers@2")
    assert "flowers@2  canary" in out
    assert "(1 device)" in out
    code, out, _ = await terrace("models", "release", "stop", "flowers@2")
    assert (code, "stopped" in out) == (0, True)

    code, out, _ = await terrace("models", "release", "promote", "flowers@2")
    assert (code, "flowers@2  rolling out" in out) == (0, True)
    code, out, _ = await terrace("models", "release", "list", "--json")
    assert states(out) == {"flowers@2": "rolling out", "flowers@1": "in force"}
    code, out, _ = await terrace("models", "list", "--scheduler", scheduler.url)
    assert out.startswith("release in force: flowers@1\n")
    code, out, _ = await terrace("models", "release", "rollback", "--follow")
    assert (code, "flowers@2  rolled back" in out) == (0, True), out
    code, _, err = await terrace("models", "release", "rollback")
    assert (code, "no release was in force before" in err) == (1, True)


async def test_the_steps_of_a_release_are_events(scheduler: Any, nodes: Nodes, better: Path) -> None:
    async with receiving() as receiver, AsyncClient(scheduler.url) as client:
        await client.add_sink("hook", "webhook", {"url": receiver.url}, filter=SinkFilter(events=("release.*",)))
        await client.create_release("flowers", better)
        await client.start_release("flowers@2")
        await client.stop_release("flowers@2")
        await client.promote_release("flowers@2")
        await client.roll_back("flowers@2")
        await wait_for(lambda: len(receiver.bodies) == 4, what="the last step")
        told = [(event["type"], event["data"]["kind"]) for event in receiver.events]
    assert told == [
        ("release.started", "canary"),
        ("release.stopped", "canary"),
        ("release.started", "promote"),
        ("release.rolled_back", "promote"),
    ]
    last = receiver.events[-1]["data"]
    assert (last["release"], last["previous"], last["state"]) == ("flowers@2", "flowers@1", "rolled back")


async def test_what_is_over_is_pruned(terrace: Command, nodes: Nodes, flowers: Path, better: Path) -> None:
    await terrace("models", "release", "create", "flowers", "--models", str(better))
    await terrace("models", "release", "create", "roses", "--models", str(flowers))
    await terrace("models", "release", "start", "2")
    code, out, _ = await terrace("models", "release", "prune")
    assert (code, out) == (0, "nothing to remove\n")
    await terrace("models", "release", "stop", "2")
    code, out, _ = await terrace("models", "release", "prune")
    assert out.startswith("would remove flowers@2, and 1 network ("), "the other one is in both sets"
    entry = next(entry for entry in load_manifest(better).models if entry.tier == "end")
    assert entry.sha256 in out
    code, out, _ = await terrace("models", "release", "prune", "--yes")
    assert out.startswith("removed flowers@2")
    code, out, _ = await terrace("models", "release", "list", "--json")
    assert states(out) == {"roses@3": "ready", "flowers@1": "in force"}
    code, _, err = await terrace("models", "release", "show", "flowers@2")
    assert (code, "flowers@2" in err) == (2, True)


async def test_bad_releases_are_refused(terrace: Command, nodes: Nodes, flowers: Path, better: Path) -> None:
    (better / "of-end.onnx").write_bytes(b"no network")
    code, _, err = await terrace("models", "release", "create", "flowers", "--models", str(better))
    assert (code, "of-end.onnx is damaged" in err) == (2, True), err
    code, _, err = await terrace("models", "release", "create", "Flowers")
    assert (code, "name" in err) == (2, True), err
    code, _, err = await terrace("models", "release", "promote", "flowers@1")
    assert (code, "in force already" in err) == (1, True), err
    code, _, err = await terrace("models", "release", "start", "flowers@9")
    assert (code, "flowers@1" in err) == (2, True), err
    manifest = json.loads((flowers / "manifest.json").read_text())
    manifest["models"] = manifest["models"][:1]
    (flowers / "manifest.json").write_text(json.dumps(manifest))
    code, _, _ = await terrace("models", "release", "create", "half", "--models", str(flowers))
    assert code == 0
    code, _, err = await terrace("models", "release", "start", "half@2")
    assert (code, "no network for the tier cloud, to which cloud-1 belongs" in err) == (1, True), err


async def test_a_job_is_asked_of_a_release(
    terrace: Command, nodes: Nodes, better: Path, tmp_path: Path, kit: Any, scheduler: Any
) -> None:
    await terrace("models", "release", "create", "flowers", "--models", str(better))
    picture = str(Path(__file__).parents[3] / "models" / "weights" / "privacy" / "0.png")
    code, _, err = await terrace("classify", picture, "--release", "flowers@7")
    assert (code, "flowers@7" in err) == (2, True), err
    code, _, err = await terrace("classify", picture, "--release", "2")
    assert (code, "flowers@2 does not answer now, only flowers@1" in err) == (2, True), err


async def test_the_doctor_finds_a_set_that_does_not_answer(
    terrace: Command, nodes: Nodes, flowers: Path, better: Path
) -> None:
    async def found(models: Path) -> dict[str, Any]:
        _, out, _ = await terrace("doctor", "--models", str(models), "--scheduler", nodes._running.url, "--json")
        return {check["name"]: check for check in json.loads(out)["checks"]}

    assert (await found(flowers))["model set"]["verdict"] == "ok"
    check = (await found(better))["model set"]
    assert (check["verdict"], "terrace models release create flowers" in check["advice"]) == ("fail", True)
    await terrace("models", "release", "create", "flowers", "--models", str(better))
    check = (await found(better))["model set"]
    assert (check["verdict"], "terrace models release promote flowers@2" in check["advice"]) == ("fail", True)
    await nodes.hold(flowers, better)
    await terrace("models", "release", "start", "flowers@2", "--for", "1h")
    after = await found(better)
    assert (after["model set"]["verdict"], after["flowers@2"]["verdict"]) == ("note", "ok")
    await terrace("models", "release", "rollback")
    assert "rolled back 0 s ago" in (await found(flowers))["flowers@2"]["detail"]
    await nodes.hold(better, nodes=("end-2",))

    async def behind() -> bool:
        return "does not hold flowers@1" in (await found(flowers))["end-2"]["detail"]

    await wait_for(behind, what="the node without the release in force is noticed")
