"""Two schedulers that share a cloud node, each with one end device. One of them floods the node.

The cloud node takes the same time for each image on every machine, so that it is the bottleneck and a rate means the
same everywhere. First one scheduler has the node to itself. Then the other one floods it with long jobs and many tasks
at a time, while the first runs the same job again, and then asks for single images.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from experiments.bench.summary import percentile
from experiments.harness import Experiment, Options, Record, Run, Table, option
from experiments.processes import serving
from experiments.testbed import read_metrics, wait_for_devices
from tierkit.client import AsyncClient, FallbackResults, FineResults, Job
from tierkit.errors import Conflict, ServiceFailed

__all__ = ["SHARES", "missed"]

_CLOUD_MS, _END_MS = 2.0, 0.2
"""Milliseconds for an image."""
_WINDOWS = {"one": 3, "flood": 32}
"""Tasks that each scheduler gives its end device at a time."""
_FLOOD_JOBS = 10
_BUDGET_S = 600.0

_LEAST_SHARE = 0.45
"""Smallest part of the throughput of both that the scheduler without a flood keeps."""


class ShareOptions(Options):
    """Length of the jobs."""

    images: int = option(4000, "Images of a job.", quick=500, min=50, max=20_000)
    singles: int = option(200, "Single requests in each state.", quick=20, min=1, max=10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fleet:
    cloud_url: str
    one: AsyncClient
    flood: AsyncClient

    async def answered(self) -> dict[str, float]:
        """Images that the cloud node has answered, by scheduler."""
        page = await read_metrics(self.cloud_url)
        found = re.findall(r'^terrace_share_images_total\{scheduler="([^"]+)"\} (\S+)$', page, re.MULTILINE)
        counts = {name: float(value) for name, value in found}
        return {"flood": counts["flood"], "one": counts[urlsplit(self.one.url).netloc]}


@asynccontextmanager
async def _fleet(folder: Path) -> AsyncIterator[_Fleet]:
    emulated = ["experiments.emulation"]
    async with AsyncExitStack() as stack:

        async def start(*command: str) -> str:
            service = await asyncio.to_thread(stack.enter_context, serving(command, core=None))
            return service[0]

        urls = {}
        for name, window in _WINDOWS.items():
            flags = ["--state", str(folder / name), "--window", str(window), "--trusted", "end,edge,cloud"]
            urls[name] = await start("terrace", "scheduler", *flags)
            flags = ["--node-id", f"end-{name}", "--scheduler", urls[name], "--emulate-ms-per-image", str(_END_MS)]
            await start(*emulated, "end", *flags)
        both = ["--scheduler", urls["one"], "--also", f"flood={urls['flood']}"]
        cloud = await start(
            *emulated, "cloud", "--node-id", "shared", "--emulate-ms-per-image", str(_CLOUD_MS), "--threads", "1", *both
        )
        one, flood = [await stack.enter_async_context(AsyncClient(urls[name])) for name in _WINDOWS]
        for client in (one, flood):
            await wait_for_devices(client, lambda found: "" if len(found) == 2 else "a node is missing")
        yield _Fleet(cloud_url=cloud, one=one, flood=flood)


async def _single_ms(client: AsyncClient, image: np.ndarray) -> float:
    """Milliseconds until the fine answer for one image."""
    began, said = time.perf_counter(), ""
    async for event in client.classify(image[None], scheme="end-cloud"):
        if isinstance(event, FineResults):
            return (time.perf_counter() - began) * 1000
        if isinstance(event, FallbackResults):
            said = event.results[0].fallback or ""
    raise ServiceFailed(f"a single request got no fine answer: {said}")


async def _job(client: AsyncClient, images: np.ndarray) -> float:
    """Seconds of a job, all of whose images must get a fine answer."""
    began = time.perf_counter()
    job = await client.wait(
        await client.submit(images, scheme="end-cloud", on_upstream_loss="wait"), budget_s=_BUDGET_S
    )
    if job.answered_fine != len(images):
        raise ServiceFailed(f"{len(images) - job.answered_fine} images got no fine answer")
    return time.perf_counter() - began


def missed(point: Mapping[str, Any]) -> list[str]:
    """Targets that a measurement misses, one sentence each."""
    found = []
    if point["share"] < _LEAST_SHARE:
        found.append(f"it keeps {point['share']:.2f} of the throughput, below {_LEAST_SHARE:g}")
    if not point["flooded"]:
        found.append("the flood ended too early: use shorter jobs")
    return found


class Shares(Experiment):
    """Throughput that one of two schedulers keeps at a cloud node that the other one floods."""

    name = "shares"
    options = ShareOptions
    quick = "500 images and 20 single requests"
    ignores = frozenset({"tasks", "data"})
    profile = None

    async def measure(self, run: Run, chosen: ShareOptions) -> None:
        run.config |= {"cloud_ms": _CLOUD_MS, "end_ms": _END_MS, "windows": _WINDOWS, "flood_jobs": _FLOOD_JOBS}
        run.config |= {"images": chosen.images, "singles": chosen.singles}
        run.expect(1)
        images = np.random.default_rng(0).integers(0, 256, (chosen.images, 32, 32, 3), np.uint8)
        with run.step("two schedulers, one cloud node"):
            async with _fleet(run.folder / "state") as fleet:
                point = await self._measure(fleet, images, chosen.singles)
        run.add(**point)

    async def _measure(self, fleet: _Fleet, images: np.ndarray, singles: int) -> dict[str, Any]:
        await _job(fleet.one, images[:50])  # connections, and what is made once
        alone_s = await _job(fleet.one, images)
        alone_ms = [await _single_ms(fleet.one, images[0]) for _ in range(singles)]
        flood: list[Job] = [
            await fleet.flood.submit(images, scheme="end-cloud", on_upstream_loss="wait") for _ in range(_FLOOD_JOBS)
        ]
        before = await fleet.answered()
        while (await fleet.answered())["flood"] == before["flood"]:
            await _single_ms(fleet.one, images[0])
        before = await fleet.answered()
        both_s = await _job(fleet.one, images)
        after = await fleet.answered()
        flooded_ms = [await _single_ms(fleet.one, images[0]) for _ in range(singles)]
        flooded = not (await fleet.flood.job(flood[-1])).done
        for job in flood:
            with contextlib.suppress(Conflict):  # it is done
                await fleet.flood.cancel(job)
        own, other = (after[name] - before[name] for name in _WINDOWS)
        return {
            "alone_images_per_s": len(images) / alone_s,
            "images_per_s": own / both_s,
            "flood_images_per_s": other / both_s,
            "share": own / (own + other),
            "of_alone": alone_s / both_s,
            "flooded": flooded,
            "alone_p50_ms": percentile(sorted(alone_ms), 50),
            "alone_p99_ms": percentile(sorted(alone_ms), 99),
            "flooded_p50_ms": percentile(sorted(flooded_ms), 50),
            "flooded_p99_ms": percentile(sorted(flooded_ms), 99),
            "samples": {"alone_ms": alone_ms, "flooded_ms": flooded_ms},
        }

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [
            {**{name: value for name, value in point.items() if name != "samples"}, "missed": missed(point)}
            for point in record["points"]
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings=" | ".join(
                [
                    "without the flood, images/s",
                    "with the flood, images/s",
                    "flood, images/s",
                    "share",
                    "with / without",
                    "single requests without it, p50 / p99 ms",
                    "with it, p50 / p99 ms",
                    "targets",
                ]
            ),
            rows=[
                [
                    f"{row['alone_images_per_s']:.0f}",
                    f"{row['images_per_s']:.0f}",
                    f"{row['flood_images_per_s']:.0f}",
                    f"{row['share']:.3f}",
                    f"{row['of_alone']:.3f}",
                    f"{row['alone_p50_ms']:.1f} / {row['alone_p99_ms']:.1f}",
                    f"{row['flooded_p50_ms']:.1f} / {row['flooded_p99_ms']:.1f}",
                    "; ".join(row["missed"]) or "all reached",
                ]
                for row in self.rows(record)
            ],
        )


SHARES = Shares()
