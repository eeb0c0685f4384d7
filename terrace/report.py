"""Summaries of jobs and networks for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from encryption.policy import Form, Trust, decide_form
from models.manifest import Manifest
from terrace.console import Column, Listing, image_count, milliseconds, node_order, percent, tier_text
from tierkit.client import Job, JobState
from tierkit.plaintext import harmless
from tierkit.types import OnBadInput, Privacy, Scheme, Tier
from tierkit.wire.api import SentShare

__all__ = ["answer_names", "check_answers", "job_summary", "networks_see", "tier_networks", "unanswered"]

_NAME_WIDTH = 40
_LISTED_DAMAGED = 20

_STATE_STYLES = {JobState.COMPLETED: "green", JobState.FAILED: "red", JobState.CANCELLED: "yellow"}


def job_summary(job: Job, *, damaged: bool = True) -> RenderableType:
    """Everything that a finished (or running) job has to tell, in about fifteen lines.

    Args:
        damaged: list the images that cannot be read.
    """
    parts: list[RenderableType] = [_headline(job), Padding(_answers(job), (1, 0, 0, 0), expand=False)]
    if job.damaged and damaged:
        parts.append(Padding(_damaged(job), (1, 0, 0, 0), expand=False))
    if job.by_node:
        parts.append(Padding(_shares(job), (1, 0, 0, 0), expand=False))
    if job.sent_up:
        parts.append(Padding(_escalation(job), (1, 0, 0, 0), expand=False))
    if features := {form: share for form, share in job.sent.items() if form != Form.PIXELS}:
        parts.append(Padding(_encoding(features), (1, 0, 0, 0), expand=False))
    if job.mapping and job.scheme is not Scheme.ADAPTIVE:  # which sends each task where it is done first
        parts.append(Padding(_mapping(job), (1, 0, 0, 0), expand=False))
    return Group(*parts)


def unanswered(job: Job) -> int:
    """Number of images without an answer, except skipped ones that cannot be read."""
    skipped = job.damaged_images if job.policy.get("on_bad_input") in (OnBadInput.SKIP, OnBadInput.ANSWER) else 0
    return max(0, job.failed_images - skipped)


def check_answers(job: Job) -> None:
    """Exit with code 1 unless the job is completed and each image is answered, or was skipped as unreadable."""
    if unanswered(job):
        have = "has" if job.failed_images == 1 else "have"
        missing = f"{job.failed_images:,} of {image_count(job.images)} {have} no answer"
        typer.echo(f"terrace: {missing}; 'terrace jobs results {harmless(job.id)}' says why.", err=True)
    if unanswered(job) or job.state is not JobState.COMPLETED:
        raise typer.Exit(1)


def _headline(job: Job) -> Text:
    """State, images, time and throughput in one line."""
    line = Text(image_count(job.images), style="bold")
    if job.elapsed_s is not None:
        line.append(f" in {job.elapsed_s:.2f} s", style="not bold")
    if job.images_per_s is not None:
        line.append(f", {job.images_per_s:,.1f} images/s", style="not bold")
    if job.site is not None:
        line.append(f", in {job.site}", style="not bold")
    if job.release is not None:
        line.append(f", with {job.release}", style="not bold")
    line.append("  ")
    line.append(job.state, style=_STATE_STYLES.get(job.state, "yellow"))
    if job.reason:
        line.append(f": {job.reason}", style="not bold")
    first, _ = answer_names(flat=job.flat)
    extras = [
        f"{count:,} {what}"
        for count, what in (
            (
                job.fallback,
                f"with {'a lower tier' if job.sent_up else f'the {first}'} answer standing",
            ),
            (job.failed_images - job.damaged_images, "without an answer"),
            (job.quarantined_images, "quarantined"),
            (job.damaged_answered, "damaged, answered as far as they can be decoded"),
            (job.resized_images, "resized"),
        )
        if count
    ]
    if extras:
        line.append(f"  ({', '.join(extras)})", style="not bold yellow")
    return line


def answer_names(*, flat: bool) -> tuple[str, str]:
    """Return the names of the answers of end devices and of upper tiers.

    Args:
        flat: true if both tiers answer the same classes.
    """
    return ("first", "upper") if flat else ("coarse", "fine")


def _escalation(job: Job) -> Text:
    """Share of the images that escalated to each tier, and of those that each tier answered."""
    line = Text("sent up  ", style="dim")
    for what, images in (("", job.sent_up), ("   answered by  ", job.final_tier)):
        shares = [
            Text.assemble(tier_text(tier, tier), (f" {percent(images[tier] / job.images)}", "not dim"))
            for tier in Tier
            if tier in images
        ]
        line.append(what).append_text(Text(",  ").join(shares))
    return line


def _encoding(features: Mapping[str, SentShare]) -> Text:
    """Bytes of the features of each encoder, and time of the nodes that encoded."""
    shown = []
    for form, share in features.items():
        tasks = max(1, share.tasks)
        sent = f" {share.upload_bytes / tasks / 1000:,.1f} kB and {share.encode_ms / tasks:,.1f} ms a task"
        shown.append(Text.assemble((form, "not dim cyan"), (sent, "not dim")))
    return Text("encoded  ", style="dim").append_text(Text(",  ").join(shown))


def _damaged(job: Job) -> RenderableType:
    """Table of the images that cannot be read."""
    table = Listing(Column(title="cannot be read", max_width=_NAME_WIDTH), Column(title="why"))
    for image in job.damaged[:_LISTED_DAMAGED]:
        table.add_row(image.name or str(image.index), image.reason)
    if (more := job.damaged_images - _LISTED_DAMAGED) > 0:
        table.add_row(f"{more:,} more", "")
    return table


def networks_see(info: Mapping[str, Any]) -> str:
    """Sentence on how the networks of a fleet fit pictures of other sizes."""
    seen: dict[str, None] = {}  # in the order of the networks
    for network in info.get("networks", ()):
        size = f"{network['width']} x {network['height']}"
        match network["resize"]:
            case "squash":
                how = "all of it, squashed" if network.get("resize_to") is None else "the middle, squashed"
            case "pad":
                how = "all of it, on black"
            case _:
                how = "the middle"
        seen[f"{network['tier']} {size} ({how})"] = None
    return f"networks see  {',  '.join(seen)}"


def tier_networks(manifest: Manifest, tiers: Iterable[str], untrusted: Collection[str] = ()) -> RenderableType:
    """Table of each tier's default network and its accuracy on the test images.

    An untrusted tier has the tail network for the features that `privacy=auto` sends.

    Raises:
        NotFound: there is no network for a tier.
        Forbidden: an untrusted tier's network has no encoder.
    """
    table = Table.grid(padding=(0, 2))
    for tier in tiers:
        network = manifest.default_for(tier)
        name, accuracy = network.name, network.accuracy
        if tier in untrusted:
            kinds = {encoder.kind for encoder in manifest.encoders if encoder.network == name}
            encoder = manifest.encoder(f"{name}.{decide_form(Privacy.AUTO, Trust.UNTRUSTED, kinds)}")
            name, accuracy = encoder.name, encoder.fine_accuracy
        elif len(several := manifest.candidates(tier)) > 1:
            name, accuracy = " or ".join(each.name for each in several), None
        # A network that was imported without labelled images has no accuracy.
        right = "" if accuracy is None else f"{percent(accuracy)} right"
        table.add_row(tier_text(tier, tier), name, f"{network.classes:,} classes", right)
    return table


def _mapping(job: Job) -> Text:
    """Upstream node of each end device."""
    pairs = sorted(job.mapping.items(), key=lambda pair: node_order(Tier.END, pair[0]))
    shown = [Text.assemble((end, "not dim cyan"), (f" → {upstream}", "not dim")) for end, upstream in pairs]
    return Text("mapping  ", style="dim").append_text(Text(",  ").join(shown))


def _answers(job: Job) -> RenderableType:
    table = Listing(
        Column(title="answer"),
        Column(title="images", rank=2, right=True),
        Column(title="accuracy", right=True),
        Column(title="p50", rank=1, right=True),
        Column(title="p99", rank=3, right=True),
    )
    lower, upper = answer_names(flat=job.flat)
    rows = [(lower, job.answered_coarse, job.coarse_accuracy, job.coarse_p50_ms, job.coarse_p99_ms)]
    if job.scheme is not Scheme.END:
        rows.append((upper, job.answered_fine, job.fine_accuracy, job.fine_p50_ms, job.fine_p99_ms))
    for answer, images, accuracy, p50_ms, p99_ms in rows:
        table.add_row(answer, f"{images:,}", percent(accuracy), milliseconds(p50_ms), milliseconds(p99_ms))
    if job.sent_up and job.final_coarse_accuracy is not None:
        stands = "as it stands" if job.flat else "coarse, as it stands"
        table.add_row(stands, f"{job.images:,}", percent(job.final_coarse_accuracy), "", "")
    elif job.coarse_from_fine_accuracy is not None and not job.flat:
        table.add_row("coarse, from fine", f"{job.answered_fine:,}", percent(job.coarse_from_fine_accuracy), "", "")
    return table


def _shares(job: Job) -> RenderableType:
    table = Listing(
        Column(title="node"),
        Column(title="tier", rank=1),
        *(Column(title=name, right=True) for name in answer_names(flat=job.flat)),
        Column(title="share", rank=2, right=True),
    )
    for node_id, share in sorted(job.by_node.items(), key=lambda item: node_order(item[1].tier, item[0])):
        done, total = share.fine_images, job.answered_fine
        if share.tier is Tier.END:
            done, total = share.coarse_images, job.answered_coarse
        table.add_row(
            tier_text(node_id, share.tier),
            share.tier,
            f"{share.coarse_images:,}" if share.coarse_images else "",
            f"{share.fine_images:,}" if share.fine_images else "",
            percent(done / total if total else None),
        )
    return table
