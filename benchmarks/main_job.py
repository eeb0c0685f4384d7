"""The main job, measured: a whole fleet on this machine against the same inference in one bare process.

Each repeat runs the job once through the fleet: scheduler, end, edge and cloud nodes, with HTTP between them. Then it
runs bare: the same batches through the same ONNX files in this process, on all cores, nothing else. The bare time is
the better of two ways to use the cores (one batch at a time on all of them, or one batch per core). The order of the
two alternates, because the speed of a machine drifts. Every prediction of the fleet is compared with the bare run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_jsonable_python

from experiments.harness import (
    MOST_RUNS,
    SPREAD_HEADINGS,
    Experiment,
    Options,
    Record,
    Run,
    Table,
    option,
    spread_row,
)
from experiments.processes import resident_bytes
from experiments.record import spread
from models.data import ImageSet
from models.manifest import load_manifest
from models.session import OnnxModel, load_model
from tierkit.client import AsyncClient, ImageResult
from tierkit.errors import SetupError
from tierkit.fleet import MAX_NODES, TERRACE, local_plan
from tierkit.types import Scheme, Tier

__all__ = ["MAIN_JOB", "bare_run", "compare", "routes_of"]

BATCH = 50
_JOB_BUDGET_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Images of one task, and the tier of its fine answer."""

    start: int
    stop: int
    upper: Tier | None


def routes_of(results: Sequence[ImageResult], batch: int = BATCH) -> list[Route]:
    """The tasks of a job, from its results in index order; all images of a task share their upstream node."""
    routes = []
    for start in range(0, len(results), batch):
        part = results[start : start + batch]
        tiers = {result.fine.tier if result.fine else None for result in part}
        if len(tiers) != 1:
            raise ValueError(f"images {start} to {start + len(part) - 1} were answered by several tiers: {tiers}")
        routes.append(Route(start=start, stop=start + len(part), upper=tiers.pop()))
    return routes


def bare_run(
    models: dict[Tier, OnnxModel], images: NDArray[np.uint8], routes: Sequence[Route], workers: int
) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
    """Run every route's batch through its networks.

    Args:
        models: one session per tier.
        images: UINT8 [n, h, w, 3].
        workers: batches that run at the same time.

    Returns:
        Seconds, coarse labels [n] and fine labels [n] (-1 where a route has no upper tier).
    """
    coarse = np.full(len(images), -1, dtype=np.int64)
    fine = np.full(len(images), -1, dtype=np.int64)

    def one(route: Route) -> None:
        batch = {"images": images[route.start : route.stop]}
        coarse[route.start : route.stop] = models[Tier.END].run(batch, ["logits"])["logits"].argmax(axis=1)
        if route.upper is not None:
            fine[route.start : route.stop] = models[route.upper].run(batch, ["logits"])["logits"].argmax(axis=1)

    started = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, routes))
    return time.perf_counter() - started, coarse, fine


def compare(results: Sequence[ImageResult], coarse: NDArray[np.int64], fine: NDArray[np.int64]) -> dict[str, int]:
    """Count the images whose labels from the fleet equal the bare run's."""
    coarse_equal = [r.coarse is not None and r.coarse.index == coarse[r.index] for r in results]
    fine_equal = [r.fine.index == fine[r.index] for r in results if r.fine is not None]
    return {
        "images": len(results),
        "coarse_equal": int(sum(coarse_equal)),
        "fine_equal": int(sum(fine_equal)),
        "fine_answered": len(fine_equal),
    }


_Bare = tuple[dict[str, float], NDArray[np.int64], NDArray[np.int64]]


def _bare_best(images: NDArray[np.uint8], routes: Sequence[Route]) -> _Bare:
    """Seconds of both ways to use the cores, and the labels."""
    cores = os.cpu_count() or 1
    manifest = load_manifest()
    seconds: dict[str, float] = {}
    for name, threads, workers in (("all_cores_per_batch", cores, 1), ("one_core_per_batch", 1, cores)):
        models = {tier: load_model(manifest.default_for(tier), provider="cpu", threads=threads) for tier in Tier}
        bare_run(models, images[: 2 * BATCH], [Route(start=0, stop=BATCH, upper=tier) for tier in Tier], workers)
        seconds[name], coarse, fine = bare_run(models, images, routes, workers)
    return seconds, coarse, fine


async def _fleet_run(url: str, data: ImageSet) -> tuple[float, list[ImageResult], dict[str, Any]]:
    """Submit the job, wait for its end, fetch the results; the seconds are those from submission to the final state."""
    async with AsyncClient(url, timeout_s=_JOB_BUDGET_S) as client:
        labels = None if data.fine is None else [int(label) for label in data.fine]
        started = time.perf_counter()
        job = await client.submit(data.images, labels=labels, scheme=Scheme.MAPPING, batch_size=BATCH)
        done = await client.wait(job, budget_s=_JOB_BUDGET_S)
        seconds = time.perf_counter() - started
        results = [result async for result in client.results(job)]
    return seconds, results, to_jsonable_python(done)


class Chosen(Options):
    """Repeats, and the nodes of the fleet."""

    repeats: int = option(3, "How often the job runs through the fleet and bare.", quick=1, min=1, max=MOST_RUNS)
    end: int = option(2, "End devices.", min=1, max=MAX_NODES)
    edge: int = option(1, "Edge nodes.", min=1, max=MAX_NODES)
    cloud: int = option(1, "Cloud nodes.", min=1, max=MAX_NODES)


def _start_end_node() -> dict[str, float]:
    """Seconds from start to ready, and resident memory when idle, of an end node without a fleet."""
    with tempfile.TemporaryDirectory(prefix="terrace-end-") as folder:
        ready = Path(folder) / "ready.json"
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "terrace", "end", "--ready-file", str(ready)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not ready.exists():
                if process.poll() is not None or time.perf_counter() - started > 60:
                    raise SetupError("the end node did not become ready; run `terrace doctor`")
                time.sleep(0.005)
            start_s = time.perf_counter() - started
            resident_mib = resident_bytes(process.pid) / 2**20
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
    return {"end_start_s": start_s, "end_resident_mib": resident_mib}


# --- from the record ------------------------------------------------------------------------------------------------

_FIGURES = {
    "fleet_s": "the fleet, s",
    "bare_s": "bare, s",
    "ratio": "fleet / bare",
    "end_start_s": "an end node until it is ready, s",
    "end_resident_mib": "its memory when idle, MiB",
}


class MainJob(Experiment):
    """A whole fleet on this machine against the same inference in one bare process."""

    name = "main-job"
    options = Chosen
    quick = "{share}"
    ignores = frozenset({"seed"})
    profile = None
    one_row = True

    async def measure(self, run: Run, chosen: Chosen) -> None:
        repeats = chosen.repeats
        counts = {Tier.END: chosen.end, Tier.EDGE: chosen.edge, Tier.CLOUD: chosen.cloud}
        data = await asyncio.to_thread(lambda: run.images)
        run.config |= {"images": len(data.images), "batch": BATCH, "scheme": Scheme.MAPPING, "nodes": counts}
        run.expect(2 * repeats + max(3, repeats))
        folder = run.folder / "fleet"
        folder.mkdir()
        plan = local_plan(counts, scheduler={"port": 0, "state": str(folder / "state"), "trusted": "end,edge,cloud"})
        async with run.launched(plan, folder, command=TERRACE) as fleet:
            routes: list[Route] = []
            for repeat in range(repeats):
                bare: _Bare | None = None
                # The routes are known after the first fleet run only, so that one comes first.
                if repeat % 2 and routes:
                    with run.step("bare"):
                        bare = await asyncio.to_thread(_bare_best, data.images, routes)
                with run.step("fleet"):
                    seconds, results, job = await _fleet_run(fleet.scheduler_url, data)
                if routes_of(results) != routes:
                    routes, bare = routes_of(results), None
                if bare is None:
                    with run.step("bare"):
                        bare = await asyncio.to_thread(_bare_best, data.images, routes)
                ways, coarse, fine = bare
                run.add(
                    what="job",
                    fleet_s=seconds,
                    bare_s=min(ways.values()),
                    **{f"bare_{way}_s": value for way, value in ways.items()},
                    **compare(results, coarse, fine),
                    job=job,
                )
        for _ in range(max(3, repeats)):
            with run.step("an end node that stands alone"):
                run.add(what="end", **await asyncio.to_thread(_start_end_node))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """One row: of each figure median and range."""
        points = [
            {**point, "ratio": point["fleet_s"] / point["bare_s"]} if point["what"] == "job" else point
            for point in record["points"]
        ]
        values = {name: [point[name] for point in points if name in point] for name in _FIGURES}
        jobs = [point for point in points if point["what"] == "job"]
        return [
            {
                **{name: asdict(spread(found)) for name, found in values.items() if found},
                "runs": len(jobs),
                **{name: sum(point[name] for point in jobs) for name in ("images", "coarse_equal", "fine_equal")},
            }
        ]

    def table(self, record: Record) -> Table:
        (row,) = self.rows(record)
        figures = [(words, row[name]) for name, words in _FIGURES.items() if name in row]
        return Table(
            headings=SPREAD_HEADINGS,
            rows=[
                *(spread_row(words, of, ".2f") for words, of in figures),
                ["answers as bare: coarse", f"{row['coarse_equal']:,} of {row['images']:,}", "", ""],
                ["answers as bare: fine", f"{row['fine_equal']:,} of {row['images']:,}", "", ""],
            ],
        )


MAIN_JOB = MainJob()
