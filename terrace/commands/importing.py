"""`terrace models import`: an ONNX file of your own becomes a network of a model set."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrace.commands.training import say
from terrace.console import percent, print_json, screen
from terrace.options import Json, optional_plain_name, with_options
from terrace.stoppable import interruptible
from tierkit.errors import MissingExtra
from tierkit.types import Tier

if TYPE_CHECKING:
    from models.importing.run import ImportReport

__all__ = ["import_network"]

_LONGEST_NAME = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Arguments and options of `terrace models import`."""

    file: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="The network.", exists=True, dir_okay=False)]
    models: Annotated[
        Path, typer.Option(metavar="SET", help="Folder of the model set; made if it is missing.", file_okay=False)
    ]
    tier: Annotated[Tier, typer.Option(help="Tier that runs it.")]
    labels: Annotated[
        Path | None,
        typer.Option(
            help="Class names in the order of the outputs: one in each line, or JSON such as a config.json with "
            "id2label. Default: those in the network's own files.",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    hierarchy: Annotated[
        Path | None,
        typer.Option(help="Superclasses (TOML), if an end network answers those.", exists=True, dir_okay=False),
    ] = None
    preprocess: Annotated[
        Path | None,
        typer.Option(help="Form of the pixels that the network expects (TOML).", exists=True, dir_okay=False),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(help="Name of the network. Default: the name of the file.", callback=optional_plain_name),
    ] = None
    int8: Annotated[bool, typer.Option("--int8", help="Quantise it to INT8; needs --calibrate.")] = False
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Folder of typical pictures to quantise with.", exists=True, file_okay=False),
    ] = None
    validate: Annotated[
        Path | None,
        typer.Option(
            help="Labelled pictures, in folders named after the classes: measures accuracy and looks for mistakes.",
            exists=True,
            file_okay=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.int8 != (self.calibrate is not None):
            raise typer.BadParameter("--int8 and --calibrate go together", param_hint="--int8")


@interruptible
@with_options
def import_network(options: ImportOptions, json: Json = False) -> None:
    """Add your own ONNX network to a model set, with its preprocessing inside."""
    try:
        from models.importing.run import Wish, import_network as run
    except ImportError as exc:
        raise MissingExtra("import", "importing a network") from exc
    wish = {key: value for key, value in asdict(options).items() if key != "int8"}
    report = run(Wish(**wish), say)
    if report.mistake is not None:
        found = report.mistake
        say(
            f"likely a mistake: with {found.change} in preprocess.toml it is right on {percent(found.accuracy)} of "
            f"{found.images} pictures, as it stands on {percent(found.given_accuracy)}"
        )
    if json:
        print_json(_facts(report))
        return
    entry = report.entry
    height, width, _ = entry.input_shape
    screen().print(
        f"{entry.name}: {entry.classes} classes on the {entry.tier} tier, {width} x {height} pixels "
        f"({entry.resize}, {entry.resample}), "
        f"{entry.precision.upper()}, {entry.size_bytes / 1e6:.1f} MB, {report.ms_per_image:.2f} ms/image",
        soft_wrap=True,
        markup=False,
    )
    if entry.test_images:
        own = entry.fine_accuracy if entry.target == "fine" else entry.coarse_accuracy
        screen().print(f"right on {percent(own)} of {entry.test_images} pictures", markup=False, soft_wrap=True)
    if report.same_answers is not None:
        screen().print(
            f"INT8 answers {percent(report.same_answers)} of the calibration pictures as FP32 does",
            markup=False,
            soft_wrap=True,
        )
    screen().print(f"licence: {entry.licence}", style="dim", markup=False, soft_wrap=True)
    screen().print(f"preprocessing from {', '.join(report.sources)}", style="dim", markup=False, soft_wrap=True)
    if report.one_by_one:
        screen().print("runs one picture at a time", style="dim", markup=False, soft_wrap=True)
    if report.assumed:
        said = f"assumed, as nothing says otherwise: {'; '.join(report.assumed)} (--validate tells whether it fits)"
        screen().print(said, style="dim", markup=False, soft_wrap=True)
    screen().print(str(options.models / entry.file), style="dim", markup=False, soft_wrap=True)
    models, name = shlex.quote(str(options.models)), _release_name(options.models)
    said = f"to give it to a running fleet: terrace models release create {name} --models {models}"
    screen().print(said, style="dim", markup=False, soft_wrap=True)


def _release_name(models: Path) -> str:
    """Name for a release of a model set, after its folder."""
    return re.sub(r"[^a-z0-9._-]+", "-", models.resolve().name.lower()).strip("-._")[:_LONGEST_NAME] or "networks"


def _facts(report: ImportReport) -> dict[str, Any]:
    facts = asdict(report)
    return {
        **facts,
        "entry": report.entry.model_dump(mode="json"),
        "preprocess": report.preprocess.model_dump(mode="json"),
    }
