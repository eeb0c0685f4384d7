"""Overload: what a node still gives when far more is asked of it than it can do.

    terrace experiment overload --seconds 60

A node is saturated by a closed loop, then asked for a multiple of that by an open loop, then saturated again; the
goodput of the overload is compared with the mean of the two, for the speed of a machine drifts. Meanwhile its memory is
watched and its health asked for. Server and load have a core each. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.bench.http import Connection, encode_http
from experiments.bench.inputs import InputPlan
from experiments.bench.levels import Closed, Level, Load, Open, Plan, measure
from experiments.bench.summary import OK, percentile
from experiments.bench.targets import Target, oip_target
from experiments.pages import fill
from experiments.peers.processes import check_cores, cpu_s, on_core, serving
from experiments.record import RunRecord, made_folder
from models.manifest import load_manifest, weights_folder
from tierkit.commandline import Json
from tierkit.errors import InvalidInput, SetupError
from tierkit.settings import NodeSettings

__all__ = ["Case", "Outcome", "Targets", "as_markdown", "judge", "newest_records", "read_case", "run"]

BATCH = 50
_CONCURRENCY = 8
_START_S = 60.0
_WATCH_S = 0.25
_REFUSED = "503"
_EXPERIMENT = "overload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network, and how many times its capacity is asked for."""

    model: str
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What an overloaded node must reach."""

    goodput_ratio: float = 0.9
    """Images a second under overload, as a share of those at saturation."""
    refusal_p99_ms: float = 50.0
    """From a request's first byte sent to its 503."""
    health_ms: float = 50.0
    """Slowest answer of `/readyz`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one case gave."""

    saturation_images_per_s: float
    """Mean of before and after."""
    offered_images_per_s: float
    goodput_images_per_s: float
    goodput_ratio: float
    goodput_per_cpu_ratio: float
    """The same ratio with images per second of the server's CPU time: a machine that does other work as well does not
    spoil this one."""
    requests: int
    refused: int
    unanswered: dict[str, int]
    """Neither 200 nor 503, by outcome."""
    refusal_p50_ms: float | None
    refusal_p99_ms: float | None
    health_max_ms: float
    memory_growth_bytes: int
    """Largest resident size under overload, above that before it."""
    memory_bound_bytes: int
    """What a full queue, and one request on each connection, may take."""


def judge(outcome: Outcome, targets: Targets) -> list[str]:
    """What is not as it should be, in sentences; none where all is well."""
    missed = []
    if outcome.goodput_ratio < targets.goodput_ratio:
        missed.append(f"goodput is {outcome.goodput_ratio:.2f} of saturation, below {targets.goodput_ratio:g}")
    if outcome.unanswered:
        missed.append(f"requests without an answer: {outcome.unanswered}")
    if not outcome.refused:
        missed.append("nothing was refused: this was no overload")
    elif outcome.refusal_p99_ms is not None and outcome.refusal_p99_ms > targets.refusal_p99_ms:
        missed.append(f"p99 of refusals is {outcome.refusal_p99_ms:.0f} ms, above {targets.refusal_p99_ms:g} ms")
    if outcome.health_max_ms > targets.health_ms:
        missed.append(f"a health check took {outcome.health_max_ms:.0f} ms, above {targets.health_ms:g} ms")
    if outcome.memory_growth_bytes > outcome.memory_bound_bytes:
        missed.append(
            f"memory grew by {outcome.memory_growth_bytes / 2**20:.0f} MiB, "
            f"beyond the bound of {outcome.memory_bound_bytes / 2**20:.0f} MiB"
        )
    return missed


@dataclass(frozen=True, slots=True)
class _Node:
    """A running node's process."""

    url: str
    pid: int

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        return cpu_s(self.pid)


@contextlib.contextmanager
def _node(model: str, weights: Path, core: int) -> Iterator[_Node]:
    with serving(["edge_node", "--models", model, "--weights", str(weights)], core=core) as (url, server):
        yield _Node(url, server.process.pid)


@dataclass(slots=True)
class _Watch:
    resident_bytes: list[int] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)


@contextlib.asynccontextmanager
async def _watched(node: _Node, target: Target) -> AsyncIterator[_Watch]:
    """Memory of the node and the time of its health checks meanwhile."""
    watch = _Watch()
    question = encode_http("GET", target.origin, "/readyz")

    async def look() -> None:
        async with Connection(target.origin) as connection:
            while True:
                watch.resident_bytes.append(node.resident_bytes())
                asked = time.perf_counter()
                await connection.request(question, timeout_s=_START_S)
                watch.health_ms.append((time.perf_counter() - asked) * 1000)
                await asyncio.sleep(_WATCH_S)

    task = asyncio.create_task(look(), name="watch")
    try:
        yield watch
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _level(node: _Node, target: Target, load: Load, plan: Plan) -> tuple[Level, float]:
    """One level of load, and the images that the node answered in a second of its CPU time."""
    cpu_s = node.cpu_s()
    level = await measure(target, load, plan, asyncio.Event())
    if level is None:
        raise SetupError("the measurement was stopped")
    answered = sum(sample.outcome == OK for sample in level.samples) * target.images
    return level, answered / max(node.cpu_s() - cpu_s, 1 / os.sysconf("SC_CLK_TCK"))


async def _measure(node: _Node, case: Case, seconds: float, bound_bytes: int) -> tuple[Outcome, dict[str, list[float]]]:
    target = await oip_target(node.url, case.model, InputPlan(batch_size=BATCH, outputs=("logits",)))
    bound_bytes += Plan().max_connections * len(target.requests[0])
    calm, stormy = Plan(window_s=min(10.0, seconds)), Plan(window_s=seconds, warmup_s=2.0, timeout_s=60.0)
    before, before_per_cpu = await _level(node, target, Closed(_CONCURRENCY), calm)
    capacity = before.summary.images_per_s
    calm_bytes = node.resident_bytes()
    async with _watched(node, target) as watch:
        storm, storm_per_cpu = await _level(node, target, Open(case.factor * capacity / BATCH), stormy)
    after, after_per_cpu = await _level(node, target, Closed(_CONCURRENCY), calm)
    saturation = (capacity + after.summary.images_per_s) / 2
    refusals_ms = sorted((s.done - s.sent) * 1000 for s in storm.samples if s.outcome == _REFUSED)
    outcomes = Counter(sample.outcome for sample in storm.samples)
    outcome = Outcome(
        saturation_images_per_s=saturation,
        offered_images_per_s=(storm.summary.offered_per_s or 0.0) * BATCH,
        goodput_images_per_s=storm.summary.images_per_s,
        goodput_ratio=storm.summary.images_per_s / saturation,
        goodput_per_cpu_ratio=storm_per_cpu / ((before_per_cpu + after_per_cpu) / 2),
        requests=len(storm.samples),
        refused=len(refusals_ms),
        unanswered={name: count for name, count in outcomes.items() if name not in (OK, _REFUSED)},
        refusal_p50_ms=percentile(refusals_ms, 50) if refusals_ms else None,
        refusal_p99_ms=percentile(refusals_ms, 99) if refusals_ms else None,
        health_max_ms=max(watch.health_ms),
        memory_growth_bytes=max(watch.resident_bytes) - calm_bytes,
        memory_bound_bytes=bound_bytes,
    )
    samples = {
        "resident_bytes": [float(value) for value in watch.resident_bytes],
        "health_ms": watch.health_ms,
        "refusal_ms": refusals_ms,
        "answer_ms": [(s.done - s.due) * 1000 for s in storm.samples if s.outcome == OK],
    }
    # Tens of thousands of them: the digits behind a microsecond would be most of the record.
    return outcome, {name: [round(value, 3) for value in values] for name, values in samples.items()}


def newest_records(folder: Path) -> list[Mapping[str, Any]]:
    """The last record of each network."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{_EXPERIMENT}-*.json"))]
    found = {record["config"]["model"]: record for record in sorted(records, key=lambda record: record["measured_at"])}
    return [found[model] for model in sorted(found)]


def as_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """A table of what each network gave, one column for each record."""
    lines = [
        ["", *(f"{one['config']['model']} at {one['config']['factor']:g} times its capacity" for one in records)],
        ["---", *["---:"] * len(records)],
        ["length, s", *(f"{one['config']['seconds']:g}" for one in records)],
        *(
            [label, *("none" if (value := one["results"][name]) is None else show(value) for one in records)]
            for label, name, show in _LINES
        ),
        ["targets", *("; ".join(one["results"]["missed"]) or "all reached" for one in records)],
        ["measured", *(f"{one['measured_at'][:16]}Z" for one in records)],
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.1f}"


_LINES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("saturation, images/s", "saturation_images_per_s", "{:,.0f}".format),
    ("asked for, images/s", "offered_images_per_s", "{:,.0f}".format),
    ("goodput, images/s", "goodput_images_per_s", "{:,.0f}".format),
    ("goodput / saturation", "goodput_ratio", "{:.2f}".format),
    ("the same for each second of the server's CPU time", "goodput_per_cpu_ratio", "{:.2f}".format),
    ("requests", "requests", "{:,}".format),
    ("refused with 503", "refused", "{:,}".format),
    ("neither 200 nor 503", "unanswered", lambda outcomes: f"{sum(outcomes.values()):,}"),
    ("p50 of a 503, ms", "refusal_p50_ms", "{:.1f}".format),
    ("p99 of a 503, ms", "refusal_p99_ms", "{:.1f}".format),
    ("slowest health check, ms", "health_max_ms", "{:.1f}".format),
    ("memory grew by, MiB", "memory_growth_bytes", _mebibytes),
    ("and may by, MiB", "memory_bound_bytes", _mebibytes),
)


def run(
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Length of the overload.")] = 60.0,
    only: Annotated[
        list[str] | None, typer.Option(metavar="MODEL=FACTOR", help="This case in place of the two; may be repeated.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Folder of the networks. Default: those that come with Terrace.", file_okay=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the records.", file_okay=False)] = Path("runs/overload"),
    server_core: Annotated[int, typer.Option(min=0, help="Core of the node.")] = 0,
    load_core: Annotated[int, typer.Option(min=0, help="Core of the load generator.")] = 1,
    report: Annotated[
        bool, typer.Option("--report", help="Measure nothing: print the table of the records in --out.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Put the table into this page as well, such as docs/performance.md.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a node for a multiple of what it can do, and see what it still gives: the end network at 2 times its
    capacity, the edge network at 16 times."""
    if report:
        if not (records := newest_records(out)):
            raise InvalidInput(f"no records in {out}; name their folder with --out")
        if as_json:
            typer.echo(json.dumps([{**record["config"], **record["results"]} for record in records], indent=2))
        else:
            _print_table(records, page)
        return
    check_cores(server_core, load_core)
    folder = weights or weights_folder()
    manifest = load_manifest(folder)
    cases = [read_case(text) for text in only or []] or [
        Case(model=manifest.default_for("end").name, factor=2),
        Case(model=manifest.default_for("edge").name, factor=16),
    ]
    made_folder(out)
    missed, rows = False, []
    for case in cases:
        row_bytes = math.prod(manifest.entry(case.model).input_shape)
        with _node(case.model, folder, server_core) as node, on_core(load_core):
            bound_bytes = NodeSettings().max_queue_images * row_bytes
            outcome, samples = asyncio.run(_measure(node, case, seconds, bound_bytes))
        sentences = judge(outcome, Targets())
        record = RunRecord(
            experiment=f"{_EXPERIMENT}-{case.model}",
            config={**asdict(case), "batch": BATCH, "seconds": seconds, "concurrency": _CONCURRENCY},
            samples=samples,
            results={**asdict(outcome), "missed": sentences},
        )
        typer.echo(
            f"{case.model} at {case.factor:g} times its capacity: {'; '.join(sentences) or 'all targets reached'}",
            err=as_json,
        )
        typer.echo(f"record: {record.write(out)}", err=as_json)
        rows.append({**asdict(case), **asdict(outcome), "missed": sentences})
        missed = missed or bool(sentences)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_table(newest_records(out), page)
    raise typer.Exit(1 if missed else 0)


def _print_table(records: Sequence[Mapping[str, Any]], page: Path | None) -> None:
    table = as_markdown(records)
    typer.echo(table, nl=False)
    if page is not None:
        fill(page, _EXPERIMENT, table)


def read_case(text: str) -> Case:
    """Read "model=factor".

    Raises:
        InvalidInput: it is not that.
    """
    model, _, factor = text.rpartition("=")
    try:
        case = Case(model=model, factor=float(factor))
    except ValueError:
        case = Case(model="", factor=0)
    if not case.model or not 0 < case.factor < math.inf:
        raise InvalidInput(f"{text!r} is no case: write MODEL=FACTOR, such as mobilenet-v1-0.5=2")
    return case
