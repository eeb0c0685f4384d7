"""`terrace classify`: images in, answers out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from terrace.console import Column, Listing, image_count, percent, print_json, screen, tier_text
from terrace.following import follow
from terrace.options import Json, LowestTier, connected
from terrace.outputs import check_out_file, format_of
from terrace.report import check_answers, job_summary, networks_see
from terrace.several import Answered, Parts, bounds_of, missing_text
from terrace.sources import FOLDER_LABELS, open_source
from tierkit.client import Client, ImageResult, Job, PolicyFields
from tierkit.errors import InvalidInput
from tierkit.picture_files import told
from tierkit.plaintext import one_line
from tierkit.types import EncodeOn, Escalate, FeatureForm, OnBadInput, Privacy, Recovery, Scheme, Tier, UpstreamLoss

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_LISTED_IMAGES = 20
"""Each answer is shown for up to this many images, only sums for more."""

_NAME_WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of `terrace classify`: the policy of the job, its labels, and where the results go."""

    scheme: Annotated[
        Scheme | None, typer.Option(help="Rule that selects the upstream node. Default: the scheduler's.")
    ] = None
    labels: Annotated[
        str | None,
        typer.Option(
            help="True classes, to report accuracy: a file (.json list, .csv with name,label, or one per line),"
            f" or '{FOLDER_LABELS}' for the name of each image's folder."
        ),
    ] = None
    site: Annotated[
        str | None, typer.Option(metavar="SITE", help="The site whose nodes answer. Default: the nodes of all sites.")
    ] = None
    release: Annotated[
        str | None,
        typer.Option(
            metavar="RELEASE",
            help="Release whose networks answer: NAME@NUMBER, or the number. Default: in force, or on trial.",
        ),
    ] = None
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images per task. Default: 50.")] = None
    deadline_s: Annotated[float | None, typer.Option("--deadline", help="Seconds until the job must be done.")] = None
    task_deadline_s: Annotated[
        float | None,
        typer.Option(
            "--task-deadline", help="Seconds for a task's fine answer; after that, the coarse answer is final."
        ),
    ] = None
    privacy: Annotated[Privacy | None, typer.Option(help="Form in which images may leave the end device.")] = None
    encode_on: Annotated[
        EncodeOn | None, typer.Option(help="Tier that encodes images for nodes that must not see them.")
    ] = None
    feature_form: Annotated[FeatureForm | None, typer.Option(help="Number format of encoded images.")] = None
    weight: Annotated[
        float | None, typer.Option(min=0.01, max=100, help="Share of the fleet relative to other jobs. Default: 1.")
    ] = None
    recovery: Annotated[Recovery | None, typer.Option(help="Action for a task whose attempt failed.")] = None
    on_upstream_loss: Annotated[UpstreamLoss | None, typer.Option(help="Action if no upstream node answers.")] = None
    on_bad_input: Annotated[
        OnBadInput | None,
        typer.Option(
            help="Action for damaged pictures: fail, skip them and answer the others, or answer the part of a "
            "JPEG that can be decoded."
        ),
    ] = None
    escalate: Annotated[
        Escalate | None, typer.Option(help="Which images go up a tier: all, or those whose answer is unsure.")
    ] = None
    escalate_from: Annotated[
        LowestTier | None, typer.Option(help="Lowest tier whose answer may be final, with --escalate.")
    ] = None
    escalate_accuracy: Annotated[
        float | None, typer.Option(help="With --escalate threshold: share of the upper network's accuracy to keep.")
    ] = None
    escalate_budget: Annotated[
        float | None, typer.Option(help="With --escalate budget: share of the images that may go up.")
    ] = None
    name: Annotated[str | None, typer.Option(help="A name for the job.")] = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write one result per image to this file (.jsonl or .csv), which appears when all results "
            "are there. A source too large for one upload becomes several jobs; if the command is "
            "interrupted, run it again to continue.",
            dir_okay=False,
        ),
    ] = None
    bom: Annotated[
        bool, typer.Option("--bom", help="With --out FILE.csv: begin with a byte order mark, as spreadsheets want it.")
    ] = False
    data: Annotated[
        Path | None, typer.Option(envvar="TERRACE_DATA", help="Folder of the CIFAR-100 data set.", file_okay=False)
    ] = None

    def __post_init__(self) -> None:
        if self.out is not None:
            check_out_file(self.out)
        if self.bom and (self.out is None or self.out.suffix.lower() != ".csv"):
            raise typer.BadParameter("it goes with --out FILE.csv", param_hint="--bom")

    def policy(self, title: str) -> PolicyFields:
        """Return the policy fields of a job, which is named `title` by default."""
        return {
            "scheme": self.scheme,
            "batch_size": self.batch_size,
            "deadline_s": self.deadline_s,
            "task_deadline_s": self.task_deadline_s,
            "privacy": self.privacy,
            "encode_on": self.encode_on,
            "feature_form": self.feature_form,
            "weight": self.weight,
            "recovery": self.recovery,
            "on_upstream_loss": self.on_upstream_loss,
            "on_bad_input": self.on_bad_input,
            "escalate": self.escalate,
            "escalate_from": self.escalate_from,
            "escalate_accuracy": self.escalate_accuracy,
            "escalate_budget": self.escalate_budget,
            "name": self.name or title,
            "site": self.site,
        }


@app.command()
@connected
def classify(
    client: Client,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCES",
            help="Image files, folders, .zip, .npz or .npy files; or 'sample', 'cifar100:test', 'cifar100:train'.",
            show_default=False,
        ),
    ],
    options: JobOptions,
    json: Json = False,
) -> None:
    """Classify images: a coarse answer at once, the fine one a little later."""
    out, bom = options.out, options.bom
    source = open_source(sources, labels=options.labels, data=options.data)
    for remark in (told(source.left_out), *source.remarks):
        _say(remark)
    # An upload may take minutes; this fails within seconds if no scheduler answers.
    info = client.info()
    true = source.labels_for(info["hierarchy"]["fine"])
    policy = options.policy(source.title)
    if options.release is not None:
        policy["release"] = client.release(options.release).release
    if isinstance(source.images, Mapping):
        parts = Parts(client, source.images, true, bounds_of(info["limits"]), policy)
        if parts.several(out):
            jobs = parts.answered(out, bom=bom, say=_say)
            _show_several(jobs, out, source.left_out, json=json)
            return
    job = client.submit(source.images, labels=true, **policy)
    left_out = Counter(source.left_out) + Counter(job.left_out)
    _say(told(job.left_out))
    try:
        job = follow(client, job)
    except KeyboardInterrupt:
        typer.echo(f"the job goes on without us: terrace jobs wait {job.id}", err=True)
        raise
    if out is not None:
        try:
            client.save_results(job, out, format=format_of(out), bom=bom)
        except OSError as exc:
            hint = f"get the results with 'terrace jobs results {job.id}'"
            raise InvalidInput(f"cannot write {out} ({exc.strerror}); {hint}") from exc
    few = job.images <= _LISTED_IMAGES
    results = list(client.results(job)) if few or (json and out is None) else []
    if json:
        found: dict[str, Any] = {"results": results} if out is None else {"out": str(out)}
        print_json({"job": job, **found, "left_out": left_out})
    else:
        _show(job, results, out, networks_see(info) if job.resized_images else "")
    check_answers(job)


def _say(text: str) -> None:
    """Print a note on standard error, unless it is empty."""
    if text:
        screen(stderr=True).print(one_line(text), style="yellow", soft_wrap=True, markup=False)


def _show_several(answered: Answered, out: Path | None, left_out: Mapping[str, int], *, json: bool) -> None:
    if json:
        print_json({"jobs": answered.jobs, "out": None if out is None else str(out), "left_out": left_out})
    else:
        missing = missing_text(answered.unanswered, answered.damaged)
        where = f"results in {out}" if out is not None else "results: terrace jobs results JOB"
        console = screen()
        console.print(f"{image_count(answered.images)} in {answered.parts} jobs{missing}", style="bold")
        console.print(where, soft_wrap=True, markup=False)
    if answered.unanswered or not answered.completed:
        raise typer.Exit(1)


def _show(job: Job, results: list[ImageResult], out: Path | None, seen: str) -> None:
    console = screen()
    if results:
        console.print(answers_table(results, flat=job.flat), crop=False)
    # The table of answers says why an image has none.
    console.print(job_summary(job, damaged=not results))
    if seen:
        console.print(seen, style="dim", soft_wrap=True, markup=False)
    if out is not None:
        console.print(f"results in {out}", soft_wrap=True, markup=False)
    else:
        console.print(f"results: terrace jobs results {job.id}", style="dim", soft_wrap=True, markup=False)


def answers_table(results: list[ImageResult], *, flat: bool = False) -> Listing:
    """Return one line per image: its coarse and its fine answer.

    Args:
        flat: true if both name the same classes. The final answer then comes first, and the end device's after it.
    """
    if flat:
        return _flat_table(results)
    # Never drop the column of coarse answers if some image has no other.
    alone = any(result.coarse and not result.fine for result in results)
    placed = any(result.site for result in results)
    table = Listing(
        Column(title="image", max_width=_NAME_WIDTH),
        *([Column(title="site", rank=5)] if placed else []),
        Column(title="coarse", rank=0 if alone else 1),
        Column(title="", rank=4, right=True),
        Column(title="fine"),
        Column(title=" ", rank=3, right=True),
        Column(title="by", rank=2),
    )
    for result in results:
        coarse, fine = result.coarse, result.fine
        table.add_row(
            result.name or str(result.index),
            *([result.site or ""] if placed else []),
            coarse.label if coarse else "",
            percent(coarse.confidence) if coarse else "",
            fine.label if fine else (result.error or result.fallback or ""),
            percent(fine.confidence) if fine else "",
            tier_text(fine.node, fine.tier) if fine else tier_text(coarse.node if coarse else "", Tier.END),
        )
    return table


def _flat_table(results: list[ImageResult]) -> Listing:
    placed = any(result.site for result in results)
    table = Listing(
        Column(title="image", max_width=_NAME_WIDTH),
        *([Column(title="site", rank=5)] if placed else []),
        Column(title="label"),
        Column(title="", rank=3, right=True),
        Column(title="by", rank=2),
        Column(title="at first", rank=4),
    )
    for result in results:
        first, standing = result.coarse, result.fine or result.coarse
        table.add_row(
            result.name or str(result.index),
            *([result.site or ""] if placed else []),
            result.label or result.error or "",
            percent(standing.confidence) if standing else "",
            tier_text(standing.node if standing else "", result.fine.tier if result.fine else Tier.END),
            first.label if first and result.fine else "",
        )
    return table
