"""`terrace bench`: load on the task path of an end node, or on the scheduler's `/v1/classify`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer
from rich.markup import escape

from experiments.bench.load import MAX_CONCURRENCY, MAX_RATE, Closed, Level, Load, LoadPlan, Open, loop_factory, measure
from experiments.bench.report import as_cells, as_row, cautions
from experiments.bench.schedule import parse_range
from experiments.bench.targets import RequestPlan, Target, classify_target, tasks_target
from experiments.record import host_facts
from terrace.cli import INTERRUPTED
from terrace.console import print_json, results_table, screen
from terrace.options import Json, TlsCa, TokenFile, check_tls_ca, token_from
from terrace.stoppable import run_stoppable
from tierkit.errors import InvalidInput
from tierkit.wire.oip import BINARY_HEADER

__all__ = ["app", "bench"]

app = typer.Typer(add_completion=False)

_NOTHING_ANSWERED = 1

_OWN_HEADERS = frozenset({"content-length", "transfer-encoding", BINARY_HEADER.lower()})

_SPARE = ("send", "p99.9", "not answered", "p95", "p90")
"""Columns that a narrow terminal leaves out, in this order. JSON holds them all."""

Announce = Callable[[Target, Load, int], None]
"""Called before each level, with its number from 0."""


@app.command()
def bench(
    context: typer.Context,
    url: Annotated[str, typer.Option("-u", "--url", help="Address of the service.")] = "http://127.0.0.1:8070",
    service_kind: Annotated[
        Literal["classify", "tasks"],
        typer.Option(help="classify: the scheduler's /v1/classify, over all tiers; tasks: an end node's task path."),
    ] = "classify",
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Coarse model of the end node (only with tasks).")
    ] = None,
    batch_size: Annotated[int, typer.Option("-b", "--batch-size", min=1, help="Images per request.")] = 1,
    concurrency_range: Annotated[
        str | None, typer.Option(metavar="START:END:STEP", help="Closed loop: requests in flight. Default: 1.")
    ] = None,
    request_rate_range: Annotated[
        str | None,
        typer.Option(metavar="START:END:STEP", help="Open loop: requests per second, independent of the service."),
    ] = None,
    measurement_interval: Annotated[
        int, typer.Option(min=100, max=3_600_000, help="Length of each measurement, ms.")
    ] = 5000,
    warmup_interval: Annotated[
        int, typer.Option(min=0, max=600_000, help="Load before each measurement that is not counted, ms.")
    ] = 500,
    deadline: Annotated[
        float | None, typer.Option(min=0.001, help="Answers within this time (ms) count as goodput.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("-H", "--header", metavar="'NAME: VALUE'", help="Added to every request.")
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Budget of each request, s.")] = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of images and arrival times.")] = 0,
    json: Json = False,
) -> None:
    """Measure throughput and latency of a service under load.

    Percentiles are nearest-rank, over answered requests, from the moment at which a request was due.
    """
    loads = _loads(concurrency_range, request_rate_range)
    if service_kind == "tasks" and model is None:
        raise InvalidInput("name the end node's model with -m")
    check_tls_ca(context, url)
    requests = RequestPlan(
        batch_size=batch_size,
        headers=_headers(header or ()),
        token=token() if (token := token_from(token_file)) else None,
        tls_ca=tls_ca,
        seed=seed,
        timeout_s=timeout,
    )
    plan = LoadPlan(
        window_s=measurement_interval / 1000,
        warmup_s=warmup_interval / 1000,
        timeout_s=timeout,
        deadline_s=deadline / 1000 if deadline else float("inf"),
        seed=seed,
    )
    progress = screen(stderr=True)
    with progress.status("asking the service for its models") as status:

        def announce(target: Target, load: Load, number: int) -> None:
            status.update(f"{target.name}: {load}, {number + 1} of {len(loads)}, {plan.window_s:g} s each")

        async def run() -> tuple[Target, list[Level]]:
            target = await (tasks_target(url, model, requests) if model else classify_target(url, requests))
            return target, await _sweep(target, loads, plan, announce)

        found = run_stoppable(run, loop_factory())
    if found is None:
        raise typer.Exit(INTERRUPTED)
    target, levels = found
    rows = [as_row(level) for level in levels]
    if json:
        print_json(
            {
                "target": target.name,
                "images_per_request": target.images,
                "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "load_generator": host_facts(),
                "levels": rows,
                "cautions": list(cautions(levels)),
            }
        )
    elif levels:
        console = screen()
        console.print(f"[bold]{escape(target.name)}[/bold], {target.images} per request; latencies in ms")
        console.print(results_table(*as_cells(rows, with_goodput=deadline is not None), spare=_SPARE))
    for caution in cautions(levels):
        progress.print(f"[yellow]note[/yellow]  {escape(caution)}")
    if len(levels) < len(loads) or any(level.interrupted for level in levels):
        raise typer.Exit(INTERRUPTED)
    if not any(level.summary.answered for level in levels):
        raise typer.Exit(_NOTHING_ANSWERED)


async def _sweep(target: Target, loads: Sequence[Load], plan: LoadPlan, announce: Announce) -> list[Level]:
    """Measure all levels in order.

    The first cancellation ends the level in progress, which is then marked as interrupted; a second one ends the sweep
    without a result.
    """
    stop, levels = asyncio.Event(), list[Level]()
    for number, load in enumerate(loads):
        announce(target, load, number)
        measuring = asyncio.create_task(measure(target, load, plan, stop))
        try:
            level = await asyncio.shield(measuring)
        except asyncio.CancelledError:
            stop.set()
            level = await measuring
        if level is not None:
            levels.append(level)
        if stop.is_set():
            break
    return levels


def _loads(concurrency: str | None, rate: str | None) -> list[Load]:
    if rate is None:
        levels = parse_range("1" if concurrency is None else concurrency, whole=True, most=MAX_CONCURRENCY)
        return [Closed(int(number)) for number in levels]
    if concurrency is not None:
        raise InvalidInput("--concurrency-range is a closed loop and --request-rate-range an open one: choose one")
    return [Open(number) for number in parse_range(rate, whole=False, most=MAX_RATE)]


def _headers(texts: Sequence[str]) -> dict[str, str]:
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise InvalidInput(f"{text!r} is not a header: write 'NAME: VALUE'")
        if name.strip().lower() in _OWN_HEADERS:
            raise InvalidInput(f"the header {name.strip()} follows from the request and cannot be chosen")
        headers[name.strip()] = value.strip()
    return headers
