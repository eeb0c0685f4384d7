"""Sandblaster L-BFGS over a host: slow and killed workers, a host that is killed, and what is refused at the start."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from terrace.cli import run
from tests.integration.training.conftest import CONFIG, StartHost
from tests.integration.training.test_host import body, head, joined, leased, options, reaches
from tierkit.errors import SetupError
from training.host.opening import open_host
from training.host.settings import HostSettings
from training.local import LocalRun, run_here
from training.messages import RunStatus
from training.worker.node import work

pytestmark = [pytest.mark.train, pytest.mark.anyio]

PASSES, PORTIONS = 12, 3
GIVEN: dict[str, Any] = {"epochs": PASSES, "workers": 2, "max_lease_wait_s": 0.2}


@pytest.fixture
def network(tmp_path: Path) -> Callable[..., Path]:
    """As `conftest.network`, without mirrored images: 5 steps an epoch."""

    def write(epochs: int, hidden: int = 8) -> Path:
        path = tmp_path / "net.toml"
        text = CONFIG.format(epochs=epochs).replace("[8]", f"[{hidden}]")
        path.write_text(text.replace("crop_padding = 0", "crop_padding = 0\nmirror = false\nlabel_smoothing = 0.0"))
        return path

    return write


@pytest.fixture
def strategy(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text('family = "batch"\nperiod = 2\n')
    return str(path)


@pytest.fixture
def by_one(start_host: StartHost, shapes: Path, strategy: str) -> Callable[[int], Awaitable[dict[str, Any]]]:
    """Train this number of passes with one worker; the result."""

    async def train(passes: int) -> dict[str, Any]:
        async with start_host(strategy=strategy, folder="by-one", **{**GIVEN, "epochs": passes}) as running:
            await work(options(running, shapes))
            await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
            assert running.host.result is not None
            return running.host.result

    return train


@pytest.fixture
async def undisturbed(by_one: Callable[[int], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    return await by_one(PASSES)


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(found[name] == expected[name] for name in ("objective", "accuracy", "points", "updates"))


async def test_it_learns(undisturbed: dict[str, Any]) -> None:
    assert undisturbed["updates"] == PASSES * PORTIONS
    assert undisturbed["accuracy"] > 0.9
    assert undisturbed["objective"] < 0.1
    assert 0 < undisturbed["command_bytes"] < 50_000
    assert undisturbed["faults"] == 0


async def test_a_slow_worker_and_one_that_dies_change_no_bit(
    start_host: StartHost, shapes: Path, strategy: str, undisturbed: dict[str, Any]
) -> None:
    async with start_host(strategy=strategy, lease_s=1.0, **GIVEN) as running:
        await joined(running, "dead")
        await leased(running, "dead")  # and is not heard of again
        calls = itertools.count()

        def slow() -> bool:
            """Stop in the middle of the first portion, until the others have done three passes without it."""
            return next(calls) == 0 or running.host._run.totals.updates >= 3 * PORTIONS

        done = await asyncio.gather(
            work(options(running, shapes, "slow", may_work=slow)),
            *(work(options(running, shapes, name)) for name in ("w1", "w2")),
        )
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        found = running.host.result
    assert found is not None
    assert same(found, undisturbed)
    assert sum(each.updates for each in done) == found["updates"]
    assert done[0].faults >= 1


async def test_a_portion_of_an_earlier_pass_comes_late_and_changes_nothing(
    start_host: StartHost, shapes: Path, strategy: str, undisturbed: dict[str, Any]
) -> None:
    async with start_host(strategy=strategy, lease_s=1.0, **GIVEN) as running:
        await joined(running, "old")
        lease, _ = await leased(running, "old")
        working = asyncio.create_task(work(options(running, shapes, "w1")))
        await reaches(running, updates=PORTIONS)
        version = running.host._run.strategy.version
        assert version >= 1
        headers = head(lease, {"worker": "old"})
        answer = await running.http.post("/v1/updates", headers=headers, content=body(running, 5.0))
        assert answer.raise_for_status().json()["verdict"] == "late"
        await working
        await asyncio.wait_for(running.lifecycle.wait_draining(), 30)
        assert running.host.result is not None
        assert same(running.host.result, undisturbed)


async def test_a_host_continues_to_the_bit(
    start_host: StartHost, shapes: Path, strategy: str, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    async with start_host(strategy=strategy, **GIVEN) as running:
        working = asyncio.create_task(work(options(running, shapes, "w1")))
        await reaches(running, updates=4)
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
    before = running.host._run.state()
    kept = HostSettings(
        network=str(tmp_path / "net.toml"),
        folder=tmp_path / "run",
        dataset=str(shapes),
        strategy=strategy,
        **{name: value for name, value in GIVEN.items() if name != "epochs"},
    )
    opened = open_host(kept)
    again = opened._run.state()
    opened._journal.close()
    assert again[1]["strategy"] == before[1]["strategy"]
    assert {name: each.tobytes() for name, each in again[0].items()} == {
        name: each.tobytes() for name, each in before[0].items()
    }
    async with start_host(strategy=strategy, **GIVEN) as second:
        await work(options(second, shapes, "w2"))
        await asyncio.wait_for(second.lifecycle.wait_draining(), 30)
        assert second.host.result is not None
        assert same(second.host.result, undisturbed)


@pytest.mark.timeout(120)
async def test_killed_processes_change_no_bit(
    network: Callable[..., Path],
    shapes: Path,
    tmp_path: Path,
    strategy: str,
    by_one: Callable[[int], Awaitable[dict[str, Any]]],
) -> None:
    expected = await by_one(60)
    pids: dict[str, int] = {}
    to_kill = ["worker-1", "host"]

    def watch(status: RunStatus) -> None:
        # The first one as soon as there is an update, the other when there has been progress since.
        if to_kill and status.updates >= 1 + 60 * (2 - len(to_kill)):
            os.kill(pids[to_kill.pop(0)], signal.SIGKILL)

    images = {"dataset": shapes}
    host = {"network": network(60), "strategy": strategy, "folder": tmp_path / "killed", "lease_s": 2}
    found = await run_here(
        LocalRun(
            host={**host, "workers": 2, **images},
            worker={"threads": 1, **images},
            workers=1,
            on_start=lambda name, pid: pids.update({name: pid}),
        ),
        watch,
    )
    assert to_kill == []
    assert same(found, expected)
    assert found["faults"] >= 2


@pytest.mark.parametrize(
    ("given", "changed", "said"),
    [
        ({"wire": "bf16"}, "", "wire"),
        ({"share_data": True}, "", "share-data"),
        ({}, "mixup = 0.2\n", "mixup"),
    ],
)
def test_what_it_cannot_train_is_refused_before_the_images_are_read(
    given: dict[str, Any], changed: str, said: str, network: Callable[..., Path], strategy: str, tmp_path: Path
) -> None:
    path = network(PASSES)
    path.write_text(changed + path.read_text())
    settings = HostSettings(
        network=str(path), folder=tmp_path / "run", dataset="no-such-images", strategy=strategy, **given
    )
    with pytest.raises(SetupError, match=said):
        open_host(settings)
    assert not (tmp_path / "run").exists()


def test_a_simulated_run_is_refused_too(shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.toml"
    path.write_text(CONFIG.format(epochs=2))  # which mirrors images
    flags = ["--strategy", "lbfgs", "--dataset", str(shapes)]
    assert run(["train", "simulate", "net", "--config", str(path), *flags]) == 2
    assert "mirror" in capsys.readouterr().err


def test_a_simulated_run_gives_the_figures_of_the_coordinator(
    network: Callable[..., Path], shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--strategy", "lbfgs", "--dataset", str(shapes), "--threads", "1", "--json", "--step-ms", "10"]
    results = []
    for slow in ([], ["--slow", "8"]):
        assert run(["train", "simulate", "net", "--config", str(network(8)), "--workers", "3", *flags, *slow]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["points"] == 8
    assert results[0]["objective"] == results[1]["objective"] < 0.5
    assert results[0]["command_bytes"] == results[1]["command_bytes"]
