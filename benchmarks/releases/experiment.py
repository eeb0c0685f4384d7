"""A release that changes under load, and trials of good and bad releases.

`switch` promotes a release with other networks on every tier while jobs and single requests run, and one of two end
devices sleeps for half a minute. `trials` tries releases on a quarter of a small fleet: good ones, and ones that answer
always one class, are five times as slow, give NaN for some pictures, or have a damaged file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.releases.load import FleetOfReleases, Load, Requests, fleet_of_releases
from benchmarks.releases.networks import FAULTS, KINDS, base_set, pictures, variant
from experiments.bench.summary import percentile
from experiments.harness import Experiment, Options, Record, Run, Table, option
from models.data import read_sample
from models.manifest import weights_folder
from tierkit.client import ReleaseList, Rollout, RolloutState
from tierkit.errors import Conflict, InvalidInput, ServiceFailed, TerraceError
from tierkit.types import Health

__all__ = ["RELEASES", "missed"]

_GOOD = "good"
_SCHEME = "end-edge"
_CANARY = 0.25
_ENDS = 4
_JOB_IMAGES = 60
_WHITE = 0.2
"""Share of the pictures that get NaN from the network with that fault."""
_ASLEEP_S = 30.0
_SETTLE_S = 3.0
_CHANGE_S = 10.0
"""Seconds from the promotion of a release whose requests count as those during the switch: files are fetched, networks
loaded, swapped and unloaded."""
_LOOK_S = 0.1
_BUDGET_S = 180.0
_MOST_RATIO = 1.5
"""Largest ratio of the 99th percentile of single requests during a switch to before."""


class ReleaseOptions(Options):
    """Sizes of the parts."""

    trials: int = option(20, "Trials of each kind of release.", quick=1, min=0, max=1000)
    trial_s: float = option(20.0, "Seconds of a trial.", min=1, max=3600)
    switches: int = option(5, "Switches under load.", quick=1, min=0, max=100)
    before_s: float = option(12.0, "Seconds of load before each.", quick=6.0, min=1, max=3600)


# --- a switch under load ----------------------------------------------------------------------------------------------


def other_set(folder: Path, number: int) -> Path:
    """The bundled networks in other files: the answers are the same, the sha256 are not."""
    shutil.copytree(weights_folder(), folder)
    text = (folder / "manifest.json").read_text()
    for entry in json.loads(text)["models"]:
        model = onnx.load(str(folder / entry["file"]))
        model.doc_string = f"{number:06}"
        content = model.SerializeToString()
        (folder / entry["file"]).write_bytes(content)
        # Encoders name the file as well, where they are parts of it.
        text = text.replace(entry["sha256"], hashlib.sha256(content).hexdigest())
        text = text.replace(f'"size_bytes": {entry["size_bytes"]},', f'"size_bytes": {len(content)},')
    (folder / "manifest.json").write_text(text)
    (folder / "escalation.json").unlink(missing_ok=True)  # thresholds of the other files
    return folder


async def _until(what: str, there: Callable[[], Any], budget_s: float = _BUDGET_S) -> None:
    deadline = time.monotonic() + budget_s
    while not await there():
        if time.monotonic() > deadline:
            raise ServiceFailed(f"{what}: not after {budget_s:g} s")
        await asyncio.sleep(_LOOK_S)


async def _switch(fleet: FleetOfReleases, folder: Path, number: int, before_s: float) -> dict[str, Any]:
    """Promote a release under load; an end device sleeps from before that until after."""
    client, image = fleet.client, read_sample().images
    models = await asyncio.to_thread(other_set, folder / f"set-{number}", number)
    release = (await client.create_release("other", models)).release

    async def gone() -> bool:
        return next(each for each in await client.devices() if each.node_id == "end-2").health is Health.DEAD

    async def caught_up() -> bool:
        now = await client.releases()
        held = next(each for each in now.releases if each.release == release)
        return now.rollout is None and held.nodes == len(fleet.pids)

    async def done() -> bool:
        now = await client.releases()
        return now.in_force == release and now.rollout is None

    load = Load(client, np.tile(image[:50], (2, 1, 1, 1)), "mapping", lanes=2, batch_size=25)
    marks: dict[str, float] = {}
    async with load.running(), Requests(client, image[:1], "mapping").running() as requests:
        await asyncio.sleep(_SETTLE_S)
        os.kill(fleet.pids["end-2"], signal.SIGSTOP)
        slept = time.monotonic()
        try:
            await _until("the device that sleeps is off the list", gone)
            await asyncio.sleep(_SETTLE_S)
            marks["quiet"] = time.monotonic()
            await asyncio.sleep(before_s)
            marks["promoted"] = time.monotonic()
            await client.promote_release(release)
            await _until("the release is in force", done)
            marks["in_force"] = time.monotonic()
            await asyncio.sleep(max(0.0, marks["promoted"] + _CHANGE_S - time.monotonic()))
            marks["changed"] = time.monotonic()
            await asyncio.sleep(max(0.0, slept + _ASLEEP_S - time.monotonic()))
        finally:
            os.kill(fleet.pids["end-2"], signal.SIGCONT)
        marks["awake"] = time.monotonic()
        await _until("the device that slept has caught up", caught_up)
        marks["caught_up"] = time.monotonic()
        await asyncio.sleep(_SETTLE_S)
        marks["end"] = time.monotonic()
    windows = {"before": ("quiet", "promoted"), "during": ("promoted", "changed"), "after": ("awake", "end")}
    found = {
        name: sorted(last for sent, _, last in requests.done if marks[first] <= sent < marks[end])
        for name, (first, end) in windows.items()
    }
    return {
        "part": "switch",
        "failed": [*requests.failed, *load.failed],
        "mixed": load.mixed,
        "jobs": load.jobs,
        "requests": len(requests.done),
        "switch_s": marks["in_force"] - marks["promoted"],
        "asleep_s": marks["awake"] - slept,
        "caught_up_s": marks["caught_up"] - marks["awake"],
        "samples": found,
    }


# --- trials -----------------------------------------------------------------------------------------------------------


async def _over(fleet: FleetOfReleases, release: str) -> tuple[Rollout, set[str], float | None]:
    """Wait for the end of a trial. Returns how it ended, the end devices of the canary, and how long its devices took
    to hold the release."""
    canary: set[str] = set()
    held, began = None, time.monotonic()
    while time.monotonic() - began < _BUDGET_S:
        now: ReleaseList = await fleet.client.releases()
        if now.rollout is None:
            return now.history[0], canary, held
        if now.rollout.state is RolloutState.CANARY:
            canary |= set(now.rollout.devices)
            if held is None and now.rollout.elapsed_s:
                held = time.monotonic() - began
        await asyncio.sleep(_LOOK_S)
    raise ServiceFailed(f"the trial of {release} did not end in {_BUDGET_S:g} s")


class _Trials:
    """Trials on one fleet, each of another release.

    Args:
        sets: model sets by kind.
    """

    def __init__(self, fleet: FleetOfReleases, load: Load, sets: Mapping[str, Path], folder: Path) -> None:
        self._fleet, self._load, self._sets, self._folder = fleet, load, sets, folder
        self._number = 0

    async def run(self, kind: str, trial_s: float) -> dict[str, Any]:
        client, load = self._fleet.client, self._load
        self._number += 1
        base = self._sets.get(kind, self._sets[_GOOD])
        target = self._folder / f"variant-{self._number}"
        models = await asyncio.to_thread(variant, base, target, self._number, one_class=kind == "one class")
        broken = kind == "damaged" and self._number % 2 == 0
        sha256 = await asyncio.to_thread(_spoil if broken else _digest, models)
        failed, mixed, jobs = len(load.failed), len(load.mixed), load.jobs
        began = time.monotonic()
        refused, over, canary, held = "", None, set[str](), None
        try:
            release = (await client.create_release(kind.replace(" ", "-"), models)).release
            if kind == "damaged":
                await asyncio.to_thread(_overwrite, self._fleet.state, sha256)
            began = time.monotonic()
            await client.start_release(release, canary=_CANARY, for_s=trial_s)
            over, canary, held = await _over(self._fleet, release)
        except (Conflict, InvalidInput) as exc:
            refused = str(exc)
        except TerraceError:
            self._fleet.check()
            raise
        seconds = time.monotonic() - began
        await asyncio.to_thread(shutil.rmtree, target)
        outcome = "refused" if over is None else str(over.state)
        images = dict(load.by_network[sha256])
        return {
            "part": "trials",
            "kind": kind,
            "outcome": outcome,
            "reason": refused or (over.reason if over is not None else ""),
            "seconds": seconds,
            "held_s": held,
            "extended": over is not None and over.extended,
            "canary": sorted(canary),
            "images": sum(images.values()),
            "by_node": images,
            "outside": 0 if kind == _GOOD else sum(count for node, count in images.items() if node not in canary),
            "jobs": load.jobs - jobs,
            "failed": load.failed[failed:],
            "mixed": load.mixed[mixed:],
        }


def _entry(models: Path) -> tuple[Path, Any, Any]:
    file = models / "manifest.json"
    manifest = json.loads(file.read_text())
    return file, manifest, next(each for each in manifest["models"] if each["tier"] == "end")


def _digest(models: Path) -> str:
    """sha256 of the network of end devices."""
    return str(_entry(models)[2]["sha256"])


def _spoil(models: Path) -> str:
    """Cut the network of end devices short before it becomes a release, whose manifest then names what is left."""
    file, manifest, entry = _entry(models)
    content = (models / entry["file"]).read_bytes()[:-1000]
    (models / entry["file"]).write_bytes(content)
    entry |= {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    file.write_text(json.dumps(manifest))
    return str(entry["sha256"])


def _overwrite(state: Path, sha256: str) -> None:
    """Damage a file that the scheduler keeps, as a bad disk does."""
    (path,) = state.rglob(sha256)
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(os.urandom(1000))


def missed(row: Mapping[str, Any]) -> list[str]:
    """Targets that a row misses, one sentence each."""
    found = []
    if row["failed"]:
        found.append(f"{row['failed']} requests or images failed")
    if row["mixed"]:
        found.append(f"{row['mixed']} jobs have answers of two networks of a tier")
    if row["part"] == "switch":
        if row["ratio"] > _MOST_RATIO:
            found.append(f"the 99th percentile is {row['ratio']:.2f} times the one before, above {_MOST_RATIO:g}")
        return found
    if row["wrong"]:
        found.append(f"{row['wrong']} of {row['n']} ended otherwise than they should")
    if row["outside"]:
        found.append(f"{row['outside']} images were answered outside the canary")
    return found


class ReleaseTrials(Experiment):
    """Releases that change under load, and trials of good and bad ones."""

    name = "releases"
    options = ReleaseOptions
    quick = "1 trial of each kind rather than 20, 1 switch rather than 5"
    ignores = frozenset({"tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: ReleaseOptions) -> None:
        run.config |= {"trial_s": chosen.trial_s, "canary": _CANARY, "end_devices": _ENDS, "asleep_s": _ASLEEP_S}
        run.expect(chosen.switches + (1 + len(FAULTS)) * chosen.trials + 1)
        if chosen.switches:
            async with fleet_of_releases(run.folder / "switch", None, ends=2, edges=1, clouds=1) as fleet:
                for number in range(chosen.switches):
                    with run.step("switch under load"):
                        run.add(**await _switch(fleet, run.folder / "switch", number, chosen.before_s))
        await asyncio.to_thread(shutil.rmtree, run.folder / "switch", ignore_errors=True)
        if not chosen.trials:
            return
        folder = run.folder / "trials"
        with run.step("small networks"):
            sets: dict[str, Path] = {kind: await asyncio.to_thread(base_set, folder / kind, kind) for kind in KINDS}
        async with fleet_of_releases(folder, sets[_GOOD], ends=_ENDS, edges=1, clouds=0) as fleet:
            load = Load(fleet.client, pictures(_JOB_IMAGES, _WHITE), _SCHEME)
            trials = _Trials(fleet, load, sets, folder)
            async with load.running():
                for _ in range(chosen.trials):
                    for kind in (_GOOD, *FAULTS):
                        with run.step(kind):
                            run.add(**await trials.run(kind, chosen.trial_s))
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """One row for the switches, and one for the trials of each kind."""
        points = record["points"]
        found = []
        if switches := [point for point in points if point["part"] == "switch"]:
            found.append(_switch_row(switches))
        for kind in (_GOOD, *FAULTS):
            if trials := [point for point in points if point["part"] == "trials" and point["kind"] == kind]:
                found.append(_trial_row(kind, trials))
        return [{**row, "missed": missed(row)} for row in found]

    def table(self, record: Record) -> Table:
        headings = (
            "part | n | ended | seconds, median (most) | images of it | outside the canary | p99 before, during, ms | "
            "ratio | failed | mixed jobs | targets"
        )
        rows = []
        for row in self.rows(record):
            switch = row["part"] == "switch"
            rows.append(
                [
                    "switch under load" if switch else row["kind"],
                    f"{row['n']}",
                    "; ".join(f"{count} {outcome}" for outcome, count in row["outcomes"].items()),
                    f"{row['seconds']:.1f} ({row['most_seconds']:.1f})",
                    "" if switch else f"{row['images']:,}",
                    "" if switch else f"{row['outside']:,}",
                    f"{row['before_ms']:.1f}, {row['during_ms']:.1f}" if switch else "",
                    f"{row['ratio']:.2f}" if switch else "",
                    f"{row['failed']}",
                    f"{row['mixed']}",
                    "; ".join(row["missed"]) or "all reached",
                ]
            )
        return Table(headings=headings, rows=rows)


def _shared(part: str, points: list[dict[str, Any]], seconds: list[float]) -> dict[str, Any]:
    return {
        "part": part,
        "n": len(points),
        "seconds": percentile(sorted(seconds), 50),
        "most_seconds": max(seconds),
        "failed": sum(len(point["failed"]) for point in points),
        "mixed": sum(len(point["mixed"]) for point in points),
    }


def _switch_row(points: list[dict[str, Any]]) -> dict[str, Any]:
    def p99(window: str) -> float:
        return percentile(sorted(ms for point in points for ms in point["samples"][window]), 99)

    before, during = p99("before"), p99("during")
    return {
        **_shared("switch", points, [point["switch_s"] for point in points]),
        "outcomes": {"in force": len(points)},
        "before_ms": before,
        "during_ms": during,
        "after_ms": p99("after"),
        "ratio": during / before,
        "caught_up_s": max(point["caught_up_s"] for point in points),
        "requests": sum(point["requests"] for point in points),
        "jobs": sum(point["jobs"] for point in points),
    }


def _trial_row(kind: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    outcomes: dict[str, int] = {}
    for point in points:
        outcomes[point["outcome"]] = outcomes.get(point["outcome"], 0) + 1
    right = {"done"} if kind == _GOOD else {"refused", str(RolloutState.ROLLED_BACK)}
    return {
        **_shared("trials", points, [point["seconds"] for point in points]),
        "kind": kind,
        "outcomes": outcomes,
        "wrong": sum(count for outcome, count in outcomes.items() if outcome not in right),
        "extended": sum(point["extended"] for point in points),
        "images": sum(point["images"] for point in points),
        "outside": sum(point["outside"] for point in points),
    }


RELEASES = ReleaseTrials()
