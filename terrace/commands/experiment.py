"""`terrace experiment`: the paper's tables and figures, and what else a fleet costs on given machines and links."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import (
    beats,
    durability,
    escalation,
    figure3,
    heartbeat,
    main_job,
    overload,
    slow_edge,
    steady,
    table4,
    table5,
)
from experiments.catalog import ALL, EXPERIMENTS
from experiments.chaos import experiment as chaos
from experiments.fuzz import experiment as fuzz
from experiments.harness import MOST_TASKS, Experiment, Outcome, Request, execute, extent, new_folder
from experiments.peers import command as peers
from experiments.profile import MAX_NODES, read_profile
from experiments.record import LARGEST_SEED
from experiments.report import write_report
from experiments.scale import experiment as scale
from experiments.table1 import TABLE1, TABLE3
from experiments.table2 import TABLE2
from terrace.console import print_json, screen
from terrace.options import Json
from terrace.results_table import results_table
from terrace.stoppable import run_stoppable
from tierkit.commandline import UsageError, asked_wrongly
from tierkit.errors import InvalidInput, SetupError, TerraceError
from tierkit.types import EncoderKind, FeatureForm, Privacy, Recovery, Scheme

__all__ = ["app"]


class _Experiments(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run one. What cannot be measured because it was asked for wrongly is a mistake in the command line."""
        try:
            return super().invoke(ctx)
        except (InvalidInput, SetupError) as exc:
            if asked_wrongly(exc):
                name = ctx.invoked_subcommand
                where = typer.Context(self.get_command(ctx, name) or self, info_name=name, parent=ctx)
                raise UsageError(str(exc), ctx=where) from exc
            raise


app = typer.Typer(
    cls=_Experiments,
    add_completion=False,
    no_args_is_help=True,
    help="Measure the paper's tables and figures, and other costs.",
)

_NUMBERS = re.compile(r"([0-9]{1,99})(?:-([0-9]{1,99}))?")
"""Of so many digits, which are too many for a fleet, but not for a sentence that says so."""

_MOST_RUNS, _MOST_FAULTS, _MOST_JOBS, _MOST_MINUTES = 1_000, 1_000_000, 10_000, 10_000
_MOST_REQUESTS = 1_000_000_000
_MOST_SIMULATED = 10_000_000
_LEAST_MBPS = 0.01

ProfileName = Annotated[
    str, typer.Option("--profile", metavar="NAME|FILE", help="Machines and links: a name, or a TOML file of your own.")
]


def _run_folder(text: str) -> Path:
    if not text:  # as a path it would be the current folder
        raise typer.BadParameter("an empty name is none for a folder")
    if os.path.exists(text) and not os.path.isdir(text):
        raise typer.BadParameter(f"{text!r} is a file; a folder is expected")
    return Path(text)


def _report_folder(text: str) -> Path:
    if not os.path.isdir(_run_folder(text)):
        raise typer.BadParameter(f"there is no folder {text!r}")
    return Path(text)


Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the run; one that exists is kept, and the run's stands beside it.",
        parser=_run_folder,
        metavar="DIRECTORY",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="A short run, to see that it works: the smaller defaults.")]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of all that is drawn by chance.")]
Tasks = Annotated[
    int | None, typer.Option(min=8, max=MOST_TASKS, help="Tasks of 50 images. Default: 200; 40 with --quick.")
]
Data = Annotated[
    Path | None, typer.Option(envvar="TERRACE_DATA", help="Folder with CIFAR-100; without it, the bundled sample.")
]
Runs = Annotated[int | None, typer.Option(min=1, max=_MOST_RUNS, help="Runs of each cell. Default: 5; 1 with --quick.")]
Failures = Annotated[
    str | None,
    typer.Option(metavar="N,N-N,...", help="How many devices fall silent. Default: 0 to 6.", show_default=False),
]
Methods = Annotated[list[Recovery] | None, typer.Option("--method", help="Only this method; may be repeated.")]

_INVALID, _INTERRUPTED = 1, 130


@app.command("all")
def all_command(
    profile: ProfileName = "paper",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    data: Data = None,
    json: Json = False,
) -> None:
    """All of them, one after the other; one that fails does not stop the others.

    Those that emulate nothing run at this machine's speed whatever the profile.
    """
    _run(ALL, _request(profile, quick, seed, None, data), out, json=json)


@app.command("report")
def report_command(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder with runs, at any depth.", parser=_report_folder),
    ],
) -> None:
    """Make tables and plots of all records in a folder again, and one HTML page of them."""
    page, warnings = write_report(folder, EXPERIMENTS)
    for warning in warnings:
        _note(warning)
    screen().print(str(page), soft_wrap=True, markup=False)


# Measurements of this machine as it is, which have options of their own.
app.command("peers")(peers.run)
app.command("overload")(overload.run)
app.command("durability")(durability.run)
app.command("main-job")(main_job.run)
app.command("beats")(beats.run)


@app.command("figure4", help="The same as table5.")
@app.command("table5")
def table5_command(
    runs: Runs = None,
    failures: Failures = None,
    methods: Methods = None,
    profile: ProfileName = "paper",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    tasks: Tasks = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Time to finish against devices that fall silent, for three methods."""
    numbers = None if failures is None else _numbers(failures)
    experiment = table5.configured(runs=runs, failures=numbers, methods=methods or tuple(Recovery))
    _run([experiment], _request(profile, quick, seed, tasks, data), out, json=json)


@app.command("figure3")
def figure3_command(
    ends: Annotated[
        str | None,
        typer.Option(
            metavar="N,N-N,...",
            help="Numbers of end devices, up to the profile's. Default: 1 to all; half and all with --quick.",
        ),
    ] = None,
    window: Annotated[
        list[int] | None,
        typer.Option(min=1, max=64, help="Tasks under way per end device; may be repeated. Default: 1, and enough."),
    ] = None,
    scheme: Annotated[list[Scheme] | None, typer.Option(help="Only this scheme; may be repeated.")] = None,
    privacy: Annotated[
        Privacy, typer.Option(help="What goes up: pixels (none, auto), or the features of an encoder.")
    ] = Privacy.CONV1,
    runs: Annotated[int, typer.Option(min=1, max=_MOST_RUNS, help="Runs of each point.")] = 1,
    profile: ProfileName = "paper",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    tasks: Tasks = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Time to finish against the number of end devices, for each scheme, beside formula and bound."""
    numbers = None if ends is None else _numbers(ends)
    experiment = figure3.configured(
        ends=numbers, windows=window, schemes=scheme or tuple(Scheme), privacy=privacy, runs=runs
    )
    _run([experiment], _request(profile, quick, seed, tasks, data), out, json=json)


@app.command("slow-edge")
def slow_edge_command(
    ends: Annotated[
        str | None,
        typer.Option(
            metavar="N,N-N,...",
            help="Numbers of end devices, up to the profile's. Default: half, three quarters, all; all with --quick.",
        ),
    ] = None,
    after: Annotated[
        list[float] | None,
        typer.Option(
            min=0, max=1, help="Part of the job before; may be repeated. Default: 0.25, 0.5, 0.75; 0.5 with --quick."
        ),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, max=_MOST_RUNS, help="Runs of each point.")] = 1,
    profile: ProfileName = "paper",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    tasks: Tasks = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Time to finish with the scheme adaptive when an edge node becomes four times slower in mid-job."""
    numbers = None if ends is None else _numbers(ends)
    experiment = slow_edge.configured(ends=numbers, parts=after, runs=runs)
    _run([experiment], _request(profile, quick, seed, tasks, data), out, json=json)


@app.command("chaos", help="Kill, stop and cut off services under load, and count what gets lost.")
def chaos_command(
    faults: Annotated[
        int | None, typer.Option(min=1, max=_MOST_FAULTS, help="Default: 1,000; 60 with --quick.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=_MOST_JOBS, help="At least so many. Default: 20; 2 with --quick.")
    ] = None,
    profile: ProfileName = "native",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    tasks: Annotated[int, typer.Option(min=1, max=MOST_TASKS, help="Tasks of 50 images in each job.")] = 20,
    data: Data = None,
    json: Json = False,
) -> None:
    _run([chaos.configured(faults=faults, jobs=jobs)], _request(profile, quick, seed, tasks, data), out, json=json)


@app.command("steady", help="Nodes given up for no reason, under full load of the processor.")
def steady_command(
    minutes: Annotated[
        float | None, typer.Option(min=0.01, max=_MOST_MINUTES, help="Default: 30; 2 with --quick.")
    ] = None,
    profile: ProfileName = "native",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    tasks: Tasks = None,
    data: Data = None,
    json: Json = False,
) -> None:
    _run([steady.configured(minutes=minutes)], _request(profile, quick, seed, tasks, data), out, json=json)


@app.command("fuzz")
def fuzz_command(
    requests: Annotated[
        int | None, typer.Option(min=1, max=_MOST_REQUESTS, help="Default: 1,000,000; 20,000 with --quick.")
    ] = None,
    profile: ProfileName = "native",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Send changed and broken requests to a fleet, and check the answers that another client gets."""
    _run([fuzz.configured(requests=requests)], _request(profile, quick, seed, None, None), out, json=json)


@app.command("table1")
def table1_command(
    profile: ProfileName = "native",
    out: Out = None,
    quick: Quick = False,
    tasks: Tasks = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Inference time of each network on the hardware of each tier, accuracy and size."""
    _run([TABLE1], _request(_as_it_is(TABLE1, profile), quick, 0, tasks, data), out, json=json)


@app.command("table2")
def table2_command(
    profile: ProfileName = "paper",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    tasks: Annotated[
        int | None, typer.Option(min=1, max=MOST_TASKS, help="Tasks of each row. Default: 50; 10 with --quick.")
    ] = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Inference and processing time on each tier, with and without the latency of the links."""
    _run([TABLE2], _request(profile, quick, seed, tasks, data), out, json=json)


@app.command("table3")
def table3_command(profile: ProfileName = "native", out: Out = None, json: Json = False) -> None:
    """Output, parameters and size of the encoders."""
    _run([TABLE3], _request(_as_it_is(TABLE3, profile), False, 0, None, None), out, json=json)


@app.command("table4")
def table4_command(
    encoder: Annotated[EncoderKind, typer.Option(help="Whose features are sent.")] = EncoderKind.CONV1,
    form: Annotated[FeatureForm, typer.Option(help="How they are written.")] = FeatureForm.UINT8,
    latency: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=60,
            help="Seconds to the upper node and back; may be repeated. Default: 0.5, 1, 1.5, 2; 0.5, 2 with --quick.",
        ),
    ] = None,
    bandwidth: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=1_000_000,
            help="Mbit/s of every link, 0.01 at least, or 0: the profile's; may be repeated. Default: 0, 100, 10.",
        ),
    ] = None,
    profile: ProfileName = "paper",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    tasks: Annotated[
        int | None, typer.Option(min=1, max=MOST_TASKS, help="Tasks of each cell. Default: 5; 2 with --quick.")
    ] = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """What an encoder adds to the time of a task, on an end device and on an edge node, split as in Eq. 8."""
    for mbps in bandwidth or ():
        if 0 < mbps < _LEAST_MBPS:  # a task would be on its way for minutes
            raise InvalidInput(f"--bandwidth {mbps:g} is too little: take {_LEAST_MBPS:g} at least, or 0")
    limits = None if bandwidth is None else [mbps or None for mbps in bandwidth]
    experiment = table4.configured(kind=encoder, form=form, latencies_s=latency, bandwidths_mbps=limits)
    _run([experiment], _request(profile, quick, seed, tasks, data), out, json=json)


@app.command("escalation")
def escalation_command(
    budget: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the images that may go up; may be repeated. Default: 0.1 to 0.75, quick 0.25 and 0.5.",
        ),
    ] = None,
    accuracy: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the upper network's accuracy to keep; may be repeated. Default: 0.95 to 0.99, quick 0.99.",
        ),
    ] = None,
    profile: ProfileName = "paper",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    tasks: Tasks = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Accuracy against cost when only unsure images go up a tier."""
    _run(
        [escalation.configured(budgets=budget or None, accuracies=accuracy or None)],
        _request(profile, quick, seed, tasks, data),
        out,
        json=json,
    )


@app.command("scale")
def scale_command(
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENDS/EDGES/CLOUDS",
            help="Simulated fleet; may be repeated. Default: up to 100000/2000/50; 1000/50/2 with --quick.",
        ),
    ] = None,
    scheme: Annotated[
        list[Scheme] | None, typer.Option(help="Only this scheme; may be repeated. Default: mapping and adaptive.")
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_SIMULATED,
            help="Of each fleet of --size. Default: 100 per end device, 1,000,000 at most.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Record of a figure3 run to hold the simulation against.", dir_okay=False, exists=True),
    ] = None,
    validate: Annotated[
        bool, typer.Option(help="Hold the simulation against the real fleet: measured now, unless --against is given.")
    ] = True,
    profile: ProfileName = "paper",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    data: Data = None,
    json: Json = False,
) -> None:
    """The scheduler's own code on virtual time, with fleets that grow to 100,000 nodes."""
    sizes = [scale.Size.read(text, tasks) for text in size or ()]
    chosen = {"schemes": scheme} if scheme else {}
    experiment = scale.configured(sizes=sizes or None, against=against, validate=validate, **chosen)
    _run([experiment], _request(profile, quick, seed, None, data), out, json=json)


@app.command("heartbeat")
def heartbeat_command(
    times: Annotated[
        int | None,
        typer.Option(
            min=1, max=_MOST_RUNS, help="How often a node ends, for each interval. Default: 20; 5 with --quick."
        ),
    ] = None,
    interval: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            max=60,
            help="Heartbeat interval in seconds; may be repeated. Default: 0.05 to 2; 0.05, 0.2, 1 with --quick.",
        ),
    ] = None,
    mode: Annotated[
        list[heartbeat.Mode] | None, typer.Option(help="stop: SIGSTOP, it falls silent (default); kill: SIGKILL.")
    ] = None,
    profile: ProfileName = "native",
    out: Out = None,
    quick: Quick = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """The heartbeat interval against detection time and cost."""
    modes = mode or (heartbeat.Mode.STOP,)
    experiment = heartbeat.configured(times=times, intervals=interval, modes=modes)
    _run([experiment], _request(profile, quick, seed, None, None), out, json=json)


def _note(text: str) -> None:
    screen(stderr=True).print(f"[yellow]note[/yellow]  {escape(text)}", soft_wrap=True)


def _as_it_is(experiment: Experiment, profile: str) -> str:
    """The profile of an experiment that has nothing to emulate: `native`, and a word about it if another was wanted."""
    if profile != "native":
        read_profile(profile)  # one that does not exist is refused all the same
        _note(
            f"{experiment.name} measures this machine and these networks as they are: "
            f"the profile {profile} has no part in it"
        )
    return "native"


def _request(profile: str, quick: bool, seed: int, tasks: int | None, data: Path | None) -> Request:
    machines = read_profile(profile).model_copy(update={"seed": seed})
    return Request(profile_name=profile, profile=machines, quick=quick, seed=seed, tasks=tasks, data=data)


def _run(experiments: Sequence[Experiment], request: Request, out: Path | None, *, json: bool) -> None:
    """Run them one after the other, each into a folder of its own, until one is stopped. Of several, one that fails or
    cannot be trusted does not keep the others from being measured."""
    began = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
    whole = new_folder(out or Path("runs", f"all-{began}")) if len(experiments) > 1 else None
    # A single one has been asked for with its own profile.
    native = _request("native", request.quick, request.seed, request.tasks, request.data) if whole else request
    found: dict[str, Any] = {}
    states: set[str] = set()
    for number, experiment in enumerate(experiments, 1):
        folder = whole / experiment.name if whole else out or Path("runs", f"{experiment.name}-{began}")
        title = f"{experiment.name} ({number} of {len(experiments)})" if whole else experiment.name
        try:
            outcome = _execute(experiment, request if experiment.emulates else native, folder, title)
        except TerraceError as exc:
            if whole is None:
                raise
            states.add("invalid")
            screen(stderr=True).print(f"[red]not measured[/red]: {experiment.name}: {escape(str(exc))}", soft_wrap=True)
            continue
        rows = outcome.record["results"]["rows"]
        found[experiment.name] = rows[0] if experiment.one_row else rows
        if not json:
            _show(experiment, outcome)
        for warning in outcome.warnings:
            _note(warning)
        states.add(state := outcome.record["state"])
        if state != "complete":
            why = escape(outcome.record["notes"][-1])
            screen(stderr=True).print(f"[red]{state}[/red]: {experiment.name}: {why}", soft_wrap=True)
        if state == "interrupted":
            break
    if json:
        print_json(found if whole else found[experiments[0].name])
    if states != {"complete"}:
        raise typer.Exit(_INTERRUPTED if "interrupted" in states else _INVALID)


def _execute(experiment: Experiment, request: Request, folder: Path, title: str) -> Outcome:
    console = screen(stderr=True)
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
        # Into a file it would leave an empty line behind.
        disable=not console.is_terminal,
    )
    with progress:
        bar = progress.add_task(title, total=None, left="")

        def tell(label: str, done_s: float, all_s: float) -> None:
            words = f"{title}: {label}"
            progress.update(bar, description=words, completed=done_s, total=all_s, left=_left(all_s - done_s))

        outcome = run_stoppable(lambda: execute(experiment, request, folder, tell))
    if outcome is None:
        raise typer.Exit(_INTERRUPTED)
    return outcome


def _left(seconds: float) -> str:
    """How long it still takes. A step that takes longer than was expected holds the time, as it does the bar."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"about {minutes // 60}:{minutes % 60:02}:{rest:02} left" if minutes or rest else "nearly done"


def _show(experiment: Experiment, outcome: Outcome) -> None:
    console, table = screen(), outcome.table
    shown, left_out = results_table(table.headings, table.rows, width=console.width, spare=table.spare)
    console.print(f"[bold]{experiment.name}[/bold]  {experiment.summary}")
    console.print(shown)
    if left_out:
        words = escape("; ".join(left_out))
        console.print(f"[dim]not shown for want of width, but in the table's file: {words}[/dim]")
    for note in outcome.record["notes"]:
        console.print(note, style="dim", soft_wrap=True, markup=False)
    made = "record, table and plots" if outcome.figures is not None and outcome.figures.shown() else "record and table"
    console.print(extent(experiment, outcome.record), style="dim", soft_wrap=True, markup=False)
    console.print(f"{made}: {outcome.folder}", style="dim", soft_wrap=True, markup=False)


def _numbers(text: str) -> list[int]:
    """ "0,2-4" as numbers of end devices: 0, 2, 3, 4. What they may be is up to the experiment."""
    numbers: set[int] = set()
    for part in text.split(","):
        found = _NUMBERS.fullmatch(part.strip())
        if found is None:
            raise InvalidInput(f"{text!r} is no list of numbers: write such as 0,1,6 or 1-8")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise InvalidInput(
                f"{part.strip()!r} is no range: its first number is the smaller one, as in {last}-{first}"
            )
        if last > MAX_NODES:
            raise InvalidInput(f"{part.strip()!r}: a fleet has at most {MAX_NODES} end devices")
        numbers.update(range(first, last + 1))
    return sorted(numbers)
