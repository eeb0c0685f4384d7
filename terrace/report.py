"""A job as a person reads it: totals, both answers side by side, and who gave them."""

from __future__ import annotations

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from terrace.console import Column, Listing, image_count, milliseconds, node_order, percent, tier_text
from tierkit.client import Job, JobState
from tierkit.plaintext import harmless
from tierkit.types import Scheme, Tier

__all__ = ["check_answers", "escalation_line", "headline", "job_summary", "mapping_line"]

_STATE_STYLES = {JobState.COMPLETED: "green", JobState.FAILED: "red", JobState.CANCELLED: "yellow"}


def job_summary(job: Job) -> RenderableType:
    """Everything that a finished (or running) job has to tell, in about fifteen lines."""
    parts: list[RenderableType] = [headline(job), Padding(_answers(job), (1, 0, 0, 0), expand=False)]
    if job.by_node:
        parts.append(Padding(_shares(job), (1, 0, 0, 0), expand=False))
    if job.sent_up:
        parts.append(Padding(escalation_line(job), (1, 0, 0, 0), expand=False))
    if job.mapping and job.scheme is not Scheme.ADAPTIVE:  # which sends each task where it is done first
        parts.append(Padding(mapping_line(job), (1, 0, 0, 0), expand=False))
    return Group(*parts)


def check_answers(job: Job) -> None:
    """The end of a command that has waited for a job: exit code 1 unless the job was completed and each image has an
    answer."""
    if job.failed_images:
        missing = f"{job.failed_images:,} of {image_count(job.images)} have no answer"
        typer.echo(f"terrace: {missing}; 'terrace jobs results {harmless(job.id)}' says why.", err=True)
    if job.failed_images or job.state is not JobState.COMPLETED:
        raise typer.Exit(1)


def headline(job: Job) -> Text:
    """State, images, time and throughput in one line."""
    line = Text(image_count(job.images), style="bold")
    if job.elapsed_s is not None:
        line.append(f" in {job.elapsed_s:.2f} s", style="not bold")
    if job.images_per_s is not None:
        line.append(f", {job.images_per_s:,.1f} images/s", style="not bold")
    line.append("  ")
    line.append(job.state, style=_STATE_STYLES.get(job.state, "yellow"))
    if job.reason:
        line.append(f": {job.reason}", style="not bold")
    extras = [
        f"{count:,} {what}"
        for count, what in (
            (job.fallback, f"with {'a lower tier' if job.sent_up else 'the coarse'} answer standing"),
            (job.failed_images, "without an answer"),
            (job.quarantined_images, "quarantined"),
            (job.resized_images, "resized"),
        )
        if count
    ]
    if extras:
        line.append(f"  ({', '.join(extras)})", style="not bold yellow")
    return line


def escalation_line(job: Job) -> Text:
    """Which share of the images went up to each tier, and whose answers stand."""
    line = Text("sent up  ", style="dim")
    for what, images in (("", job.sent_up), ("answered by  ", job.final_tier)):
        if what:
            line.append(f"   {what}")
        shares = [(tier, images[tier]) for tier in Tier if tier in images]
        for position, (tier, count) in enumerate(shares):
            line.append(",  " if position else "")
            line.append_text(tier_text(tier, tier))
            line.append(f" {percent(count / job.images)}", style="not dim")
    return line


def mapping_line(job: Job) -> Text:
    """Which end device forwards where."""
    line = Text("mapping  ", style="dim")
    for position, (end, upstream) in enumerate(
        sorted(job.mapping.items(), key=lambda pair: node_order(Tier.END, pair[0]))
    ):
        line.append(",  " if position else "")
        line.append(end, style="not dim cyan")
        line.append(f" → {upstream}", style="not dim")
    return line


def _answers(job: Job) -> RenderableType:
    table = Listing(
        Column(title="answer"),
        Column(title="images", rank=2, right=True),
        Column(title="accuracy", right=True),
        Column(title="p50", rank=1, right=True),
        Column(title="p99", rank=3, right=True),
    )
    table.add_row(
        "coarse",
        f"{job.answered_coarse:,}",
        percent(job.coarse_accuracy),
        milliseconds(job.coarse_p50_ms),
        milliseconds(job.coarse_p99_ms),
    )
    if job.scheme is not Scheme.END:
        table.add_row(
            "fine",
            f"{job.answered_fine:,}",
            percent(job.fine_accuracy),
            milliseconds(job.fine_p50_ms),
            milliseconds(job.fine_p99_ms),
        )
    if job.sent_up and job.final_coarse_accuracy is not None:
        table.add_row("coarse, as it stands", f"{job.images:,}", percent(job.final_coarse_accuracy), "", "")
    elif job.coarse_from_fine_accuracy is not None:
        table.add_row("coarse, from fine", f"{job.answered_fine:,}", percent(job.coarse_from_fine_accuracy), "", "")
    return table


def _shares(job: Job) -> RenderableType:
    table = Listing(
        Column(title="node"),
        Column(title="tier", rank=1),
        Column(title="coarse", right=True),
        Column(title="fine", right=True),
        Column(title="share", rank=2, right=True),
    )
    shares = sorted(job.by_node.items(), key=lambda item: node_order(item[1].tier, item[0]))
    for node_id, share in shares:
        done, total = (
            (share.coarse_images, job.answered_coarse)
            if share.tier is Tier.END
            else (share.fine_images, job.answered_fine)
        )
        table.add_row(
            tier_text(node_id, share.tier),
            share.tier,
            f"{share.coarse_images:,}" if share.coarse_images else "",
            f"{share.fine_images:,}" if share.fine_images else "",
            percent(done / total if total else None),
        )
    return table
