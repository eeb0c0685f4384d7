"""`terrace bench`: load on any Open Inference Protocol server, or on Terrace's own endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from experiments.bench.inputs import InputPlan
from experiments.bench.levels import MAX_CONNECTIONS, MAX_RATE, Closed, Load, Open, Plan
from experiments.bench.plot import check_plot, plot_levels
from experiments.bench.report import as_cells, as_row, cautions, check_folder, document, write_csv
from experiments.bench.schedule import Distribution, parse_range
from experiments.bench.sweep import loop_factory, sweep
from experiments.bench.targets import Target, classify_target, oip_target, tasks_target
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

_SPARE = ("network", "send", "p99.9", "not answered", "p95", "p90", "batch")
"""Columns that a narrow terminal does without, in this order. CSV and JSON hold them all; the notes below the table say
what was not answered."""


@app.command()
def bench(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="Model to ask. Not needed with --service-kind classify.")
    ] = None,
    url: Annotated[
        str, typer.Option("-u", "--url", help="Where the server listens; 8000 is Triton's port.")
    ] = "http://127.0.0.1:8000",
    service_kind: Annotated[
        Literal["oip", "tasks", "classify"],
        typer.Option(
            help="oip: POST /v2/models/MODEL/infer of any server; tasks: an end node's task path;"
            " classify: the scheduler's /v1/classify, over all tiers."
        ),
    ] = "oip",
    batch_size: Annotated[int, typer.Option("-b", "--batch-size", min=1, help="Images per request.")] = 1,
    concurrency_range: Annotated[
        str | None,
        typer.Option(metavar="START:END:STEP", help="Closed loop: number of requests under way. Default: 1."),
    ] = None,
    request_rate_range: Annotated[
        str | None,
        typer.Option(metavar="START:END:STEP", help="Open loop: requests per second, independent of the server."),
    ] = None,
    request_distribution: Annotated[
        Distribution, typer.Option(help="Times between the requests of an open loop.")
    ] = "poisson",
    measurement_interval: Annotated[
        int, typer.Option(min=100, max=3_600_000, help="Length of each measurement, ms.")
    ] = 5000,
    warmup_interval: Annotated[
        int, typer.Option(min=0, max=600_000, help="Load before each measurement that is not counted, ms.")
    ] = 500,
    request_count: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="End a measurement early, after this many requests.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0.001, help="Answers within this time (ms) count as goodput.")
    ] = None,
    input_data: Annotated[
        Literal["random", "sample"], typer.Option(help="random values, or the bundled sample of CIFAR-100 test images.")
    ] = "random",
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT:D1,D2,...", help="Size of an input that the model leaves open, without the batch."),
    ] = None,
    output: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An output to ask for; may be repeated. Default: all.")
    ] = None,
    input_tensor_format: Annotated[Literal["binary", "json"], typer.Option(help="How tensors are sent.")] = "binary",
    output_tensor_format: Annotated[Literal["binary", "json"], typer.Option(help="How tensors come back.")] = "binary",
    header: Annotated[
        list[str] | None, typer.Option("-H", "--header", metavar="'NAME: VALUE'", help="Added to every request.")
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds until a request is given up, the trial before as well.")
    ] = 30.0,
    max_connections: Annotated[
        int, typer.Option(min=1, max=MAX_CONNECTIONS, help="Connections of an open loop; beyond, requests wait.")
    ] = 512,
    seed: Annotated[int, typer.Option(min=0, help="For random inputs and arrival times.")] = 0,
    csv: Annotated[
        Path | None, typer.Option("-f", "--csv", help="Write the rows to this file.", dir_okay=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw latency against throughput (.png, .svg or .pdf; extra 'plots').", dir_okay=False),
    ] = None,
    json: Json = False,
) -> None:
    """Measure latency and throughput of a server: how much it gives, and what its clients wait for it.

    Percentiles are nearest-rank, over answered requests, from the moment at which a request was due.
    """
    if plot is not None:
        check_folder(plot)
        check_plot(plot)
    if csv is not None:
        check_folder(csv)
        if plot is not None and csv.resolve() == plot.resolve():
            raise InvalidInput(f"-f and --plot both name {csv}: choose two files")
    loads = _loads(concurrency_range, request_rate_range, request_distribution)
    check_tls_ca(context, url)
    inputs = InputPlan(
        batch_size=batch_size,
        data=input_data,
        shapes=_shapes(shape or ()),
        outputs=output or (),
        binary_inputs=input_tensor_format == "binary",
        binary_outputs=output_tensor_format == "binary",
        headers=_headers(header or ()),
        token=token() if (token := token_from(token_file)) else None,
        tls_ca=tls_ca,
        seed=seed,
        timeout_s=timeout,
    )
    plan = Plan(
        window_s=measurement_interval / 1000,
        warmup_s=warmup_interval / 1000,
        max_requests=request_count,
        timeout_s=timeout,
        max_connections=max_connections,
        deadline_s=deadline / 1000 if deadline else float("inf"),
        seed=seed,
    )
    progress = screen(stderr=True)
    with progress.status("asking the server what it serves") as status:

        def announce(target: Target, load: Load, number: int) -> None:
            status.update(f"{target.name}: {load}, {number + 1} of {len(loads)}, {plan.window_s:g} s each")

        found = run_stoppable(
            lambda: sweep(_target(service_kind, url, model, inputs), loads, plan, announce), loop_factory()
        )
    if found is None:
        raise typer.Exit(INTERRUPTED)
    target, levels = found
    rows = [as_row(level, streams=target.streams) for level in levels]
    if csv is not None:
        write_csv(csv, rows)
    if json:
        print_json(document(target, levels))
    elif levels:
        console = screen()
        console.print(f"[bold]{escape(target.name)}[/bold], {target.images} per request; latencies in ms")
        console.print(results_table(*as_cells(rows, with_goodput=deadline is not None), spare=_SPARE))
    for caution in cautions(levels):
        progress.print(f"[yellow]note[/yellow]  {escape(caution)}")
    answered = any(level.summary.answered for level in levels)
    if plot is not None and answered:
        plot_levels(levels, plot, title=f"{target.name}, {target.images} per request")
    if len(levels) < len(loads) or any(level.interrupted for level in levels):
        raise typer.Exit(INTERRUPTED)
    if not answered:
        raise typer.Exit(_NOTHING_ANSWERED)


def _loads(concurrency: str | None, rate: str | None, distribution: Distribution) -> list[Load]:
    if rate is None:
        levels = parse_range("1" if concurrency is None else concurrency, whole=True, most=MAX_CONNECTIONS)
        return [Closed(int(number)) for number in levels]
    if concurrency is not None:
        raise InvalidInput("--concurrency-range is a closed loop and --request-rate-range an open one: choose one")
    return [Open(number, distribution) for number in parse_range(rate, whole=False, most=MAX_RATE)]


async def _target(kind: str, url: str, model: str | None, inputs: InputPlan) -> Target:
    if kind == "classify":
        return await classify_target(url, inputs)
    if model is None:
        raise InvalidInput("say which model to ask with -m")
    return await (oip_target if kind == "oip" else tasks_target)(url, model, inputs)


def _shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for text in texts:
        name, _, dims = text.rpartition(":")
        if not name or not all(dim.isascii() and dim.isdigit() and int(dim) for dim in dims.split(",")):
            raise InvalidInput(f"{text!r} is no shape: write INPUT:D1,D2,... such as images:224,224,3")
        shapes[name] = tuple(int(dim) for dim in dims.split(","))
    return shapes


def _headers(texts: Sequence[str]) -> dict[str, str]:
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise InvalidInput(f"{text!r} is no header: write 'NAME: VALUE'")
        if name.strip().lower() in _OWN_HEADERS:
            raise InvalidInput(f"the header {name.strip()} follows from the request and cannot be chosen")
        headers[name.strip()] = value.strip()
    return headers
