"""`terrace models release` against a stub of the scheduler: what it asks for, what it shows, and its exit codes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import typer

from models.manifest import Manifest, load_manifest
from terrace import rollouts
from terrace.cli import run
from terrace.commands.releases import guards_of, share_of
from terrace.release_differences import difference
from terrace.rollouts import limit_text, span_text
from tests.release_stub import GUARDS, ReleaseStub, a_release, a_rollout, stubbed
from tierkit.wire.releases import ReleaseState, RolloutState, TroubleNow

Command = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def stub() -> AsyncIterator[ReleaseStub]:
    async with stubbed() as running:
        running.add(a_release("flowers", 1, ReleaseState.IN_FORCE, origin="/srv/flowers", nodes=5))
        running.add(a_release("flowers", 2, ReleaseState.READY, created_by="olga"))
        yield running


@pytest.fixture
def terrace(stub: ReleaseStub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("TERRACE_SCHEDULER", stub.url)
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr(rollouts, "_EVERY_S", 0.0)

    async def call(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, ["models", "release", *words])
        return code, *capsys.readouterr()

    return call


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines()[2:]]


async def test_releases_are_listed_with_the_change_under_way(terrace: Command, stub: ReleaseStub) -> None:
    code, out, _ = await terrace("list")
    assert code == 0
    assert [row[:2] for row in rows(out)] == [["flowers@2", "ready"], ["flowers@1", "in"]]
    assert "olga" in out
    assert "/srv/flowers" in out
    stub.rollouts = [a_rollout("flowers@2", RolloutState.CANARY, guards=GUARDS, for_s=7200, elapsed_s=600)]
    _, out, _ = await terrace("list")
    assert "trial 10 min of 2 h" in out
    code, out, _ = await terrace("list", "--json")
    assert json.loads(out)["rollout"]["release"] == "flowers@2"


async def test_a_release_is_shown_with_its_troubles_and_guards(terrace: Command, stub: ReleaseStub) -> None:
    trouble = TroubleNow(node_id="shop-7-end-1", kind="room", detail="2 MB free, 4 needed")
    stub.add(a_release("flowers", 2, ReleaseState.CANARY, troubles=(trouble,), encoders=("large.conv1",)))
    stub.rollouts = [
        a_rollout(
            "flowers@2", RolloutState.CANARY, guards=GUARDS, for_s=60, elapsed_s=90, extended=True, device_count=1
        )
    ]
    code, out, _ = await terrace("show", "2")
    assert code == 0
    shown = [line.split() for line in out.splitlines()]
    assert ["end", "small", "coarse", "222222222222", "4.2", "-", "0"] in shown
    assert ["shop-7-end-1", "room", "2", "MB", "free,", "4", "needed"] in shown
    assert "encoders: large.conv1" in out
    assert "share 10.0 % (1 device)" in out
    assert "trial 1 min 30 s of 2 min, extended once" in out
    assert f"agreement: {GUARDS[0].detail}" in out
    (agreement,) = [line for line in out.splitlines() if line.startswith("agreement ")]
    assert " ".join(agreement.split()[:11]) == "agreement 0.97 91.20 % 90.50 % 0.992 0.981 to 1.003 4,200"
    (p99,) = [line for line in out.splitlines() if line.startswith("p99 ")]
    assert "120 of 200" in p99
    (errors,) = [line for line in out.splitlines() if line.startswith("errors ")]
    assert errors.split()[:2] + errors.split()[-1:] == ["errors", "0.5%", "fails"]
    code, out, _ = await terrace("show", "flowers@2", "--json")
    assert set(json.loads(out)) == {"release", "rollout"}
    code, _, err = await terrace("show", "roses@2")
    assert (code, "unknown release 'roses@2'" in err) == (2, True)


async def test_a_trial_is_started_as_the_options_say(terrace: Command, stub: ReleaseStub) -> None:
    code, out, _ = await terrace(
        "start", "flowers@2", "--canary", "12.5%", "--guard", "agreement=0.98", "--guard", "errors=1%", "--for", "30m"
    )
    assert code == 0
    assert out.startswith("flowers@2 is tried on")
    assert "for 30 min (agreement=0.98, errors=1%)" in out
    _, wanted = stub.asked[-1]
    assert (wanted.canary, wanted.guards, wanted.for_s) == (0.125, {"agreement": 0.98, "errors": 0.01}, 1800)
    await terrace("start", "flowers@2")
    _, wanted = stub.asked[-1]
    assert (wanted.canary, wanted.guards, wanted.for_s) == (0.1, {"agreement": 0.97, "p99": 1.3, "errors": 0.005}, 7200)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--canary", "10"], "--canary"),
        (["--canary", "0%"], "--canary"),
        (["--canary", "100%"], "--canary"),
        (["--canary", "1e1%"], "--canary"),
        (["--guard", "speed=1"], "unknown guard 'speed=1'; there are agreement=0.97, p99=1.3x, errors=0.5%"),
        (["--guard", "agreement"], "write it like agreement=0.97"),
        (["--guard", "agreement=97"], "write it like agreement=0.97"),
        (["--guard", "p99=1.3"], "write it like p99=1.3x"),
        (["--guard", "errors=0.5"], "write it like errors=0.5%"),
        (["--guard", "errors=0%"], "write it like errors=0.5%"),
        (["--guard", "p99=nanx"], "write it like p99=1.3x"),
        (["--guard", "p99=2x", "--guard", "p99=3x"], "p99 is given twice"),
        (["--for", "2"], "--for"),
        (["--for", "40d"], "longer than 30 days"),
    ],
)
async def test_wrong_options_are_refused_before_anything_is_asked(
    terrace: Command, stub: ReleaseStub, options: list[str], words: str
) -> None:
    code, _, err = await terrace("start", "flowers@2", *options)
    assert (code, words in err) == (2, True), err
    assert stub.asked == []


def test_limits_are_read_and_written_alike() -> None:
    texts = ["agreement=0.97", "p99=1.3x", "errors=0.5%"]
    assert [f"{name}={limit_text(name, limit)}" for name, limit in guards_of(texts).items()] == texts
    assert guards_of(["agreement=97%"]) == {"agreement": 0.97}
    assert share_of("5%", "--canary") == 0.05
    with pytest.raises(typer.BadParameter):
        guards_of(["p99=-1x"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (45, "45 s"), (60, "1 min"), (5400, "1 h 30 min"), (7200, "2 h"), (90061, "1 d 1 h")],
)
def test_spans(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


@pytest.mark.parametrize(
    ("end", "code"), [(RolloutState.DONE, 0), (RolloutState.ROLLED_BACK, 1), (RolloutState.STOPPED, 1)]
)
@pytest.mark.parametrize("command", ["start", "promote"])
async def test_a_change_is_followed_to_its_end(
    terrace: Command, stub: ReleaseStub, end: RolloutState, code: int, command: str
) -> None:
    stub.rollouts = [
        a_rollout("flowers@2", RolloutState.CANARY, guards=GUARDS),
        a_rollout("flowers@2", RolloutState.CANARY, guards=GUARDS),
        a_rollout("flowers@2", RolloutState.ROLLING, share=0.2, ready=1, wanted=4),
        a_rollout("flowers@2", end, reason="errors: 25.00 % of 400 attempts failed", guards=GUARDS),
    ]
    found, out, err = await terrace(command, "flowers@2", "--follow")
    assert found == code
    assert f"flowers@2  {end}: errors: 25.00 % of 400 attempts failed" in out
    assert err.splitlines()[-1] == "flowers@2 rolling out, share 20.0 %, 1 of 4 nodes hold it"
    assert len(set(err.splitlines())) == len(err.splitlines())


async def test_a_change_that_the_scheduler_has_lost_is_not_followed_for_ever(
    terrace: Command, stub: ReleaseStub
) -> None:
    code, _, err = await terrace("promote", "flowers@2", "--follow")
    assert (code, "terrace models release list" in err) == (1, True)


async def test_two_operators(terrace: Command, stub: ReleaseStub) -> None:
    stub.conflict = "flowers@1 is under way: stop it first"
    code, _, err = await terrace("start", "flowers@2")
    assert code == 1
    assert "flowers@1 is under way" in err


async def test_changes_without_following(terrace: Command, stub: ReleaseStub) -> None:
    for words in (("promote", "flowers@2"), ("stop", "flowers@2"), ("rollback", "flowers@2"), ("rollback",)):
        code, out, _ = await terrace(*words)
        assert code == 0
        assert out.startswith("flowers@1" if words == ("rollback",) else "flowers@2")
    assert [what for what, _ in stub.asked] == ["promote", "stop", "rollback", "rollback"]
    code, out, _ = await terrace("promote", "flowers@2", "--json")
    assert json.loads(out)["state"] == "rolling out"


async def test_pruning_shows_first_and_removes_with_yes(
    terrace: Command, stub: ReleaseStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = await terrace("prune")
    assert (code, stub.asked) == (0, [("prune", True)])
    assert "would remove flowers@1, and 1 network (4.2 MB)" in out
    assert "a" * 64 in out
    assert "--yes" in out
    code, out, _ = await terrace("prune", "--json")
    assert json.loads(out)["dry_run"]
    code, out, _ = await terrace("prune", "--yes")
    assert "removed flowers@1" in out
    assert stub.asked[-1] == ("prune", False)
    stub.pruned = stub.pruned.model_copy(update={"releases": (), "files": (), "bytes": 0})
    code, out, _ = await terrace("prune", "--yes")
    assert out == "nothing to remove\n"


async def test_a_release_is_made_of_the_bundled_set(terrace: Command, stub: ReleaseStub) -> None:
    code, out, _ = await terrace("create", "roses")
    assert code == 0
    assert out.splitlines() == [
        "roses@3: 1 network, 3 classes",
        "try it: terrace models release start roses@3",
    ]
    code, _, err = await terrace("create", "roses", "--models", "nowhere")
    assert (code, "nowhere" in err) == (2, True)


@pytest.fixture(scope="module")
def bundled() -> Manifest:
    return load_manifest()


def changed(manifest: Manifest, **changes: Any) -> Manifest:
    first, *others = manifest.models
    return manifest.model_copy(update={"models": (first.model_copy(update=changes), *others)})


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        ({"sha256": "0" * 64}, "other weights"),
        ({"temperature": 9.0}, "other reading"),
        ({"licence": "MIT"}, "other facts"),
    ],
)
def test_how_a_network_differs(bundled: Manifest, changes: dict[str, Any], change: str) -> None:
    a, b = a_release("t", 1, ReleaseState.IN_FORCE), a_release("t", 2, ReleaseState.READY)
    found = difference(a, bundled, b, changed(bundled, **changes))
    assert [(each.network, each.change) for each in found.networks] == [(bundled.models[0].name, change)]
    assert (found.encoders, found.thresholds, found.classes) == ((), "", "")


def test_thresholds_encoders_and_classes_that_differ(bundled: Manifest) -> None:
    a = a_release("t", 1, ReleaseState.IN_FORCE, thresholds=True)
    b = a_release("t", 2, ReleaseState.READY, thresholds=True)
    assert difference(a, bundled, a, bundled).none
    assert "differ" in difference(a, bundled, b, bundled).thresholds
    without = a_release("t", 3, ReleaseState.READY)
    assert difference(a, bundled, without, bundled).thresholds == "only t@1 has tuned thresholds"
    fewer = bundled.model_copy(update={"encoders": bundled.encoders[1:], "models": bundled.models[:-1]})
    found = difference(a, bundled, b, fewer)
    assert (found.networks[0].change, found.encoders[0].change) == ("removed", "removed")
    back = difference(b, fewer, a, bundled)
    assert (back.networks[0].change, back.encoders[0].change) == ("added", "added")
    content = json.loads(json.dumps(bundled.hierarchy_content).replace("orchid", "iris"))
    other = Manifest.model_validate({**bundled.content(), "hierarchy": content})
    assert difference(a, bundled, b, other).classes == "1 added: iris; 1 removed: orchid"


def test_accuracies_on_different_pictures_are_not_compared(bundled: Manifest) -> None:
    a, b = a_release("t", 1, ReleaseState.IN_FORCE), a_release("t", 2, ReleaseState.READY)
    first = bundled.models[0]

    def said(**changes: Any) -> str:
        return difference(a, bundled, b, changed(bundled, sha256="0" * 64, **changes)).accuracies

    assert first.name in said(coarse_accuracy=0.561, test_images=400)
    assert said(coarse_accuracy=0.561) == ""
    assert said(coarse_accuracy=None, fine_accuracy=None, test_images=0) == ""


async def test_two_releases_are_compared(terrace: Command, stub: ReleaseStub, bundled: Manifest) -> None:
    after = changed(bundled, sha256="0" * 64, size_bytes=1_000_000)
    stub.manifests = {1: bundled.content(), 2: after.content()}
    code, out, _ = await terrace("diff", "1", "flowers@2")
    assert code == 0
    entry = bundled.models[0]
    (row,) = [line.split() for line in out.splitlines() if entry.name in line]
    assert row[:4] == ["end", entry.name, "other", "weights"]
    assert {entry.sha256[:12], "000000000000", "1.0"} < set(row)
    assert row.count(f"{entry.test_images:,}") == 2
    code, out, _ = await terrace("diff", "1", "1")
    assert out == "flowers@1 and flowers@1 have the same content\n"
    code, out, _ = await terrace("diff", "1", "2", "--json")
    (change,) = json.loads(out)["networks"]
    assert change["b"]["sha256"] == "0" * 64
