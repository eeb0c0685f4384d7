"""`terrace train list`, `watch`, `invite`, `uninvite`, `stop` and `worker`: runs that a scheduler knows. No torch."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import UTC
from typing import Annotated, Literal

import typer
from pydantic_core import to_json

from terrace.commands.token import span
from terrace.console import Column, Listing, percent, print_json, progress_bars, screen
from terrace.options import DEFAULT_URL, Credentials, Json, Scheduler, check_tls_ca, connected, with_options
from tierkit.client import Client, Run, RunProgress, RunState, RunSummary
from tierkit.plaintext import harmless, one_line
from tierkit.wire.runs import LONGEST_INVITATION_S

__all__ = ["app", "how_far"]

app = typer.Typer(add_completion=False)

_NAME_WIDTH = 24
_MOST_SHOWN = 20

RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.", show_default=False)]


@app.command("list")
@connected
def list_runs(
    client: Client,
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many, newest first.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Continue where an earlier page ended.", metavar="CURSOR")] = None,
    json: Json = False,
) -> None:
    """The newest training runs."""
    page = client.runs(limit=limit, cursor=cursor)
    if json:
        print_json(page)
        return
    if not page.runs:
        screen().print("no training runs yet")
        return
    owned = any(run.owner for run in page.runs)
    table = Listing(
        Column(title="run"),
        Column(title="network", rank=3, max_width=_NAME_WIDTH),
        Column(title="strategy", rank=4, max_width=_NAME_WIDTH),
        *([Column(title="owner", rank=7)] if owned else []),
        Column(title="state", rank=1),
        Column(title="done", rank=2, right=True),
        Column(title="loss", rank=5, right=True),
        Column(title="accuracy", rank=5, right=True),
        Column(title="workers", rank=6, right=True),
        Column(title="created", rank=8),
    )
    for run in page.runs:
        table.add_row(
            run.id,
            run.network,
            run.strategy,
            *([run.owner or ""] if owned else []),
            run.state,
            percent(run.done / run.steps),
            _loss(run),
            percent(run.accuracy),
            f"{run.worker_count:,}",
            run.created_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
        )
    screen().print(table, crop=False)
    if page.next_cursor:
        more = one_line(f"older ones: terrace train list --cursor {shlex.quote(page.next_cursor)}")
        screen().print(more, style="dim", soft_wrap=True, markup=False)


@app.command()
@connected
def watch(client: Client, run: RunId, json: Json = False) -> None:
    """Follow a training run until it ends, with --json one object per line; exit code 1 unless it finished."""
    # No such run, or no scheduler, is told at once; one that goes away later may come back.
    last: RunProgress = (whole := client.run(run))
    with progress_bars("step") as progress:
        bar = progress.add_task(last.network, total=last.steps)
        for last in client.run_events(run):
            if json:
                kind = "state" if isinstance(last, Run) else "report"
                sys.stdout.write(harmless(to_json({"event": kind, "data": last}).decode()) + "\n")
                sys.stdout.flush()
            whole = last if isinstance(last, Run) else whole
            said = one_line(f"{last.network}, {last.state}, {how_far(last, whole.wants.start_at)}")
            progress.update(bar, completed=last.done, description=said)
    if not json:
        _print_run(last)
        _print_workers(last)
    if last.state is not RunState.FINISHED:
        raise typer.Exit(1)


@app.command()
@connected
def invite(
    client: Client,
    run: RunId,
    uses: Annotated[int, typer.Option(min=1, max=1_000, help="Number of worker names that may join.")] = 1,
    expires: Annotated[
        str, typer.Option(metavar="SPAN", help="Time until the invitation expires: 12h, 7d, 4w.")
    ] = "7d",
    json: Json = False,
) -> None:
    """Make a token for workers of a training run, and show it once, with a link and the command to join."""
    try:
        valid = span(expires, longest_s=LONGEST_INVITATION_S)
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint="--expires") from error
    made = client.invite(run, uses=uses, expires_s=valid.total_seconds())
    config = client.run(run).config
    fetches = config.get("share_data") is True
    link = f"{client.url}/ui/join#token={made.token}{'&fetch=own' if fetches else ''}"
    # People paste the command into a shell.
    command = f"TERRACE_TOKEN='{made.token}' terrace train work --scheduler {shlex.quote(','.join(client.urls))}"
    ca = None if client.tls_ca is None else client.tls_ca.name
    command += "" if ca is None else f" --tls-ca {shlex.quote(ca)}"
    command += " --fetch own" if fetches else ""
    command += " --kept FOLDER" if "improves" in config else ""
    if json:
        print_json({**made.model_dump(mode="json"), "link": link, "command": command})
        return
    until = made.expires.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")
    names = "one worker" if made.uses == 1 else f"{made.uses:,} workers"
    needs = "" if ca is None else f"; they need your file {ca} as well"
    for line in (
        f"{made.name}, for {names}, until {until}{needs}:",
        f"token    {made.token}",
        f"link     {link}",
        f"command  {command}",
    ):
        screen().print(line, soft_wrap=True, markup=False, highlight=False)


@app.command()
@connected
def uninvite(
    client: Client,
    run: RunId,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the invitation, such as alice.3fa9c1.", show_default=False)
    ],
) -> None:
    """End an invitation to a training run; workers that joined with it are refused within seconds."""
    client.uninvite(run, name)
    screen().print(one_line(f"the invitation {name} has ended"), soft_wrap=True, markup=False, highlight=False)


@app.command()
@connected
def stop(client: Client, run: RunId, json: Json = False) -> None:
    """Ask the host of a training run to end it; what it has learned stays with the host."""
    stopped = client.stop_run(run)
    if json:
        print_json(stopped)
    else:
        _print_run(stopped)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """Arguments of `terrace train worker`."""

    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Id of the run, or the URL of its host.", show_default=False),
    ]
    name: Annotated[str, typer.Argument(metavar="WORKER", help="Name of the worker.", show_default=False)]
    order: Annotated[
        Literal["pause", "drop", "trust", "resume"],
        typer.Argument(
            metavar="pause|drop|trust|resume",
            help="pause: no work until it is resumed; drop: no work ever again; trust: count its updates "
            "without judging them; resume: end these orders.",
            show_default=False,
        ),
    ]


@app.command()
@with_options
def worker(
    context: typer.Context,
    order: WorkerOrder,
    scheduler: Scheduler = DEFAULT_URL,
    *,
    credentials: Credentials,
    json: Json = False,
) -> None:
    """Pause, drop, trust or resume a worker of a training run, by its host or through the scheduler."""
    run, name = order.run, order.name
    at_host = "://" in run
    url = run if at_host else scheduler
    check_tls_ca(context, url)
    with credentials.connect(url) as client:
        if at_host:
            found = client.order_at_host(name, order.order)
        else:
            found = next(each for each in client.order_worker(run, name, order.order).workers if each.name == name)
    if json:
        print_json(found)
        return
    wish = "" if found.wish is None else f"; its host is told to {found.wish} it"
    said = f"{name}: {found.standing}, score {found.score:.2f}{wish}"
    screen().print(one_line(said), soft_wrap=True, markup=False)


def _print_run(run: RunSummary) -> None:
    said = (
        f"{run.network} with {run.strategy}, {_workers(run)}: {run.state}, {run.done:,} of {run.steps:,} steps, "
        f"loss {_loss(run)}, accuracy {percent(run.accuracy)}"
    )
    screen().print(one_line(f"{said} ({run.reason})" if run.reason else said), soft_wrap=True, markup=False)


def _print_workers(run: RunProgress) -> None:
    """Print what each worker has contributed, even if it has left."""
    table = Listing(
        Column(title="worker", max_width=_NAME_WIDTH),
        Column(title="updates", right=True),
        Column(title="MB sent", rank=2, right=True),
        Column(title="state", rank=1),
    )
    found = sorted((each for each in run.workers if each.updates), key=lambda each: -each.updates)
    for each in found[:_MOST_SHOWN]:
        state = "left" if each.left else each.standing
        table.add_row(each.name, f"{each.updates:,}", f"{each.bytes_sent / 1e6:,.1f}", state)
    if found:
        screen().print(table, crop=False)
    if len(found) > _MOST_SHOWN:
        screen().print(f"and {len(found) - _MOST_SHOWN:,} more", style="dim", markup=False)


def how_far(run: RunProgress, start_at: int | None) -> str:
    """Words about a run that has not ended: its loss and workers, or the group that it waits for."""
    if run.missing is not None and start_at is not None:
        return f"waits for workers: {start_at - run.missing} of {start_at} ready"
    return f"loss {_loss(run)}, {_workers(run)}"


def _loss(run: RunSummary) -> str:
    return "-" if run.loss is None else f"{run.loss:.4g}"


def _workers(run: RunSummary) -> str:
    count = run.worker_count
    if run.state.final and isinstance(run, RunProgress):  # those who have contributed
        count = sum(each.updates > 0 for each in run.workers)
    return f"{count:,} {'worker' if count == 1 else 'workers'}"
