"""`terrace jobs`: what became of the jobs that were submitted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC
from typing import Annotated, Literal

import typer
from pydantic_core import to_json

from terrace.console import Column, Listing, image_count, print_json, screen
from terrace.following import follow
from terrace.options import Json, OnlySite, connected
from terrace.report import check_answers, job_summary
from tierkit.client import Client, Event, ImageResult, Job, JobState, StateChange
from tierkit.plaintext import harmless, one_line

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="List, follow, read and cancel jobs.")

_NAME_WIDTH = 24
_LEAST_REASON_WIDTH = 16
_LEAST_WHY_WIDTH = 40

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.", show_default=False)]
Cursor = Annotated[str | None, typer.Option(help="Continue where an earlier page ended.", metavar="CURSOR")]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRange:
    """Options that choose one page of the jobs."""

    limit: Annotated[int, typer.Option(min=1, max=200, help="How many, newest first.")] = 20
    cursor: Cursor = None
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None
    site: OnlySite = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRange:
    """Options that choose one page of the attempts of a job."""

    limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of attempts, by task.")] = 200
    cursor: Cursor = None
    task: Annotated[int | None, typer.Option(min=0, help="Only attempts of this task.", metavar="NUMBER")] = None


@app.command("list")
@connected
def list_jobs(client: Client, chosen: JobRange, json: Json = False) -> None:
    """List the newest jobs."""
    page = client.jobs(limit=chosen.limit, cursor=chosen.cursor, state=chosen.state, site=chosen.site)
    if json:
        print_json(page)
        return
    if not page.jobs:
        screen().print("no jobs yet; submit one with [bold]terrace classify[/bold]")
        return
    owned, placed = any(job.owner for job in page.jobs), any(job.site for job in page.jobs)
    table = Listing(
        Column(title="job"),
        Column(title="name", rank=4, max_width=_NAME_WIDTH),
        *([Column(title="owner", rank=4)] if owned else []),
        *([Column(title="site", rank=4)] if placed else []),
        Column(title="state", rank=1),
        Column(title="images", rank=3, right=True),
        Column(title="unanswered", rank=2, right=True),
        Column(title="coarse", rank=7, right=True),
        Column(title="fine", rank=6, right=True),
        Column(title="created", rank=5),
    )
    for job in page.jobs:
        table.add_row(
            job.id,
            job.name or "",
            *([job.owner or ""] if owned else []),
            *([job.site or ""] if placed else []),
            job.state,
            f"{job.images:,}",
            f"{job.failed_images:,}",
            f"{job.answered_coarse:,}",
            f"{job.answered_fine:,}",
            job.created_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ") if job.created_at else "",
        )
    screen().print(table, crop=False)
    _tell_more("older ones: terrace jobs list", page.next_cursor)


@app.command()
@connected
def show(client: Client, job: JobId, json: Json = False) -> None:
    """Show one job: its progress, its accuracy, and the tiers that answered."""
    _print_job(client.job(job), json)


@app.command()
@connected
def attempts(client: Client, job: JobId, chosen: AttemptRange, json: Json = False) -> None:
    """Show the attempts of a job's tasks, with their nodes and outcomes."""
    page = client.attempts(job, limit=chosen.limit, cursor=chosen.cursor, task=chosen.task)
    if json:
        print_json(page)
        return
    table = Listing(
        Column(title="task", right=True),
        Column(title="attempt", right=True),
        Column(title="node"),
        Column(title="upstream", rank=3),
        Column(title="stage", rank=4),
        Column(title="outcome"),
        Column(title="ms", rank=2, right=True),
        Column(title="reason", least=_LEAST_REASON_WIDTH),
    )
    for each in page.attempts:
        table.add_row(
            str(each.task),
            f"{each.attempt} (hedge)" if each.hedge else str(each.attempt),
            each.node,
            each.upstream or "",
            each.stage,
            each.outcome,
            "" if each.ms is None else f"{each.ms:,.1f}",
            each.reason,
        )
    screen().print(table, crop=False)
    _tell_more(f"more: terrace jobs attempts {job}", page.next_cursor)


@app.command()
@connected
def explain(client: Client, job: JobId, chosen: AttemptRange, json: Json = False) -> None:
    """Show why each task of a job went to its nodes."""
    page = client.explain(job, limit=chosen.limit, cursor=chosen.cursor, task=chosen.task)
    if json:
        print_json(page)
        return
    table = Listing(
        Column(title="task", right=True),
        Column(title="attempt", rank=3, right=True),
        Column(title="node"),
        Column(title="upstream"),
        Column(title="outcome", rank=2),
        Column(title="why", least=_LEAST_WHY_WIDTH),
    )
    for each in page.decisions:
        table.add_row(str(each.task), str(each.attempt), each.node, each.upstream or "", each.outcome, each.why)
    screen().print(table, crop=False)
    if page.now:
        screen().print(f"now: {page.now}", soft_wrap=True, markup=False)
    _tell_more(f"more: terrace jobs explain {job}", page.next_cursor)


@app.command()
@connected
def results(
    client: Client,
    job: JobId,
    format: Annotated[
        Literal["jsonl", "csv"], typer.Option(help="One JSON object or one CSV row per image.")
    ] = "jsonl",
    bom: Annotated[
        bool, typer.Option("--bom", help="Begin a CSV with a byte order mark, as spreadsheets want it.")
    ] = False,
) -> None:
    """Show the answers so far, one line per image, in the order of the upload."""
    if bom and format != "csv":
        raise typer.BadParameter("it goes with --format csv", param_hint="--bom")
    if sys.stdout.isatty():
        for line in _lines(client.raw_results(job, format=format)):
            sys.stdout.write(f"{harmless(line)}\n")
    else:
        for chunk in client.raw_results(job, format=format, bom=bom):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


@app.command()
@connected
def events(client: Client, job: JobId, json: Json = False) -> None:
    """Follow the answers as they arrive, from the first one on; with --json one object per event and line."""
    # No such job, or no scheduler, is told at once; one that goes away later may come back.
    client.job(job)
    for event in client.events(job):
        lines = [_event_json(event)] if json else _event_lines(event)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


@app.command()
@connected
def cancel(client: Client, job: JobId, json: Json = False) -> None:
    """Stop a job; its answers so far stay."""
    _print_job(client.cancel(job), json)


@app.command()
@connected
def wait(
    client: Client,
    job: JobId,
    budget_s: Annotated[float | None, typer.Option("--budget", min=0, help="Longest time to wait, in seconds.")] = None,
    json: Json = False,
) -> None:
    """Wait until a job is done; exit code 1 unless it was completed and each image has an answer."""
    done = client.job(job)
    if not done.done:
        done = follow(client, done, budget_s=budget_s)
    _print_job(done, json)
    check_answers(done)


def _tell_more(command: str, cursor: str | None) -> None:
    if cursor:
        screen().print(f"{command} --cursor {cursor}", style="dim", soft_wrap=True, markup=False)


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Pieces of any length as lines without their ends."""
    held = b""
    for chunk in chunks:
        *complete, held = (held + chunk).split(b"\n")
        for line in complete:
            yield line.removesuffix(b"\r").decode("utf-8", "replace")
    if held:
        yield held.decode("utf-8", "replace")


def _print_job(job: Job, json: bool) -> None:
    if json:
        print_json(job)
    else:
        screen().print(job_summary(job))


def _kind(event: Event) -> str:
    return type(event).__name__.removesuffix("Results").removesuffix("Change").lower()


def _event_json(event: Event) -> str:
    body = event.job if isinstance(event, StateChange) else event
    return harmless(to_json({"event": _kind(event), "data": body}).decode())


def _event_lines(event: Event) -> list[str]:
    if isinstance(event, StateChange):
        job = event.job
        missing = f", {job.failed_images:,} of {image_count(job.images)} without an answer" if job.failed_images else ""
        waits = f": {one_line(job.reason)}" if job.reason and not job.done else ""
        return [f"state     {job.state}{missing}{waits}"]
    return [one_line(f"{_kind(event):<9} {_answer(_kind(event), result)}") for result in event.results]


def _answer(kind: str, result: ImageResult) -> str:
    answer = {"coarse": result.coarse, "fine": result.fine}.get(kind)
    told = f"{answer.label}  {answer.confidence:.2f}  {answer.node}" if answer else result.error or result.fallback
    return f"{result.name or result.index}  {told or ''}"
