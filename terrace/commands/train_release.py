"""`terrace train release`: a finished run becomes a model set and a release. Needs the extra `train`."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

from models.dataset import BuiltIn, Dataset
from terrace.commands.training import say
from terrace.console import percent, print_json, screen
from terrace.options import Credentials, Data, Json, OtherDataset, check_tls_ca, optional_plain_name, with_options
from terrace.stoppable import interruptible
from tierkit.extras import training_extra
from tierkit.plaintext import one_line

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_SET = "model-set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Options of `terrace train release`."""

    name: Annotated[
        str | None,
        typer.Option(help="Name of the release. Default: the network's.", callback=optional_plain_name),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help=f"New folder for the model set. Default: {_SET} in the run folder.", file_okay=False),
    ] = None
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="SET",
            help="Model set to begin with. Default: with --scheduler its release in force, otherwise Terrace's own.",
            file_okay=False,
        ),
    ] = None
    records: Annotated[
        Path | None,
        typer.Option(
            help="Folder with training records of the other networks; a scheduler keeps none.", file_okay=False
        ),
    ] = None
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Make the release at this scheduler. Default: only the model set is made."),
    ] = None
    unfinished: Annotated[bool, typer.Option("--unfinished", help="Accept a run that has steps left.")] = False
    data: Data = None
    dataset: OtherDataset = None


@app.command()
@interruptible
@with_options
def release(
    context: typer.Context,
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Folder of a training run.", exists=True, file_okay=False, show_default=False
        ),
    ],
    options: Released,
    credentials: Credentials,
    json: Json = False,
) -> None:
    """Make a model set and a release of a finished run: export, INT8, temperature, evaluation and thresholds."""
    with training_extra("making a release of a run"):
        from terrace.run_release import base_of, check_run, make_set
    record = check_run(run, may_be_unfinished=options.unfinished)
    if options.dataset is None and record.data not in get_args(BuiltIn):
        raise typer.BadParameter(f"name the folder of the data set {record.data!r}", param_hint="--dataset")
    dataset = Dataset.open(options.dataset or record.data, options.data)
    with ExitStack() as stack:
        client = None
        if options.scheduler is not None:
            check_tls_ca(context, options.scheduler)
            client = stack.enter_context(credentials.connect(options.scheduler))
        base = base_of(options.models, client, options.records)
        made = make_set(run, dataset, options.out or run / _SET, base, say)
        network = made.network
        release = None if client is None else client.create_release(options.name or network.name, made.folder)
    if json:
        print_json(
            {
                "run": str(run),
                "set": str(made.folder),
                "network": network.model_dump(mode="json"),
                "thresholds": made.tuning is not None,
                "release": None if release is None else release.release,
                "state": None if release is None else release.state,
            }
        )
        return
    accuracies = f"coarse {percent(network.coarse_accuracy)}, fine {percent(network.fine_accuracy)}"
    _print(f"{network.name}: {accuracies} of {network.test_images:,} test images, INT8; set {made.folder}")
    if release is None:
        _print(f"serve it: terrace up --models {shlex.quote(str(made.folder))}")
        return
    _print(f"{release.release}: {release.state}")
    if release.state not in ("in force", "canary", "rolling out"):
        at = f" --scheduler {shlex.quote(options.scheduler or '')}"
        _print(f"try it: terrace models release start {release.release}{at}")


def _print(text: str) -> None:
    screen().print(one_line(text), soft_wrap=True, markup=False, highlight=False)
