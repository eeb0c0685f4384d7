"""`terrace experiment`: the paper's tables and figures, and what else a fleet costs on given machines and links."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.markup import escape

from experiments.bench.load import loop_factory
from experiments.catalog import ALL, EXPERIMENTS
from experiments.cost import parse_prices
from experiments.harness import MOST_TASKS, Experiment, Options, Outcome, Request, execute, extent, new_folder, option
from experiments.plots import Figures
from experiments.profile import NodeNumbers, read_profile
from experiments.record import LARGEST_SEED
from experiments.report import write_report
from terrace.cli import INTERRUPTED
from terrace.console import print_json, progress_bars, results_table, screen
from terrace.options import Json
from terrace.stoppable import run_stoppable
from tierkit.errors import MissingExtra, TerraceError

__all__ = ["app", "experiment_app"]


def _run_folder(text: str) -> Path:
    if os.path.exists(text) and not os.path.isdir(text):
        raise typer.BadParameter(f"{text!r} is a file; a folder is expected")
    return Path(text)


def _report_folder(text: str) -> Path:
    if not os.path.isdir(_run_folder(text)):
        raise typer.BadParameter(f"there is no folder {text!r}")
    return Path(text)


class _Common(Options):
    """Options of all experiments, but for what one `ignores`."""

    profile: str = option("paper", "Machines and links: a name, or a TOML file of your own.", metavar="NAME|FILE")
    out: Path | None = option(
        None,
        "New folder for record, table and plots; if DIRECTORY exists, DIRECTORY-2 is made. Default: runs/NAME-TIME.",
        parser=_run_folder,
        metavar="DIRECTORY",
    )
    quick: bool = option(False, "A short run with smaller defaults, to check that it works.", names="--quick")
    seed: int = option(0, "Seed of all random choices.", min=0, max=LARGEST_SEED)
    tasks: int | None = option(None, "Tasks of 50 images. Default: 200; 40 with --quick.", min=8, max=MOST_TASKS)
    data: Path | None = option(None, "Folder with CIFAR-100; without it, the bundled sample.", envvar="TERRACE_DATA")


_INVALID = 1


def _all(options: Mapping[str, Any], common: dict[str, Any]) -> None:
    """Run all experiments, one after the other; a failure does not stop the others.

    Experiments without emulation run at this machine's speed with any profile.
    """
    _run(ALL, None, **common)


def _command(experiments: Mapping[str, Experiment], name: str) -> Callable[[Mapping[str, Any], dict[str, Any]], None]:
    def command(options: Mapping[str, Any], common: dict[str, Any]) -> None:
        experiment = experiments[name]
        if experiment.profile is None and common["profile"] != "native":
            read_profile(common["profile"])  # one that does not exist is refused all the same
            _note(
                f"{experiment.name} measures this machine and these networks as they are: "
                f"the profile {common['profile']} has no part in it"
            )
            common["profile"] = "native"
        _run([experiment], experiment.options.model_validate(options), **common)

    summary = experiments[name].summary
    command.__doc__ = f"{summary[0].upper()}{summary[1:]}."
    return command


def _add(
    app: typer.Typer,
    name: str,
    run: Callable[[Mapping[str, Any], dict[str, Any]], None],
    experiment: Experiment | None = None,
) -> None:
    """A command with the options of this experiment, or of all of them, and with the common ones."""
    own = experiment.options.model_fields if experiment else {}
    left_out = {*(experiment.ignores if experiment else ("tasks",)), *own}
    fields = {**own, **{field: about for field, about in _Common.model_fields.items() if field not in left_out}}
    kinds: dict[str, Any] = {}
    defaults = {field: about.default for field, about in {**_Common.model_fields, **fields}.items()} | {"json": False}
    defaults["profile"] = (experiment.profile or "native") if experiment else "paper"
    for field, about in fields.items():
        facts = dict(cast(dict[str, Any], about.json_schema_extra or {}))
        kind: Any = about.annotation
        if kind == NodeNumbers | None:
            kind, facts["metavar"] = str | None, "N,N-N,..."
        if facts.pop("quick", None) is not None:
            kind, defaults[field] = kind | None, None  # its help names the two
        names = [facts.pop("names")] if "names" in facts else []
        kinds[field] = Annotated[kind, typer.Option(*names, help=about.description, **facts)]
    kinds["json"] = Json

    def command(**given: Any) -> None:
        common = {field: given.get(field, defaults[field]) for field in (*_Common.model_fields, "json")}
        run({field: given[field] for field in own if given[field] not in (None, [])}, common)

    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what typer reads
        [inspect.Parameter(field, keyword, annotation=kind, default=defaults[field]) for field, kind in kinds.items()]
    )
    command.__annotations__ = kinds
    command.__doc__ = run.__doc__
    app.command(name)(command)


def experiment_app(experiments: Mapping[str, Experiment], help_text: str) -> typer.Typer:
    """A command for each of these experiments, and one for the report of their runs."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=help_text)

    for experiment in experiments.values():
        _add(app, experiment.name, _command(experiments, experiment.name), experiment)

    @app.command()
    def report(
        folder: Annotated[
            Path,
            typer.Argument(metavar="DIR", help="Folder with runs, at any depth.", parser=_report_folder),
        ],
        price: Annotated[
            list[str] | None,
            typer.Option(
                metavar="TIER=PRICE",
                help="Price of a machine an hour; may be repeated. The page then shows the cost of 1,000 images.",
            ),
        ] = None,
    ) -> None:
        """Make tables and plots of all records in a folder again, and one HTML page of them."""
        page, warnings = write_report(folder, experiments, parse_prices(price) if price else None)
        for warning in warnings:
            _note(warning)
        screen().print(str(page), soft_wrap=True, markup=False)

    return app


def _note(text: str) -> None:
    screen(stderr=True).print(f"[yellow]note[/yellow]  {escape(text)}", soft_wrap=True)


def _request(profile: str, quick: bool, seed: int, tasks: int | None, data: Path | None) -> Request:
    machines = read_profile(profile).model_copy(update={"seed": seed})
    return Request(profile_name=profile, profile=machines, quick=quick, seed=seed, tasks=tasks, data=data)


def _run(
    experiments: Sequence[Experiment], options: Options | None, *, out: Path | None, json: bool, **asked: Any
) -> None:
    """Run them one after the other, each into a new folder, until one is stopped. Of several, one that fails or
    cannot be trusted does not keep the others from being measured."""
    request = _request(**asked)
    began = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
    whole = new_folder(out or Path("runs", f"all-{began}")) if len(experiments) > 1 else None
    # A single one has been asked for with its own profile.
    native = _request(**{**asked, "profile": "native"}) if whole else request
    no_plots = _without_plots()
    if no_plots:
        _note(no_plots)
    found: dict[str, Any] = {}
    states: set[str] = set()
    for number, experiment in enumerate(experiments, 1):
        folder = whole / experiment.name if whole else out or Path("runs", f"{experiment.name}-{began}")
        title = f"{experiment.name} ({number} of {len(experiments)})" if whole else experiment.name
        try:
            outcome = _execute(experiment, request if experiment.profile == "paper" else native, options, folder, title)
        except TerraceError as exc:
            if whole is None:
                raise
            states.add("invalid")
            screen(stderr=True).print(f"[red]not measured[/red]: {experiment.name}: {escape(str(exc))}", soft_wrap=True)
            continue
        rows = outcome.record["results"]["rows"]
        found[experiment.name] = rows[0] if experiment.one_row and rows else rows
        if not json:
            _show(experiment, outcome)
        for warning in outcome.warnings:
            if warning != no_plots:
                _note(warning)
        states.add(state := outcome.record["state"])
        if any(row.get("missed") for row in rows):  # targets
            states.add("missed")
        if state != "complete":
            why = escape(outcome.record["notes"][-1])
            screen(stderr=True).print(f"[red]{state}[/red]: {experiment.name}: {why}", soft_wrap=True)
        if state == "interrupted":
            break
    if json:
        print_json(found if whole else found[experiments[0].name])
    if states != {"complete"}:
        raise typer.Exit(INTERRUPTED if "interrupted" in states else _INVALID)


def _without_plots() -> str:
    """Return why there will be no plots; "" if matplotlib is installed."""
    try:
        Figures()
    except MissingExtra as exc:
        return f"no plots: {exc}"
    return ""


def _execute(experiment: Experiment, request: Request, options: Options | None, folder: Path, title: str) -> Outcome:
    with progress_bars("step") as progress:
        bar = progress.add_task(title, total=None)

        def tell(label: str, done: int, steps: int) -> None:
            progress.update(bar, description=f"{title}: {label}", completed=done, total=steps)

        outcome = run_stoppable(lambda: execute(experiment, request, folder, tell, options), loop_factory())
    if outcome is None:
        raise typer.Exit(INTERRUPTED)
    return outcome


def _show(experiment: Experiment, outcome: Outcome) -> None:
    console, table = screen(), outcome.table
    shown = results_table(table.columns, table.rows, spare=table.spare)
    console.print(f"[bold]{experiment.name}[/bold]  {experiment.summary}")
    console.print(shown)
    if left_out := shown.left_out(console.width):
        words = escape("; ".join(left_out))
        console.print(f"[dim]not shown for want of width, but in the table's file: {words}[/dim]")
    for note in outcome.record["notes"]:
        console.print(note, style="dim", soft_wrap=True, markup=False)
    made = "record, table and plots" if outcome.figures is not None and outcome.figures.shown() else "record and table"
    console.print(extent(experiment, outcome.record), style="dim", soft_wrap=True, markup=False)
    console.print(f"{made}: {outcome.folder}", style="dim", soft_wrap=True, markup=False)


app = experiment_app(EXPERIMENTS, "Measure the paper's tables and figures, and other costs.")
_add(app, "all", _all)
