"""The main job, measured: a whole fleet on this machine against the same inference in one bare process.

    terrace experiment main-job --data <folder with cifar-100-python> --repeats 3 --out runs

Each repeat runs the job once through the fleet (scheduler, end, edge and cloud nodes, HTTP between them) and once bare:
the same batches through the same ONNX files in this process, on all cores, nothing else. The bare time is the better of
two ways to use the cores (one batch at a time on all of them, or one batch per core). The order of the two alternates,
because the speed of a machine drifts. Every prediction of the fleet is compared with that of the bare run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic_core import to_jsonable_python

from experiments.record import RunRecord, made_folder, spread
from models.data import ImageSet, read_cifar100, read_sample
from models.manifest import load_manifest
from models.session import OnnxModel, load_model
from tierkit.client import AsyncClient, ImageResult
from tierkit.commandline import Json
from tierkit.errors import SetupError
from tierkit.fleet import MAX_NODES, launch, local_plan
from tierkit.types import Scheme, Tier

__all__ = ["bare_run", "compare", "routes_of", "run"]

BATCH = 50
_JOB_BUDGET_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which images one task held, and which tier gave its fine answer."""

    start: int
    stop: int
    upper: Tier | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Images of the fleet's answer against the bare run's."""

    images: int
    coarse_equal: int
    fine_equal: int
    fine_answered: int


def routes_of(results: Sequence[ImageResult], batch: int = BATCH) -> list[Route]:
    """The tasks of a job, from its results in index order; all images of a task share their upper node."""
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


def compare(results: Sequence[ImageResult], coarse: NDArray[np.int64], fine: NDArray[np.int64]) -> Agreement:
    """Count the images whose labels from the fleet equal those of the bare run."""
    answered = [result for result in results if result.fine is not None]
    return Agreement(
        images=len(results),
        coarse_equal=sum(
            result.coarse is not None and result.coarse.index == int(coarse[result.index]) for result in results
        ),
        fine_equal=sum(result.fine is not None and result.fine.index == int(fine[result.index]) for result in answered),
        fine_answered=len(answered),
    )


def _bare_best(
    images: NDArray[np.uint8], routes: Sequence[Route], provider: str
) -> tuple[dict[str, float], NDArray[np.int64], NDArray[np.int64]]:
    """Seconds of both ways to use the cores, and the labels."""
    cores = os.cpu_count() or 1
    manifest = load_manifest()
    seconds: dict[str, float] = {}
    for name, threads, workers in (("all_cores_per_batch", cores, 1), ("one_core_per_batch", 1, cores)):
        models = {tier: load_model(manifest.default_for(tier), provider=provider, threads=threads) for tier in Tier}
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


async def _measure(
    data: ImageSet, repeats: int, counts: dict[Tier, int], tell: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    samples: dict[str, list[float]] = {"fleet_s": [], "bare_s": [], "ratio": []}
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="terrace-main-job-") as folder:
        plan = local_plan(counts, scheduler={"state": str(Path(folder) / "state"), "trusted": "end,edge,cloud"})
        async with launch(plan, Path(folder), start_s=60) as fleet:
            await fleet.join(budget_s=30)
            routes: list[Route] = []
            for repeat in range(repeats):
                bare: tuple[dict[str, float], NDArray[np.int64], NDArray[np.int64]] | None = None
                # The routes are known after the first fleet run only, so that one comes first.
                if repeat % 2 and routes:
                    bare = await asyncio.to_thread(_bare_best, data.images, routes, "cpu")
                seconds, results, job = await _fleet_run(fleet.scheduler_url, data)
                if routes_of(results) != routes:
                    routes, bare = routes_of(results), None
                if bare is None:
                    bare = await asyncio.to_thread(_bare_best, data.images, routes, "cpu")
                best = min(bare[0].values())
                samples["fleet_s"].append(seconds)
                samples["bare_s"].append(best)
                samples["ratio"].append(seconds / best)
                for way, value in bare[0].items():
                    samples.setdefault(f"bare_{way}_s", []).append(value)
                agreement = compare(results, bare[1], bare[2])
                outcomes.append({"agreement": asdict(agreement), "job": job})
                tell(
                    f"{repeat + 1}/{repeats}: fleet {seconds:.2f} s, bare {best:.2f} s, ratio {seconds / best:.2f}, "
                    f"coarse equal {agreement.coarse_equal}, fine equal {agreement.fine_equal} of {agreement.images}"
                )
    return samples, {"runs": outcomes}


def _start_end_node(repeats: int) -> dict[str, list[float]]:
    """Seconds from start to ready, and resident memory when idle, of an end node that stands alone."""
    samples: dict[str, list[float]] = {"end_start_s": [], "end_resident_mib": []}
    for _ in range(repeats):
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
                samples["end_start_s"].append(time.perf_counter() - started)
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                samples["end_resident_mib"].append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=30)
    return samples


def run(
    data: Annotated[
        Path | None, typer.Option(envvar="TERRACE_DATA", help="Folder with cifar-100-python; without it, the sample.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, max=1000, help="How often the job runs through the fleet and bare.")
    ] = 3,
    end: Annotated[int, typer.Option(min=1, max=MAX_NODES)] = 2,
    edge: Annotated[int, typer.Option(min=1, max=MAX_NODES)] = 1,
    cloud: Annotated[int, typer.Option(min=1, max=MAX_NODES)] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the record.", file_okay=False)] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Measure makespan, agreement with the bare networks, and the cost of an idle end node."""
    images = read_cifar100("test", data) if data else read_sample()
    made_folder(out)
    counts = {Tier.END: end, Tier.EDGE: edge, Tier.CLOUD: cloud}
    samples, results = asyncio.run(_measure(images, repeats, counts, partial(typer.echo, err=as_json)))
    samples |= _start_end_node(max(3, repeats))
    summary = {name: asdict(spread(values)) for name, values in samples.items()}
    record = RunRecord(
        experiment="main-job",
        config={
            "images": len(images.images),
            "batch": BATCH,
            "scheme": "mapping",
            "repeats": repeats,
            "end": end,
            "edge": edge,
            "cloud": cloud,
        },
        samples=samples,
        results={"summary": summary, **results},
    )
    path = record.write(out)
    typer.echo(json.dumps({**summary, **results} if as_json else summary, indent=1))
    typer.echo(f"record: {path}", err=as_json)
