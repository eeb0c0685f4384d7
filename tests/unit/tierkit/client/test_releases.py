"""Releases in the client: which files of a model set are sent, and which requests are made."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.release_stub import ReleaseStub, a_release, a_rollout, stubbed
from tierkit.client import AsyncClient, Backoff, Client
from tierkit.errors import Conflict, InvalidInput, NotFound
from tierkit.wire.releases import ReleaseState, RolloutState

NETWORKS = {"small": b"small network" * 100_000, "large": b"large network"}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
async def stub() -> AsyncIterator[ReleaseStub]:
    async with stubbed() as running:
        yield running


@pytest.fixture
async def client(stub: ReleaseStub) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stub.url, backoff=Backoff(attempts=1)) as connected:
        yield connected


def part(name: str) -> dict[str, str]:
    return {"file": f"{name}.onnx", "sha256": digest(NETWORKS[name])}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder as a model set has it, with an encoder that shares its tail's file with a network."""
    for name, content in NETWORKS.items():
        (tmp_path / f"{name}.onnx").write_bytes(content)
    (tmp_path / "head.onnx").write_bytes(b"head")
    head = {"file": "head.onnx", "sha256": digest(b"head")}
    manifest = {
        "models": [{"name": name, **part(name)} for name in NETWORKS],
        "encoders": [{"network": "large", "kind": "conv1", "head": head, "tail": part("large")}],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def tuning(sha256: str) -> dict[str, Any]:
    upper = {"tier": "cloud", "name": "large", "sha256": digest(NETWORKS["large"])}
    return {"gates": [{"lower": {"tier": "end", "name": "small", "sha256": sha256}, "upper": upper}]}


async def test_only_what_the_scheduler_lacks_is_sent_once(client: AsyncClient, stub: ReleaseStub, models: Path) -> None:
    stub.networks[digest(NETWORKS["large"])] = NETWORKS["large"]
    (models / "escalation.json").write_text(json.dumps(tuning(digest(NETWORKS["small"]))))
    made = await client.create_release("flowers", models)
    assert (made.release, made.state) == ("flowers@1", ReleaseState.READY)
    assert stub.networks == {digest(content): content for content in (*NETWORKS.values(), b"head")}
    assert [sha256 for method, sha256 in stub.asked if method == "PUT"] == [digest(NETWORKS["small"]), digest(b"head")]
    _, wanted = stub.asked[-1]
    assert wanted.manifest == json.loads((models / "manifest.json").read_text())
    assert wanted.tuning == tuning(digest(NETWORKS["small"]))


async def test_thresholds_of_other_networks_are_left_out_with_a_warning(
    client: AsyncClient, stub: ReleaseStub, models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (models / "escalation.json").write_text(json.dumps(tuning("0" * 64)))
    await client.create_release("flowers", models)
    assert stub.asked[-1][1].tuning is None
    assert "tune-escalation" in caplog.text


async def test_the_scheduler_s_own_folder_and_a_manifest_need_no_files(client: AsyncClient, stub: ReleaseStub) -> None:
    await client.create_release("flowers")
    assert stub.asked == [("create", stub.asked[0][1])]
    assert stub.asked[0][1].manifest is None
    manifest = {"models": [{"name": "small", **part("small")}]}
    with pytest.raises(Conflict, match="small"):
        await client.create_release("flowers", manifest)
    stub.networks[digest(NETWORKS["small"])] = NETWORKS["small"]
    made = await client.create_release("flowers", manifest, tuning={"gates": []})
    assert made.release == "flowers@2"
    assert await client.release_manifest("flowers@2") == manifest
    assert stub.asked[-1][1].tuning == {"gates": []}


def damage(models: Path) -> None:
    (models / "small.onnx").write_bytes(b"other")


def remove(models: Path) -> None:
    (models / "small.onnx").unlink()


def lead_out(models: Path) -> None:
    (models / "manifest.json").write_text(json.dumps({"models": [{"file": "../secret", "sha256": "0" * 64}]}))


def no_manifest(models: Path) -> None:
    (models / "manifest.json").unlink()


def no_object(models: Path) -> None:
    (models / "manifest.json").write_text("[]")


def no_networks(models: Path) -> None:
    (models / "manifest.json").write_text('{"models": 5}')


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage, "small.onnx is damaged: its sha256 is"),
        (remove, "cannot read .*small.onnx"),
        (lead_out, "'../secret'"),
        (no_manifest, "cannot read .*manifest.json"),
        (no_object, "holds no JSON object"),
        (no_networks, "does not name the files"),
    ],
)
async def test_a_folder_that_is_no_model_set_makes_no_release(
    client: AsyncClient, stub: ReleaseStub, models: Path, harm: Any, words: str
) -> None:
    harm(models)
    with pytest.raises(InvalidInput, match=words):
        await client.create_release("flowers", models)
    assert "create" not in [what for what, _ in stub.asked]


async def test_wrong_names_and_limits_are_refused_before_anything_is_sent(
    client: AsyncClient, stub: ReleaseStub, models: Path
) -> None:
    with pytest.raises(InvalidInput, match="name"):
        await client.create_release("Flowers of spring")
    with pytest.raises(InvalidInput, match="canary"):
        await client.start_release("flowers@1", canary=10)
    with pytest.raises(InvalidInput, match="agreement"):
        await client.start_release("flowers@1", guards={"agreement": -1})
    with pytest.raises(InvalidInput, match="manifest"):
        await client.create_release("flowers", models, tuning={"gates": []})
    with pytest.raises(NotFound):
        await client.release("../devices")
    assert stub.asked == []


async def test_changes_go_to_the_release_that_is_named(client: AsyncClient, stub: ReleaseStub) -> None:
    for number, state in ((1, ReleaseState.RETIRED), (2, ReleaseState.IN_FORCE), (3, ReleaseState.READY)):
        stub.add(a_release("flowers", number, state))
    assert (await client.releases()).in_force == "flowers@2"
    assert (await client.release("3")).release == "flowers@3"
    rollout = await client.start_release("flowers@3", canary=0.2, guards={"p99": 1.5}, for_s=60)
    assert (rollout.release, rollout.state) == ("flowers@3", RolloutState.CANARY)
    _, wanted = stub.asked[-1]
    assert (wanted.canary, wanted.guards, wanted.for_s) == (0.2, {"p99": 1.5}, 60)
    await client.start_release("flowers@3")
    assert set(stub.asked[-1][1].guards) == {"agreement", "p99", "errors"}
    await client.stop_release("3")
    await client.promote_release("3")
    assert [what for what, _ in stub.asked] == ["start", "start", "stop", "promote"]
    with pytest.raises(NotFound, match="flowers@9"):
        await client.promote_release("flowers@9")


async def test_without_a_name_the_change_under_way_is_rolled_back_or_else_the_release_in_force(
    client: AsyncClient, stub: ReleaseStub
) -> None:
    stub.add(a_release("flowers", 1, ReleaseState.IN_FORCE))
    stub.add(a_release("flowers", 2, ReleaseState.CANARY))
    assert (await client.roll_back()).release == "flowers@1"
    stub.rollouts = [a_rollout("flowers@2", RolloutState.CANARY)]
    assert (await client.roll_back()).release == "flowers@2"
    assert (await client.roll_back("flowers@1")).release == "flowers@1"


async def test_nothing_is_pruned_unless_that_is_wanted(client: AsyncClient, stub: ReleaseStub) -> None:
    assert (await client.prune_releases()).dry_run
    assert not (await client.prune_releases(dry_run=False)).dry_run
    assert stub.asked == [("prune", True), ("prune", False)]


async def test_the_blocking_client_does_the_same(stub: ReleaseStub, models: Path) -> None:
    def work() -> str:
        with Client(stub.url) as client:
            made = client.create_release("flowers", models)
            return client.promote_release(made.release).release

    assert await asyncio.to_thread(work) == "flowers@1"
