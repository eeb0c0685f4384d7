"""Table 2 of the paper: inference and processing time on each tier, with and without the latency of the links.

One node of each tier gets one task of 50 images at a time (window 1), through the scheduler like any job. The
processing time is what the scheduler sees. For an end device, it lasts from the dispatch of a task to its coarse
answer; for an upstream node, from the coarse to the fine answer. Inference and link are emulated. The rest is the
services' own overhead: encoding and decoding of tasks, HTTP, the event loop, the hand-over to the inference thread. The
time from an answer to the dispatch of the next task is listed separately. The inference time is the mean that the node
measured over the same tasks, and it is used for the median as well. On a tier whose speed is not emulated, it is the
time of the real network on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.harness import MOST_TASKS, Experiment, Options, Record, Run, Table, cell, option
from experiments.plots import Figures, measured, paper
from experiments.profile import Profile
from experiments.record import spread
from experiments.testbed import BATCH, check_fleet, read_metrics
from tierkit.client import AsyncClient
from tierkit.errors import UpstreamError
from tierkit.types import Scheme, Tier

__all__ = ["PAPER", "TABLE2"]

PAPER: Mapping[tuple[str, bool], tuple[float, float]] = {
    ("end", False): (7.41, 10.4),
    ("edge", False): (5.99, 8.4),
    ("edge", True): (5.99, 18.3),
    ("cloud", False): (7.36, 10.8),
    ("cloud", True): (7.36, 31.0),
}
"""The paper's Table 2: inference and processing time in ms/image, by tier, and whether its link has latency."""

_LINKS = ("end-edge", "end-cloud")
"""Paths that lie within what is measured."""

_PAPERS_LINK_S = {Tier.EDGE: 0.5, Tier.CLOUD: 1.0}
"""Latency in the rows with latency, there and back."""

_SCHEMES = {Tier.END: Scheme.END, Tier.EDGE: Scheme.END_EDGE, Tier.CLOUD: Scheme.END_CLOUD}
_JOB_BUDGET_S = 900.0
_COMPUTED = re.compile(r"^terrace_(compute_duration_seconds|batch_size)_sum\{.*\} (\S+)$", re.MULTILINE)
_INFERENCE = {**measured(1), "linestyle": "", "marker": "_", "markersize": 22, "markeredgewidth": 2}


# --- measuring ------------------------------------------------------------------------------------------------------


class Chosen(Options):
    """Number of measurements."""

    tasks: int = option(50, "Tasks of each row.", quick=10, min=1, max=MOST_TASKS)


async def _computed(url: str, before: Sequence[float] = (0.0, 0.0)) -> tuple[float, float]:
    """Seconds that a node's network has worked, and images that it has answered, since `before`."""
    sums = dict.fromkeys(("compute_duration_seconds", "batch_size"), 0.0)
    for name, value in _COMPUTED.findall(await read_metrics(url)):
        sums[name] += float(value)
    seconds, images = (now - then for now, then in zip(sums.values(), before, strict=True))
    return seconds, images


async def _one_row(client: AsyncClient, run: Run, tier: Tier, tasks: int) -> tuple[list[float], float | None]:
    """Milliseconds of this tier's stage for each task, and the mean between an answer and the next task's dispatch."""
    images = run.images.take(np.arange(tasks * BATCH) % len(run.images)).images
    job = await client.submit(images, scheme=_SCHEMES[tier], batch_size=BATCH, name=f"table2 {tier}")
    job = await client.wait(job, budget_s=_JOB_BUDGET_S)
    firsts = [result async for result in client.results(job) if result.index % BATCH == 0]
    coarse_ms = [each.ms for result in firsts if (each := result.coarse) and each.ms is not None]
    if tier is Tier.END:
        stages, ends = coarse_ms, coarse_ms
    else:
        ends = [fine.ms for result in firsts if (fine := result.fine) and fine.ms is not None]
        stages = [fine - coarse for fine, coarse in zip(ends, coarse_ms, strict=False)]
    if len(stages) != tasks or job.elapsed_s is None:
        why = job.reason or next((result.fallback for result in firsts if result.fallback), "no answer came")
        raise UpstreamError(f"{tasks - len(stages)} of {tasks} tasks were not answered by the tier {tier}: {why}")
    between_ms = (job.elapsed_s * 1000 - sum(ends)) / len(ends)
    if between_ms < 0:
        run.note("no time between two tasks where a task that was lost on its way was sent again beside the next one")
        return stages, None
    return stages, between_ms


# --- from the record ------------------------------------------------------------------------------------------------


def _row(point: Mapping[str, Any]) -> dict[str, Any]:
    times = spread(point["stage_ms"])
    expected_ms = point["inference_ms_per_image"] * BATCH + point["link_s"] * 1000
    papers = _papers(point)
    return {
        "tier": point["tier"],
        "over_link": point["latency"],
        "link_s": point["link_s"],
        "inference_ms_per_image": point["inference_ms_per_image"],
        "processing_ms_per_image": round(times.mean / BATCH, 4),
        "min_processing_ms_per_image": round(times.minimum / BATCH, 4),
        "max_processing_ms_per_image": round(times.maximum / BATCH, 4),
        "overhead_ms_per_task": round(times.mean - expected_ms, 3),
        "median_overhead_ms_per_task": round(times.median - expected_ms, 3),
        "between_ms": None if point["between_ms"] is None else round(point["between_ms"], 3),
        "tasks": times.n,
        "paper_inference_ms_per_image": papers[0] if papers else None,
        "paper_processing_ms_per_image": papers[1] if papers else None,
    }


def _papers(point: Mapping[str, Any]) -> tuple[float, float] | None:
    """The paper's figures for the same inference time and latency."""
    found = PAPER.get((point["tier"], point["latency"]))
    link_s = _PAPERS_LINK_S.get(point["tier"]) if point["latency"] else 0.0
    same = found is not None and (point["emulated_ms_per_image"], point["link_s"]) == (found[0], link_s)
    return found if same else None


class Table2(Experiment):
    """Inference and processing time on each tier, with and without the latency of the links."""

    name = "table2"
    options = Chosen
    repeats = ("tasks", "tasks")
    quick = "{tasks_per_row} tasks for each row"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        tasks = chosen.tasks
        run.config |= {"tasks_per_row": tasks}
        check_fleet(run.profile)
        run.takes(tasks)
        near = run.profile.with_nodes(end=1, edge=1, cloud=1)
        used = near.model_copy(update={"path": {name: near.path[name] for name in _LINKS if name in near.path}})
        if limits := used.limits:
            run.note(f"the overhead holds the time that the images take over links of a limited bandwidth ({limits})")
        if any(spec.reset or spec.stall for spec in used.path.values()):
            run.note("the overhead holds what links lose: the time until a task's images have been sent again")
        fleets: list[tuple[Profile, list[Tier]]] = [
            (near.model_copy(update={"path": {}}), list(Tier)),
            (near, [tier for tier in (Tier.EDGE, Tier.CLOUD) if f"end-{tier}" in near.path]),
        ]

        run.expect(sum(len(tiers) for _, tiers in fleets))
        networks = await run.networks(near)
        for machines, tiers in fleets:
            if not tiers:
                continue
            latency = bool(machines.path)
            async with run.fleet(machines, networks, {"window": 1}) as (fleet, client):
                for tier in tiers:
                    link_s = 0.0 if tier is Tier.END else machines.round_trip_s(f"end-{tier}")
                    with run.step(f"{tier}, {link_s:g} s of latency"):
                        node = fleet.services[f"{tier}-1"].url
                        await _one_row(
                            client, run, tier, 1
                        )  # the first task opens the connections and allocates memory
                        before = await _computed(node)
                        stages_ms, between_ms = await _one_row(client, run, tier, tasks)
                        seconds, images = await _computed(node, before)
                    run.add(
                        tier=tier,
                        latency=latency,
                        inference_ms_per_image=seconds * 1000 / images,
                        emulated_ms_per_image=machines.compute_ms_per_image.of(tier),
                        link_s=link_s,
                        stage_ms=stages_ms,
                        images=images,
                        between_ms=between_ms,
                    )

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [_row(point) for point in record["points"]]

    def table(self, record: Record) -> Table:
        return Table(
            headings=(
                "tier | latency, s | inference, ms/image | processing, ms/image | paper | "
                "overhead, ms/task: mean | median | between two tasks, ms | tasks"
            ),
            spare=("tasks",),
            rows=[
                [
                    row["tier"],
                    "0, but a link" if row["over_link"] and not row["link_s"] else f"{row['link_s']:g}",
                    f"{row['inference_ms_per_image']:.4g}",
                    f"{row['processing_ms_per_image']:.3f}",
                    cell(row["paper_processing_ms_per_image"], "g"),
                    f"{row['overhead_ms_per_task']:.2f}",
                    f"{row['median_overhead_ms_per_task']:.2f}",
                    cell(row["between_ms"], ".2f"),
                    str(row["tasks"]),
                ]
                for row in self.rows(record)
            ],
        )

    def draw(self, record: Record, figures: Figures) -> None:
        rows = self.rows(record)
        places = range(len(rows))
        (axes,) = figures.panels(
            "table2",
            [f"one task of {BATCH} images at a time; mean of {rows[0]['tasks']}"],
            xlabel="tier, and latency of its link",
            ylabel="time (ms/image)",
            finding="The services add {:.1f} to {:.1f} ms to a task".format(
                *(pick(row["overhead_ms_per_task"] for row in rows) for pick in (min, max))
            ),
        )
        papers = [(place, row["paper_processing_ms_per_image"]) for place, row in zip(places, rows, strict=True)]
        known = [(place, ms) for place, ms in papers if ms is not None]
        if known:
            axes.plot(*zip(*known, strict=True), label="processing, paper", **{**paper(0), "linestyle": ""})
        axes.plot(
            places,
            [row["processing_ms_per_image"] for row in rows],
            label="processing",
            **{**measured(0), "linestyle": ""},
        )
        axes.plot(places, [row["inference_ms_per_image"] for row in rows], label="inference", **_INFERENCE)
        axes.set_xticks(places, [f"{row['tier']}, {row['link_s']:g} s" for row in rows])
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)


TABLE2 = Table2()
