"""`terrace experiment chaos`: jobs run without a pause while services are killed, stopped and cut off.

Two jobs are always under way, each with another scheme, and in turns with on_upstream_loss `fallback` and `wait`. Up to
three faults happen at a time, each when its target holds work. When all faults are over, what is under way may finish.
Then every image is counted: answered once, with the answer that the bare network of the tier gives, and with
`wait` with a fine one.

A silent or killed node counts for the detection time only where the scheduler was well at the time, and the fault
lasted until the node was dead in the device list.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from experiments.bench.summary import percentile
from experiments.chaos.faults import Fault, Kind, plan_faults
from experiments.chaos.verdict import Truth, tally
from experiments.chaos.world import Sight, World, behind_relays, small_disk
from experiments.harness import MOST_TASKS, Experiment, Options, Point, Record, Run, Table, option
from experiments.plots import Figures
from experiments.testbed import BATCH, plan_fleet
from tierkit.client import AsyncClient, CoarseResults, FallbackResults, FineResults, ImageResult, Job, StateChange
from tierkit.errors import TerraceError
from tierkit.fleet import SCHEDULER
from tierkit.types import Scheme, Tier, UpstreamLoss

__all__ = ["CHAOS"]

_NODES = {"end": 3, "edge": 2, "cloud": 1}
_AT_ONCE = 3
_JOBS_AT_ONCE = 2
_SCHEMES = (Scheme.MAPPING, Scheme.END_EDGE, Scheme.END_CLOUD)
_JOB_BUDGET_S = 300.0
_PATIENCE_S = 120.0
_PAUSE_S = 0.2


# --- measuring ------------------------------------------------------------------------------------------------------


class Chosen(Options):
    """Size of the run."""

    faults: int = option(1000, "Number of faults.", quick=60, min=1, max=1_000_000)
    jobs: int = option(20, "Least number of jobs.", quick=2, min=1, max=10_000)
    tasks: int = option(20, "Tasks of 50 images in each job.", min=1, max=MOST_TASKS)


async def _run_both(run: Run, world: World, plan: Sequence[Fault], load: _Load) -> None:
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(_JOBS_AT_ONCE):
            group.create_task(load.run(), name=f"jobs {number}")
        await _inflict(run, world, plan)
        run.config["faults_s"] = round(time.monotonic() - began, 1)
        load.enough = True
    with run.step("what is left"):
        await load.check_list()
    run.config["seconds"] = round(time.monotonic() - began, 1)


async def _inflict(run: Run, world: World, plan: Sequence[Fault]) -> None:
    """Inflict all faults of the plan, several at a time, but never two on one service."""
    slots = asyncio.Semaphore(_AT_ONCE)
    held: dict[str, asyncio.Lock] = {}
    turns = itertools.count(1)

    async def one(fault: Fault) -> None:
        async with held.setdefault(fault.target, asyncio.Lock()):
            try:
                with run.step(f"{fault.kind} {fault.target}"):
                    outcome = await world.inflict(fault)
                    while not outcome["struck"]:
                        # No work has passed there: the same again, when there is some.
                        outcome = await world.inflict(fault)
            finally:
                slots.release()
        run.add(what="fault", number=next(turns), **asdict(fault), **outcome)

    async with asyncio.TaskGroup() as group:
        for fault in plan:
            await slots.acquire()
            group.create_task(one(fault), name=f"{fault.kind} {fault.target}")


class _Load:
    """Jobs one after the other while there are faults, and at least `least` of them."""

    def __init__(self, run: Run, url: str, truth: Truth, least: int) -> None:
        self.enough = False
        """No further job is begun."""
        self._run = run
        self._url = url
        self._truth = truth
        self._least = least
        self._numbers = itertools.count()
        self._accepted: set[str] = set()

    async def run(self) -> None:
        while True:
            number = next(self._numbers)
            if self.enough and number >= self._least:
                return
            await self._job(number)

    async def _job(self, number: int) -> None:
        scheme = _SCHEMES[number % len(_SCHEMES)]
        loss = list(UpstreamLoss)[number // len(_SCHEMES) % len(UpstreamLoss)]
        point: dict[str, Any] = {"what": "job", "number": number, "scheme": scheme, "on_upstream_loss": loss}
        images = self._run.images
        began = time.monotonic()
        told: Counter[tuple[str, int]] = Counter()
        refusals: Counter[str] = Counter()
        async with AsyncClient(self._url, timeout_s=_PATIENCE_S) as client:
            try:
                job = await _insist(
                    refusals,
                    lambda: client.submit(
                        images.images,
                        scheme=scheme,
                        on_upstream_loss=loss,
                        batch_size=BATCH,
                        idempotency_key=f"{self._run.request.seed}-{number}",
                    ),
                )
                self._accepted.add(job.id)
                job = await self._follow(client, job, told)
                results = await _insist(refusals, lambda: _all_results(client, job))
            except TerraceError as exc:
                self._run.add(**point, state="unfinished", reason=str(exc), refusals=dict(refusals))
                return
        counts = tally(len(images), results, told, self._truth)
        self._run.add(
            **point,
            job=job.id,
            state=job.state,
            reason=job.reason,
            seconds=round(time.monotonic() - began, 3),
            refusals=dict(refusals),
            **asdict(counts),
        )

    async def _follow(self, client: AsyncClient, job: Job, told: Counter[tuple[str, int]]) -> Job:
        async for event in client.events(job, budget_s=_JOB_BUDGET_S):
            match event:
                case StateChange():
                    job = event.job
                case CoarseResults(results=results):
                    told.update(("coarse", result.index) for result in results)
                case FineResults(results=results) | FallbackResults(results=results):
                    told.update(("final", result.index) for result in results)
        return job

    async def check_list(self) -> None:
        """Count the scheduler's own list: no job too many, none without an end."""
        async with AsyncClient(self._url, timeout_s=_PATIENCE_S) as client:
            listed: list[Job] = []
            cursor: str | None = None
            while True:
                page = await client.jobs(limit=50, cursor=cursor)
                listed += page.jobs
                if (cursor := page.next_cursor) is None:
                    break
        self._run.add(
            what="list",
            jobs=len(listed),
            unknown=len({job.id for job in listed} - self._accepted),
            unfinished=sum(not job.done for job in listed),
        )


async def _all_results(client: AsyncClient, job: Job) -> list[ImageResult]:
    return [result async for result in client.results(job)]


async def _insist(refusals: Counter[str], call: Any) -> Any:
    """Repeat a call for at most two minutes while the scheduler is away or in trouble, as a user would."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return await call()
        except TerraceError as exc:
            refusals[type(exc).__name__] += 1
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_PAUSE_S)


# --- from the record ------------------------------------------------------------------------------------------------


def _detected(points: Sequence[Point], kind: Kind) -> list[float]:
    """Seconds until nodes were dead in the device list, in order."""
    faults = [point for point in points if point["what"] == "fault" and point["kind"] == kind]
    return sorted(fault["detection_s"] for fault in faults if fault.get("detection_s") is not None)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


class Chaos(Experiment):
    """Losses when services are killed, stopped and cut off under load."""

    name = "chaos"
    options = Chosen
    quick = "{faults} faults, at least {jobs} jobs"
    profile = "native"
    one_row = True

    async def measure(self, run: Run, chosen: Chosen) -> None:
        count, least = chosen.faults, chosen.jobs
        run.takes(chosen.tasks)
        profile = run.profile.with_nodes(**_NODES)
        run.config |= {"faults": count, "jobs": least, "nodes": _NODES, "images_per_job": len(run.images)}
        run.expect(1 + count)
        networks = await run.networks(profile)
        state = run.folder / "disk"
        async with AsyncExitStack() as stack:
            truth = await asyncio.to_thread(Truth.of, run.images.images)
            disk = stack.enter_context(small_disk(state))
            if not disk:
                run.note("the disk was never full: a small disk of its own for the scheduler takes root")
            folder = run.folder / "fleet"
            folder.mkdir()
            settings = {"state": str(state / "scheduler"), "n_map": "1", "max_unfinished_jobs": 10}
            plan, relays = await stack.enter_async_context(
                behind_relays(plan_fleet(profile, networks, folder, settings))
            )
            fleet = await stack.enter_async_context(run.launched(plan, folder, expects_exits=True))
            sight = Sight(fleet.scheduler_url)
            looking = asyncio.create_task(sight.run(), name="sight")
            stack.callback(looking.cancel)
            nodes = [[node.name for node in plan.nodes if node.kind == tier] for tier in Tier]
            world = World(fleet, relays, sight, state / "scheduler")
            plan_of_faults = plan_faults(run.request.seed, count, scheduler=SCHEDULER, nodes=nodes, disk=disk)
            load = _Load(run, fleet.scheduler_url, truth, least)
            await _run_both(run, world, plan_of_faults, load)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        points = record["points"]
        faults = [point for point in points if point["what"] == "fault"]
        jobs = [point for point in points if point["what"] == "job"]
        ended = [point for point in jobs if "images" in point]
        waited = [point for point in ended if point["on_upstream_loss"] == UpstreamLoss.WAIT]
        lists = [point for point in points if point["what"] == "list"]
        killed, silent = (_detected(points, kind) for kind in (Kind.KILL, Kind.STOP))
        both = sorted([*killed, *silent])
        images = sum(point["images"] for point in ended)
        fallback = sum(point["fallback"] for point in ended)

        def total(name: str) -> int:
            return sum(point[name] for point in ended)

        def p99(samples: Sequence[float]) -> float | None:
            return round(percentile(samples, 99), 3) if samples else None

        return [
            {
                "faults": len(faults),
                "at_work": sum(point["at_work"] for point in faults),
                "by_kind": dict(sorted(Counter(point["kind"] for point in faults).items())),
                "jobs": len(jobs),
                "images": images,
                "lost": total("lost"),
                "duplicated": total("duplicated"),
                "wrong": total("wrong"),
                "unmarked": total("unmarked"),
                "unfinished_jobs": len(jobs) - len(ended) + sum(point["unfinished"] for point in lists),
                "unknown_jobs": sum(point["unknown"] for point in lists),
                "fallback": fallback,
                "fallback_share": round(fallback / images, 4) if images else None,
                "wait_images": sum(point["images"] for point in waited),
                "wait_without_fine": sum(point["images"] - point["fine"] for point in waited),
                "detection_p99_s": p99(both),
                "detections": len(both),
                "kill_p99_s": p99(killed),
                "stop_p99_s": p99(silent),
                "refusals": dict(sum((Counter(point["refusals"]) for point in jobs), Counter())),
            }
        ]

    def table(self, record: Record) -> Table:
        (row,) = self.rows(record)
        shown = {
            "faults": f"{row['faults']:,}, {row['at_work']:,} of them on work under way",
            "of each kind": ", ".join(f"{kind} {count}" for kind, count in row["by_kind"].items()),
            "jobs / images": f"{row['jobs']:,} / {row['images']:,}",
            "images lost": f"{row['lost']:,}",
            "images answered twice": f"{row['duplicated']:,}",
            "answers that differ from the bare network's": f"{row['wrong']:,}",
            "jobs without an end": f"{row['unfinished_jobs']:,}",
            "coarse answers that stand (marked)": f"{row['fallback']:,} ({row['fallback_share'] or 0:.1%})",
            "with `wait`: images without a fine answer": f"{row['wait_without_fine']:,} of {row['wait_images']:,}",
            "detection, p99": f"{_seconds(row['detection_p99_s'])} (n = {row['detections']})",
            "of a killed node": _seconds(row["kill_p99_s"]),
            "of a silent node": _seconds(row["stop_p99_s"]),
        }
        return Table(headings=" | counted", rows=list(shown.items()))

    def draw(self, record: Record, figures: Figures) -> None:
        """Draw when each fault was noticed: the number of killed and silent nodes that were dead in the device list by
        then. Without such nodes there is no plot.
        """
        looks = ((Kind.KILL, "killed", "#0072B2", "-"), (Kind.STOP, "silent", "#D55E00", "--"))
        lines = [(_detected(record["points"], kind), *look) for kind, *look in looks]
        if not any(samples for samples, *_ in lines):
            return
        noticed = sorted(seconds for kind, *_ in looks for seconds in _detected(record["points"], kind))
        (axes,) = figures.panels(
            "detection",
            ["Time until a node is dead in the device list"],
            xlabel="time (s)",
            ylabel="share of the nodes",
            finding=f"99 % of failed nodes are dead within {percentile(noticed, 99):.2f} s",
        )
        for samples, name, colour, style in lines:
            if samples:
                # From 0 on, so that a single sample is a line, too.
                shares = [rank / len(samples) for rank in range(len(samples) + 1)]
                label = f"{name} (n = {len(samples)})"
                axes.step([0.0, *samples], shares, where="post", color=colour, linestyle=style, label=label)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
        axes.legend(frameon=False)


CHAOS = Chaos()
