"""`terrace bench`: load on any Open Inference Protocol server, or on Terrace's own endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.bench.inputs import InputPlan
from experiments.bench.levels import MAX_CONNECTIONS, MAX_RATE, Closed, Level, Load, Open, Plan
from experiments.bench.plot import check_plot, plot_levels
from experiments.bench.report import as_cells, as_row, cautions, check_folder, document, write_csv
from experiments.bench.schedule import parse_range
from experiments.bench.sweep import run_sweep
from experiments.bench.targets import Target, classify_target, oip_target, tasks_target
from terrace.console import Column, Listing, print_json, screen
from terrace.options import Json, TlsCa, TokenFile, check_tls_ca, token_from
from tierkit.errors import InvalidInput
from tierkit.wire.oip import BINARY_HEADER

__all__ = ["app", "bench"]

app = typer.Typer(add_completion=False)

_PERCENTILES = (50.0, 90.0, 95.0, 99.0)
_NOTHING_ANSWERED = 1
_INTERRUPTED = 130

_OWN_HEADERS = frozenset({"content-length", "transfer-encoding", BINARY_HEADER.lower()})

_RANKS = {"network": 6, "send": 5, "not answered": 4, "p95": 3, "p90": 2, "batch": 1}
"""Columns that a narrow terminal does without, the highest first. CSV and JSON hold them all; the notes below the table
say what was not answered."""


class ServiceKind(StrEnum):
    OIP = "oip"
    TASKS = "tasks"
    CLASSIFY = "classify"


class Distribution(StrEnum):
    POISSON = "poisson"
    CONSTANT = "constant"


class InputData(StrEnum):
    RANDOM = "random"
    SAMPLE = "sample"


class TensorFormat(StrEnum):
    BINARY = "binary"
    JSON = "json"


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
        ServiceKind,
        typer.Option(
            help="oip: POST /v2/models/MODEL/infer of any server; tasks: an end node's task path;"
            " classify: the scheduler's /v1/classify, over all tiers."
        ),
    ] = ServiceKind.OIP,
    batch_size: Annotated[int, typer.Option("-b", "--batch-size", min=1, help="Images per request.")] = 1,
    concurrency_range: Annotated[
        str | None,
        typer.Option(metavar="START:END:STEP", help="Closed loop: so many requests under way. Default: 1."),
    ] = None,
    request_rate_range: Annotated[
        str | None,
        typer.Option(metavar="START:END:STEP", help="Open loop: so many requests a second, whatever the server does."),
    ] = None,
    request_distribution: Annotated[
        Distribution, typer.Option(help="Times between the requests of an open loop.")
    ] = Distribution.POISSON,
    measurement_interval: Annotated[
        int, typer.Option(min=100, max=3_600_000, help="Length of each measurement, ms.")
    ] = 5000,
    warmup_interval: Annotated[
        int, typer.Option(min=0, max=600_000, help="Load before each measurement that is not counted, ms.")
    ] = 500,
    request_count: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="End a measurement early, after so many requests.")
    ] = None,
    percentile: Annotated[
        list[float] | None, typer.Option(help="A percentile to report beside 50, 90, 95 and 99; may be repeated.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0.001, help="Answers within so many ms count as goodput.")
    ] = None,
    input_data: Annotated[
        InputData, typer.Option(help="random values, or the bundled sample of CIFAR-100 test images.")
    ] = InputData.RANDOM,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="INPUT:D1,D2,...", help="Size of an input that the model leaves open, without the batch."),
    ] = None,
    output: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An output to ask for; may be repeated. Default: all.")
    ] = None,
    input_tensor_format: Annotated[TensorFormat, typer.Option(help="How tensors are sent.")] = TensorFormat.BINARY,
    output_tensor_format: Annotated[TensorFormat, typer.Option(help="How tensors come back.")] = TensorFormat.BINARY,
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
        data=input_data.value,
        shapes=_shapes(shape or ()),
        outputs=output or (),
        binary_inputs=input_tensor_format is TensorFormat.BINARY,
        binary_outputs=output_tensor_format is TensorFormat.BINARY,
        headers=_headers(header or ()),
        token=token_from(token_file),
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
        percentiles=_percentiles(percentile or ()),
        deadline_s=deadline / 1000 if deadline else float("inf"),
        seed=seed,
    )
    progress = screen(stderr=True)
    with progress.status("asking the server what it serves") as status:
        target, levels = run_sweep(
            _target_maker(service_kind, url, model, inputs),
            loads,
            plan,
            lambda target, load, number: status.update(
                f"{target.name}: {load.label}, {number + 1} of {len(loads)}, {plan.window_s:g} s each"
            ),
        )
    if csv is not None:
        write_csv(csv, [as_row(level, streams=target.streams) for level in levels])
    if json:
        print_json(document(target, levels))
    elif levels:
        screen().print(f"[bold]{escape(target.name)}[/bold], {target.images} per request; latencies in ms")
        screen().print(_listing(target, levels, with_goodput=deadline is not None))
    for caution in cautions(levels):
        progress.print(f"[yellow]note[/yellow]  {escape(caution)}")
    answered = any(level.summary.answered for level in levels)
    if plot is not None and answered:
        plot_levels(levels, plot, title=f"{target.name}, {target.images} per request")
    if len(levels) < len(loads) or any(level.interrupted for level in levels):
        raise typer.Exit(_INTERRUPTED)
    if not answered:
        raise typer.Exit(_NOTHING_ANSWERED)


def _loads(concurrency: str | None, rate: str | None, distribution: Distribution) -> list[Load]:
    if rate is None:
        with _unreadable("--concurrency-range"):
            levels = parse_range("1" if concurrency is None else concurrency, whole=True, most=MAX_CONNECTIONS)
        return [Closed(int(number)) for number in levels]
    if concurrency is not None:
        raise InvalidInput("--concurrency-range is a closed loop and --request-rate-range an open one: choose one")
    with _unreadable("--request-rate-range"):
        return [Open(number, distribution.value) for number in parse_range(rate, whole=False, most=MAX_RATE)]


@contextmanager
def _unreadable(option: str) -> Iterator[None]:
    """What is wrong with the value of an option is a mistake in the command line."""
    try:
        yield
    except InvalidInput as exc:
        raise typer.BadParameter(str(exc), param_hint=option) from exc


def _target_maker(kind: ServiceKind, url: str, model: str | None, inputs: InputPlan) -> Callable[[], Awaitable[Target]]:
    if kind is ServiceKind.CLASSIFY:
        return lambda: classify_target(url, inputs)
    if model is None:
        raise InvalidInput("say which model to ask with -m")
    make = oip_target if kind is ServiceKind.OIP else tasks_target
    return lambda: make(url, model, inputs)


def _shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for text in texts:
        name, _, dims = text.rpartition(":")
        if not name or not all(dim.isascii() and dim.isdigit() and int(dim) for dim in dims.split(",")):
            raise typer.BadParameter(
                f"{text!r} is no shape: write INPUT:D1,D2,... such as images:224,224,3", param_hint="--shape"
            )
        shapes[name] = tuple(int(dim) for dim in dims.split(","))
    return shapes


def _headers(texts: Sequence[str]) -> dict[str, str]:
    headers = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise typer.BadParameter(f"{text!r} is no header: write 'NAME: VALUE'", param_hint="-H")
        if name.strip().lower() in _OWN_HEADERS:
            raise typer.BadParameter(f"{name.strip()} follows from the request and cannot be chosen", param_hint="-H")
        headers[name.strip()] = value.strip()
    return headers


def _percentiles(more: Sequence[float]) -> tuple[float, ...]:
    if not all(0 < percent <= 100 for percent in more):
        raise typer.BadParameter("a percentile is above 0 and at most 100", param_hint="--percentile")
    return tuple(sorted({*_PERCENTILES, *more}))


def _listing(target: Target, levels: Sequence[Level], *, with_goodput: bool) -> Listing:
    headings, rows = as_cells(levels, streams=target.streams, with_goodput=with_goodput)
    listing = Listing(*(Column(title=title, rank=_RANKS.get(title, 0), right=True) for title in headings))
    for row in rows:
        listing.add_row(*row)
    return listing
