"""`terrace train improve` on a fleet of real processes: from kept pictures to a canary, and killed at every step."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.hierarchy import Hierarchy
from models.kept.sample import KeptPicture
from models.kept.store import KeptStore
from models.manifest import load_manifest
from terrace.cli import run as terrace
from terrace.improve_state import ImproveState, ImproveWish
from terrace.improving import Goal, Improving
from tests.integration.fleet.test_releases import BLIND, Fleet, end_of, fleet, make_set
from tests.model_sets import COLOURS, colour_pictures, coloured
from tierkit.atomic import alone_in
from tierkit.client import AsyncClient, Client
from tierkit.errors import Conflict, DataError, DeadlineExceeded, Forbidden, InvalidInput, NotFound, SetupError
from tierkit.testing import wait_for
from tierkit.types import Tier

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(300)]

SOURCE = """
[[source]]
name = "door"
url = "{url}"
rate = 100.0

[uplink]
escalate = "all"
pictures_to_scheduler = "all"

[spool]
folder = "{spool}"
"""
TERRACE = (sys.executable, "-P", "-m", "terrace")
DEVICES = 3
TRAINING: dict[str, Any] = {"rounds": 12, "layers": 1, "devices": DEVICES, "rate": 5.0, "batch": 8}


def png(colour: str, strength: int) -> bytes:
    written = io.BytesIO()
    Image.fromarray(coloured(colour, strength=strength)).save(written, "PNG")
    return written.getvalue()


def keep(folder: Path, hierarchy: Hierarchy, number: int) -> Path:
    """Let a device keep pictures of two colours, which the edge answers."""
    store = KeptStore(folder, 10_000_000)
    for sequence in range(1, 25):
        label = (number + sequence % 2) % 3
        content = png(COLOURS[label], 100 + 4 * sequence)
        picture = KeptPicture(
            source="door",
            sequence=sequence,
            taken_at=None,
            sha256=hashlib.sha256(content).hexdigest(),
            release=1,
            local_sha256="0" * 64,
            local=1,
            local_confidence=0.6,
            margin=0.2,
            tier=Tier.EDGE,
            node_id="edge-1",
            upper_sha256="1" * 64,
            label=label,
            confidence=0.9,
            coarse_label=label,
            coarse_confidence=0.9,
            kind="differs" if label != 1 else "sure",
            form="pixels",
            classes=hierarchy.digest,
        )
        assert store.keep(picture, content)
    store.close()
    return folder


@contextlib.asynccontextmanager
async def blind_fleet(folder: Path) -> AsyncIterator[tuple[Fleet, AsyncClient, Path]]:
    """A fleet whose end network takes every colour for green, with tuned thresholds; and labelled pictures."""
    validation = colour_pictures(folder / "validation", each=20)
    models = make_set(folder / "models", end=BLIND)
    tune = ["models", "tune-escalation", "--models", str(models), "--out", str(models), "--dataset", str(validation)]
    assert terrace(tune) == 0
    async with fleet(folder) as (running, client):
        await running.lead(models)
        source = folder / "end.toml"
        source.write_text(SOURCE.format(url=validation, spool=folder / "spool"))
        await asyncio.gather(running.join("edge-1"), running.join_with("end-1", "--config", str(source)))
        yield running, client, validation


async def answered_above(client: AsyncClient, count: int) -> None:
    """Wait until the scheduler has so many pictures with answers from above."""

    async def so_many() -> bool:
        page = await client.observation_page(limit=200)
        return sum(each.picture and each.fine is not None for each in page.observations) >= count

    await wait_for(so_many, what="pictures with answers from above", timeout_s=60)


@contextlib.asynccontextmanager
async def devices(folder: Path, url: str) -> AsyncIterator[None]:
    """Workers that wait for a run, each with its own kept pictures."""
    hierarchy = load_manifest(folder / "models").hierarchy
    started = []
    for number in range(DEVICES):
        kept = keep(folder / f"kept-{number}", hierarchy, number)
        work = (
            "train",
            "work",
            "--scheduler",
            url,
            "--kept",
            str(kept),
            "--name",
            f"device-{number}",
            "--threads",
            "1",
        )
        # The variable is there for other commands. A failure shows what the workers said.
        variables = {**os.environ, "TERRACE_DATA": str(folder)}
        started.append(await asyncio.create_subprocess_exec(*TERRACE, *work, env=variables))
    try:
        yield
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
            await process.wait()


def flags(folder: Path, url: str, validation: Path) -> list[str]:
    names = {"batch": "batch-size"}
    options = [word for name, value in TRAINING.items() for word in (f"--{names.get(name, name)}", str(value))]
    options += ["--validation", str(validation), "--canary", "50%", "--for", "1h", "--json"]
    return ["train", "improve", "--scheduler", url, "--release", "models@1", "--folder", str(folder), *options]


async def command(*words: str, limit: str = "unlimited") -> tuple[int, str]:
    """Run a command that writes no file of more than `limit` KiB, as on a full disk; its exit code and output."""
    shell = ("bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash")
    process = await asyncio.create_subprocess_exec(*shell, *TERRACE, *words, stdout=asyncio.subprocess.PIPE)
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_devices_improve_the_network_of_their_release(tmp_path: Path) -> None:
    async with blind_fleet(tmp_path) as (running, client, validation):
        name = (await client.releases()).in_force
        assert name == "models@1"
        await refusals(running, tmp_path, validation)
        wanted = flags(tmp_path / "improved", running.url, validation)
        await answered_above(client, 60)
        code, _ = await command(*wanted, limit="1")
        assert code == 1
        assert not (tmp_path / "improved" / "improve.json").exists()
        async with devices(tmp_path, running.url):
            code, said = await command(*wanted)
        assert code == 0, said
        outcome = json.loads(said)
        assert (outcome["state"], outcome["new_release"]) == ("released", "models@2")
        assert outcome["figures"]["validation_new"] > outcome["figures"]["validation_old"] + 0.3
        assert outcome["figures"]["above_pictures"] == 60
        assert outcome["figures"]["above_gained"] > 20
        assert outcome["devices"] == DEVICES
        now = await client.releases()
        assert now.rollout is not None
        assert (now.rollout.release, now.rollout.canary) == ("models@2", 0.5)
        assert (await client.release("models@2")).thresholds
        assert end_of(tmp_path / "improved" / "set") != end_of(tmp_path / "models")
        # The same command once more changes nothing; and while a release rolls out, none is improved.
        assert await command(*wanted) == (0, said)
        with pytest.raises(Conflict, match="models@2"):
            await improve(tmp_path / "another", running.url, validation)
        assert len((await client.releases()).releases) == 2


async def improve(
    folder: Path, url: str, validation: Path | None, *, release: str = "models@1", tier: str = "end", **changes: Any
) -> ImproveState:
    def run() -> ImproveState:
        with Client(url) as client:
            goal = Goal(
                validation=None if validation is None else str(validation),
                host={"scheduler": url},
                trial={"canary": 0.5, "for_s": 3600.0},
                **{"within_s": 120.0, **changes},  # a thread that waits for ever would outlive the test
            )
            return Improving(client, folder, ImproveWish(release=release, tier=tier, **TRAINING), goal).run()

    return await asyncio.to_thread(run)


class Killed(BaseException):
    """In place of a signal."""


def lose_answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kill once after each request that changes the releases, before its answer comes; what was killed so far."""
    killed: list[str] = []

    def once(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            answer = real(*given, **more)
            if name not in killed:
                killed.append(name)
                raise Killed
            return answer

        return call

    for name in ("create_release", "start_release"):
        monkeypatch.setattr(Client, name, once(name, getattr(Client, name)))
    return killed


async def test_an_improvement_that_is_killed_at_any_step_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = lose_answers(monkeypatch)
    async with contextlib.AsyncExitStack() as stack:
        running, client, validation = await stack.enter_async_context(blind_fleet(tmp_path))
        told: list[str] = []
        with pytest.raises(DeadlineExceeded):  # without devices
            await improve(
                tmp_path / "improved", running.url, validation, within_s=0.1, told=lambda now: told.append(now.state)
            )
        assert (set(told[:-1]), told[-1]) == ({"training"}, "paused")
        await stack.enter_async_context(devices(tmp_path, running.url))
        seen: list[str] = []

        def die(outcome: ImproveState) -> None:
            """At each news that has not been seen."""
            news = f"{outcome.state}, {outcome.passes}, {outcome.new_release}"
            if news not in seen:
                seen.append(news)
                raise Killed

        for _ in range(12):
            with contextlib.suppress(Killed):
                outcome = await improve(tmp_path / "improved", running.url, validation, told=die)
                break
        assert outcome.state == "released"
        assert len(seen) == 5
        assert killed == ["create_release", "start_release"]
        now = await client.releases()
        assert [each.release for each in now.releases] == ["models@2", "models@1"]
        assert now.rollout is not None


async def refusals(running: Fleet, folder: Path, validation: Path) -> None:
    """Releases and pictures for which nothing is trained, and commands that may not go on."""
    wrong = folder / "wrong"
    (wrong / "violet").mkdir(parents=True)
    (wrong / "violet" / "a.png").write_bytes(png("red", 100))
    damaged = shutil.copytree(validation, folder / "damaged")
    picture = next(damaged.rglob("*.png"))
    picture.write_bytes(picture.read_bytes()[:60])
    for release, tier, pictures, error in (
        ("models@1", "edge", validation, InvalidInput),
        ("models@7", "end", validation, NotFound),
        ("models@1", "end", wrong, DataError),
        ("models@1", "end", damaged, DataError),
        ("models@1", "end", None, InvalidInput),  # its thresholds could not be tuned
    ):
        with pytest.raises(error):
            await improve(folder / "refused", running.url, pictures, release=release, tier=tier)
        assert not (folder / "refused" / "improve.json").exists()
    # Two commands in one folder would write over each other's networks.
    told: list[ImproveState] = []
    with alone_in(folder / "refused"), pytest.raises(SetupError):
        await improve(folder / "refused", running.url, validation, within_s=0.1, told=told.append)
    assert not told

    def forbid(outcome: ImproveState) -> None:
        raise Forbidden("this takes an operator")

    with pytest.raises(Forbidden):  # it could make no release in the end
        await improve(folder / "forbidden", running.url, validation, within_s=0.1, told=forbid)
