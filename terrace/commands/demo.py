"""`terrace demo`: the whole of Terrace in a few seconds, on this machine, with the bundled sample."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.live import Live

from models.data import ImageSet, read_sample
from models.hierarchy import bundled_hierarchy
from models.manifest import load_manifest
from terrace.cli import INTERRUPTED
from terrace.commands.up import trusted_tiers, with_models, without_pixels
from terrace.console import print_json, screen
from terrace.demo_screen import DemoScreen
from terrace.options import Json, ModelSet, Untrusted, with_options
from terrace.report import answer_names, job_summary, tier_networks
from terrace.stoppable import run_stoppable
from tierkit.client import AsyncClient, Job, NodeShare
from tierkit.fleet import MAX_NODES, SCHEDULER, Exit, Fleet, LaunchOptions, launch, local_plan
from tierkit.types import Scheme, Tier

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_SAMPLE_IMAGES = 1000
_REPORTED = {
    *("answered_coarse", "answered_fine", "fallback", "images_per_s", "mapping", "scheme", "sent"),
    *("coarse_accuracy", "fine_accuracy", "coarse_from_fine_accuracy"),
    *("coarse_p50_ms", "coarse_p99_ms", "fine_p50_ms", "fine_p99_ms"),
}
"""Fields of the job that the report repeats."""
_JOB_BUDGET_S = 120.0
_JOIN_BUDGET_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoNodes:
    """Options of `terrace demo` for the number of nodes and the tiers that must not see pixels."""

    end: Annotated[int, typer.Option(min=1, max=MAX_NODES, help="Number of end nodes.")] = 2
    edge: Annotated[int, typer.Option(min=0, max=MAX_NODES, help="Number of edge nodes.")] = 1
    cloud: Annotated[int, typer.Option(min=0, max=MAX_NODES, help="Number of cloud nodes.")] = 1
    untrusted: Untrusted = None


@app.command()
@with_options
def demo(
    images: Annotated[
        int, typer.Option(min=1, max=_SAMPLE_IMAGES, help="Number of images from the bundled sample.")
    ] = 300,
    *,
    nodes: DemoNodes,
    models: ModelSet = None,
    json: Json = False,
) -> None:
    """Start a fleet, classify images of the bundled sample on all three tiers, show the results, and stop the fleet."""
    counts = {Tier.END: nodes.end, Tier.EDGE: nodes.edge, Tier.CLOUD: nodes.cloud}
    console = Console(quiet=True) if json else screen()
    report = run_stoppable(lambda: _demo(counts, images, nodes.untrusted or [], models, console))
    if report is None:
        raise typer.Exit(INTERRUPTED)
    if json:
        print_json(report)
    if report["lost"]:
        raise typer.Exit(1)


async def _demo(
    counts: Mapping[Tier, int], images: int, untrusted: Sequence[str], models: Path | None, console: Console
) -> dict[str, Any]:
    began = time.monotonic()
    sample = read_sample().take(np.arange(images))
    hierarchy = bundled_hierarchy(sample.hierarchy_name)
    manifest = load_manifest(models)
    served = manifest.hierarchy
    known, names = served == hierarchy, answer_names(flat=served.is_flat)
    console.print(_opening(counts, untrusted))

    def tell_exit(end: Exit) -> None:
        screen(stderr=True).print(f"[bold red]{end}[/bold red]; the others go on")

    with TemporaryDirectory(prefix="terrace-demo-") as folder, ExitStack() as waiting:
        plan = local_plan(
            counts,
            # One end device per edge node, as the paper ran it: the others forward to the cloud, so all tiers work.
            scheduler={"port": 0, "trusted": trusted_tiers(untrusted), "n_map": 1, "state": Path(folder) / "state"},
            tiers=without_pixels(untrusted),
        )
        plan = with_models(plan, models)
        console.print(tier_networks(manifest, [tier for tier, count in counts.items() if count], untrusted))
        console.print()
        waiting.enter_context(console.status("[dim]starting the fleet[/dim]"))
        async with launch(plan, Path(folder), LaunchOptions(on_exit=tell_exit)) as fleet:
            await fleet.join(budget_s=_JOIN_BUDGET_S)
            waiting.close()
            view = DemoScreen(sample, hierarchy, known=known, names=names, ready_s=time.monotonic() - began)
            job = await _classify(fleet, sample, view, console, labelled=known)
            report = _report(job, fleet, sample)
    report["seconds"] = round(time.monotonic() - began, 3)
    console.print(job_summary(job))
    console.print(f"\n[dim]everything is stopped again; {report['seconds']:.1f} s in all[/dim]")
    return report


async def _classify(fleet: Fleet, sample: ImageSet, view: DemoScreen, console: Console, *, labelled: bool) -> Job:
    """Submit the images as one job, with their classes if `labelled`, and show its answers until it is done."""
    async with AsyncClient(fleet.scheduler_url) as client:
        labels = sample.fine if labelled else None
        job = await client.submit(sample.images, labels=labels, scheme=Scheme.MAPPING, name="demo")
        with _shown(view, console):
            async for event in client.events(job, budget_s=_JOB_BUDGET_S):
                view.take(event)
        return await client.job(job)


@contextmanager
def _shown(view: DemoScreen, console: Console) -> Iterator[None]:
    """The view, alive in a terminal; printed once, at the end, into anything else."""
    if console.is_terminal:
        with Live(view, console=console, refresh_per_second=20):
            yield
    else:
        yield
        console.print(view)


def _opening(counts: Mapping[Tier, int], untrusted: Sequence[str]) -> str:
    nodes = ", ".join(f"{count} {tier}" for tier, count in counts.items())
    text = f"[bold]Terrace demo[/bold]  a scheduler and {nodes} nodes on this machine\n"
    if hidden := [tier for tier in untrusted if counts[Tier(tier)]]:
        text += f"[dim]untrusted: {', '.join(hidden)}; features go there instead of pixels[/dim]\n"
    return text


def _report(job: Job, fleet: Fleet, sample: ImageSet) -> dict[str, Any]:
    """Return the report that `--json` prints."""
    nodes = []
    for service in fleet.services.values():
        if service.plan.kind != SCHEDULER:
            share = job.by_node.get(service.name, NodeShare(tier=Tier(service.plan.kind)))
            nodes.append({"node_id": service.name, "url": service.url, **share.model_dump()})
    return {
        "images": len(sample),
        "lost": len(sample) - job.answered_coarse,
        **job.model_dump(include=_REPORTED),
        "nodes": nodes,
        "job_s": job.elapsed_s,
    }
