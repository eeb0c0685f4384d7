"""`terrace classify`: images in, answers out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from terrace.console import percent, plain_table, print_json, screen, tier_text
from terrace.following import follow
from terrace.options import DEFAULT_URL, Json, SchedulerUrl, connect
from terrace.report import job_summary
from terrace.sources import FOLDER_LABELS, open_source
from tierkit.client import ImageResult, Job
from tierkit.types import Privacy, Recovery, Scheme, Tier, UpstreamLoss

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_LISTED_IMAGES = 20
"""Up to so many images, each answer is shown; beyond, only what they come to."""


@app.command()
def classify(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCES",
            help="Image files, folders, .zip, .npz or .npy files; or 'sample', 'cifar100:test', 'cifar100:train'.",
            show_default=False,
        ),
    ],
    scheduler: SchedulerUrl = DEFAULT_URL,
    scheme: Annotated[
        Scheme | None, typer.Option(help="Who serves after the end device. Default: as the scheduler says.")
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="True classes, to report accuracy: a file (.json list, .csv with name,label, or one per line),"
            f" or '{FOLDER_LABELS}' for the name of each image's folder."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images per task. Default: 50.")] = None,
    deadline_s: Annotated[float | None, typer.Option("--deadline", help="Seconds until the job must be done.")] = None,
    task_deadline_s: Annotated[
        float | None,
        typer.Option("--task-deadline", help="Seconds until a task's fine answer; then the coarse stands."),
    ] = None,
    privacy: Annotated[Privacy | None, typer.Option(help="In which form images may leave trusted nodes.")] = None,
    recovery: Annotated[Recovery | None, typer.Option(help="What happens to a task whose attempt failed.")] = None,
    on_upstream_loss: Annotated[
        UpstreamLoss | None, typer.Option(help="What happens when no upper node answers.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="A name for the job.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write one result per image to this file (.jsonl or .csv).", dir_okay=False)
    ] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="TERRACE_DATA", help="Folder of the CIFAR-100 data set.", file_okay=False)
    ] = None,
    json: Json = False,
) -> None:
    """Classify images: a coarse answer at once, the fine one a little later."""
    if out is not None and out.suffix.lower() not in (".jsonl", ".csv"):
        raise typer.BadParameter("the name of the file must end in .jsonl or .csv", param_hint="--out")
    source = open_source(sources, labels=labels, data=data)
    with connect(scheduler) as client:
        job = client.submit(
            source.images,
            labels=source.labels,
            scheme=scheme,
            batch_size=batch_size,
            deadline_s=deadline_s,
            task_deadline_s=task_deadline_s,
            privacy=privacy,
            recovery=recovery,
            on_upstream_loss=on_upstream_loss,
            name=name or source.title,
        )
        try:
            job = follow(client, job, screen(stderr=True))
        except KeyboardInterrupt:
            typer.echo(f"the job goes on without us: terrace jobs wait {job.id}", err=True)
            raise
        if out is not None:
            client.save_results(job, out, format="csv" if out.suffix.lower() == ".csv" else "jsonl")
        few = job.images <= _LISTED_IMAGES
        results = list(client.results(job)) if few or (json and out is None) else []
    if json:
        print_json({"job": job, "results": results} if out is None else {"job": job, "out": str(out)})
    else:
        _show(job, results, out)
    if job.failed_images or job.answered_coarse < job.images:
        raise typer.Exit(1)


def _show(job: Job, results: list[ImageResult], out: Path | None) -> None:
    console = screen()
    if results:
        console.print(answers_table(results))
    console.print(job_summary(job))
    if out is not None:
        console.print(f"results in {out}")
    else:
        console.print(f"[dim]results: terrace jobs results {job.id}[/dim]")


def answers_table(results: list[ImageResult]) -> Table:
    """One line per image: its coarse and its fine answer."""
    table = plain_table("image", "coarse", "", "fine", " ", "by", right=("", " "))
    for result in results:
        coarse, fine = result.coarse, result.fine
        table.add_row(
            result.name or str(result.index),
            coarse.label if coarse else "",
            percent(coarse.confidence) if coarse else "",
            fine.label if fine else (result.error or result.fallback or ""),
            percent(fine.confidence) if fine else "",
            tier_text(fine.node, fine.tier) if fine else tier_text(coarse.node if coarse else "", Tier.END),
        )
    return table
