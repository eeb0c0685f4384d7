"""`terrace models`: the networks that ship, their accuracy and speed, and how they are made.

`list`, `show`, `verify`, `eval`, `speed`, `cut-encoder` and `tune-escalation` need only ONNX Runtime; `train`, `export`
and `quantize` need the extra `train`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from encryption.conv1 import add_conv1
from models.costs import with_costs
from models.dataset import CIFAR100, Dataset
from models.escalation import Tuning
from models.evaluate import evaluate
from models.export import FP32_NAME
from models.manifest import (
    MANIFEST_NAME,
    EncoderEntry,
    Manifest,
    ModelEntry,
    begin_weights,
    load_manifest,
    parse_manifest,
    records_folder,
    weights_folder,
)
from models.session import import_runtime, load_model, verify_file
from models.speed import measure_ms_per_image, probe_images
from models.tuning import TuningReport, TuningTarget, caution, tune_weights
from models.verify import verify_encoder, verify_entry
from terrace.commands import releases
from terrace.commands.answers import answers
from terrace.commands.fitting import fit_networks, place_layers
from terrace.commands.importing import import_network
from terrace.commands.processors import Processor, within_cores
from terrace.commands.training import TrainingOptions, say, training_command
from terrace.console import Column, Listing, percent, plain_table, print_json, progress_bars, screen, tier_text
from terrace.options import (
    Credentials,
    Data,
    DatasetName,
    Json,
    ModelSet,
    OtherDataset,
    check_tls_ca,
    on_command_line,
    plain_name,
    with_options,
)
from terrace.stoppable import interruptible
from tierkit.distribution import install_command
from tierkit.errors import MissingExtra, NotFound, WeightsError
from tierkit.extras import training_extra
from tierkit.wire.api import Device

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Show, check, measure and make the networks.")
app.add_typer(releases.app, name="release")

Records = Annotated[
    Path | None, typer.Option(help="Folder of the training records. Default: `records` in the model set.")
]
Out = Annotated[
    Path,
    typer.Option(
        help="Model set to write into; a new one begins as a copy of --models, or of Terrace's own.",
        file_okay=False,
        show_default=False,
    ),
]
Runs = Annotated[Path, typer.Option(help="Folder of the training runs, one folder each.", file_okay=False)]


Provider = Annotated[Processor, typer.Option(help="Execution provider.")]
Threads = Annotated[int, typer.Option(min=1, callback=within_cores, help="CPU threads per network.")]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the network.", show_default=False, callback=plain_name)
]

_RUNS = Path("runs") / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Options of `terrace models list`."""

    models: ModelSet = None
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Show the networks that this scheduler offers, instead of a folder's networks."
        ),
    ] = None
    wide: Annotated[
        bool, typer.Option("--wide", help="With multiply-adds, peak memory, accuracy per parameter and speed.")
    ] = False


@app.command("list")
@with_options
def list_models(context: typer.Context, listed: Listed, credentials: Credentials, json: Json = False) -> None:
    """The networks of the manifest."""
    models, scheduler, wide = listed.models, listed.scheduler, listed.wide
    in_force: str = ""
    ms_per_image: dict[str, float] = {}
    if scheduler is None:
        manifest = load_manifest(models)
        if wide:
            with suppress(MissingExtra):  # costs that the manifest lacks are shown as "-"
                manifest = with_costs(manifest, models or weights_folder())
    elif on_command_line(context, "models"):
        raise typer.BadParameter("name a folder (--models) or a scheduler, not both", param_hint="--scheduler")
    else:
        check_tls_ca(context, scheduler)
        with credentials.connect(scheduler) as client:
            manifest = parse_manifest(dumps(client.models()).encode(), f"of {client.url}")
            with suppress(NotFound):  # an older scheduler
                in_force = client.releases().in_force
            if wide:
                ms_per_image = _speeds(client.devices())
    if json:
        print_json(_with_figures(manifest, ms_per_image) if wide else manifest.content())
        return
    flat = manifest.hierarchy.is_flat
    table = Listing(
        Column(title="tier", rank=4),
        Column(title="network"),
        Column(title="answers", rank=3),
        Column(title="takes", rank=7),
        Column(title="form", rank=6),
        Column(title="M params", rank=5, right=True),
        Column(title="MB", rank=2, right=True),
        *(Column(title=title, rank=1, right=True) for title in (("accuracy",) if flat else ("coarse", "fine"))),
        *(Column(title=title, right=True) for title in (_WIDE if wide else ())),
    )
    for entry in manifest.models:
        accuracies = (entry.accuracy,) if flat else (entry.coarse_accuracy, entry.fine_accuracy)
        table.add_row(
            tier_text(entry.tier, entry.tier),
            entry.name,
            f"{entry.classes} {'classes' if flat else entry.target}",
            entry.input_text,
            entry.precision,
            f"{entry.parameters / 1e6:.2f}",
            f"{entry.size_bytes / 1e6:.1f}",
            *map(percent, accuracies),
            *(_wide_cells(entry, ms_per_image.get(entry.sha256)) if wide else ()),
        )
    if in_force:
        screen().print(f"release in force: {in_force}", soft_wrap=True, markup=False)
    screen().print(table, crop=False)
    if manifest.encoders:
        _print_encoders(manifest.encoders, flat=flat)
    if unknown := [entry.name for entry in manifest.models if entry.accuracy is None]:
        _print_note(
            f"not measured: {', '.join(unknown)}; 'terrace models import' with --validate FOLDER of labelled pictures "
            "does it, and fits the temperature"
        )
    for entry in manifest.models:
        if entry.gpu:
            _print_note(f"{entry.name} is the {entry.tier} tier's network on nodes with --provider cuda")


_WIDE = ("M MACs", "peak MB", "% per M params", "ms/image")


def _wide_cells(entry: ModelEntry, ms_per_image: float | None) -> tuple[str, ...]:
    costs, density = entry.costs, entry.accuracy_density
    return (
        "-" if costs is None or costs.macs is None else f"{costs.macs / 1e6:.1f}",
        "-" if costs is None else f"{costs.peak_bytes / 1e6:.1f}",
        "-" if density is None else f"{density:.1f}",
        "-" if ms_per_image is None else f"{ms_per_image:.3f}",
    )


def _speeds(devices: Iterable[Device]) -> dict[str, float]:
    """Median milliseconds per image on the nodes that have a network, by sha256."""
    found: dict[str, list[float]] = {}
    for device in devices:
        for offer in device.models:
            found.setdefault(offer["sha256"], []).append(offer["ms_per_image"])
    return {sha256: median(values) for sha256, values in found.items()}


def _with_figures(manifest: Manifest, ms_per_image: Mapping[str, float]) -> dict[str, Any]:
    content = manifest.content()
    for shown, entry in zip(content["models"], manifest.models, strict=True):
        shown["accuracy_density"] = entry.accuracy_density
        shown["ms_per_image"] = ms_per_image.get(entry.sha256)
    return content


@app.command()
def show(name: Name, models: ModelSet = None, json: Json = False) -> None:
    """Show the manifest's entry of one network."""
    manifest = load_manifest(models)
    entry = _entry(manifest, name)
    content = entry.model_dump(mode="json")
    if json:
        print_json(content)
        return
    if manifest.hierarchy.is_flat:
        # Coarse and fine answers name the same classes, so there is one accuracy.
        content = {key: value for key, value in content.items() if "accuracy" not in key and key != "target"}
        content["accuracy"] = entry.accuracy
    content |= content.pop("costs", None) or {}
    training = content.pop("training") or {"": "none: it was imported"}
    table = plain_table("fact", "value")
    for key, value in [*content.items(), *((f"training {key}".rstrip(), value) for key, value in training.items())]:
        table.add_row(escape(key.replace("_", " ")), escape(_plain(value)))
    screen().print(table)


@app.command()
@interruptible
def verify(models: ModelSet = None, provider: Provider = Processor.CPU, json: Json = False) -> None:
    """Check digest, loading, answers and the cut into head and tail of every network, and every encoder."""
    folder = models or weights_folder()
    manifest = load_manifest(folder)
    verdicts = [
        *(verify_entry(entry, manifest, folder, provider=provider) for entry in manifest.models),
        *(verify_encoder(encoder, manifest, folder, provider=provider) for encoder in manifest.encoders),
    ]
    if json:
        print_json([asdict(verdict) for verdict in verdicts])
    else:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column()
        table.add_column()
        # A path that is longer than the terminal is wide goes on in the next line: its end names the file.
        table.add_column(overflow="fold")
        for verdict in verdicts:
            table.add_row(
                "[green]ok[/green]" if verdict.ok else "[red]wrong[/red]", escape(verdict.name), escape(verdict.detail)
            )
        screen().print(table)
    if not all(verdict.ok for verdict in verdicts):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """Options for the processor and threads of a network."""

    provider: Provider = Processor.CPU
    threads: Threads = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Options of `terrace models eval` that choose the networks and the pictures."""

    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Networks to measure.")] = None
    all_: Annotated[bool, typer.Option("--all", help="Measure every network of the manifest.")] = False
    data: Data = None
    dataset: OtherDataset = None
    models: ModelSet = None
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Folder of training runs: the named runs are measured as trained, instead of a model set.",
            file_okay=False,
        ),
    ] = None


@app.command("eval")
@interruptible
@with_options
def evaluate_models(
    chosen: Measured,
    computing: Computing,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per run of an ONNX file.")] = 50,
    json: Json = False,
) -> None:
    """Accuracy, calibration and speed on the whole test set, or on your labelled pictures, measured now."""
    if chosen.runs is not None:
        if chosen.all_ or not chosen.names:
            raise typer.BadParameter("name the runs to measure.")
        found, flat = _evaluate_runs(chosen, [chosen.runs / plain_name(name) for name in chosen.names], computing)
        _print_evaluations(found, json=json, flat=flat)
        return
    import_runtime()
    folder = chosen.models or weights_folder()
    manifest = load_manifest(folder)
    entries = _chosen(manifest, chosen.names or [], chosen.all_)
    source = Dataset.open(chosen.dataset or CIFAR100, chosen.data, hierarchy=manifest.hierarchy)
    manifest.check_hierarchy(source.hierarchy)
    found = []
    with progress_bars("image") as progress:
        for entry in entries:
            model = load_model(
                entry,
                folder,
                provider=computing.provider,
                threads=computing.threads,
                labels=manifest.labels(entry),
            )
            test = source.read_for(entry, "test")
            bar = progress.add_task(entry.name, total=len(test))
            result = evaluate(
                model,
                test,
                manifest.hierarchy,
                target=entry.target,
                temperature=entry.temperature,
                batch_size=batch_size,
                report=lambda images, bar=bar: progress.advance(bar, images),  # type: ignore[misc]
            )
            facts = entry.model_dump(include={"name", "tier", "precision", "parameters", "temperature"})
            found.append({**facts, **asdict(result)})
    _print_evaluations(found, json=json, flat=manifest.hierarchy.is_flat)


def _evaluate_runs(chosen: Measured, folders: list[Path], computing: Computing) -> tuple[list[dict[str, Any]], bool]:
    """Return a row for each run, and true if their hierarchies have no superclasses."""
    with training_extra("measuring a training run"):
        from models.training.record import TrainingRecord, read_record
        from models.training.run import RunOptions, measure_run
    found, flat = [], True
    for folder in folders:
        config = read_record(TrainingRecord, folder).config
        source = Dataset.open(chosen.dataset or config.dataset, chosen.data)
        options = RunOptions(device=computing.provider, threads=computing.threads)
        parameters, result = measure_run(folder, source, options)
        facts = {"name": folder.name, "tier": config.tier, "precision": config.precision, "parameters": parameters}
        found.append({**facts, "temperature": 1.0, **asdict(result)})
        flat = flat and source.hierarchy.is_flat
    return found, flat


def _print_evaluations(found: list[dict[str, Any]], *, json: bool, flat: bool) -> None:
    if json:
        print_json(found)
        return
    numbers = ("images", *(("accuracy",) if flat else ("coarse", "fine")), "temperature", "ECE", "ms/image")
    table = plain_table("tier", "network", "precision", *numbers, right=numbers)
    for row in found:
        coarse, fine = row["coarse_accuracy"], row["fine_accuracy"]
        table.add_row(
            tier_text(row["tier"], row["tier"]),
            row["name"],
            row["precision"],
            f"{row['images']:,}",
            *map(percent, (coarse if fine is None else fine,) if flat else (coarse, fine)),
            f"{row['temperature']:.2f}",
            f"{row['ece']:.3f}",
            f"{row['ms_per_image']:.3f}",
        )
    screen().print(table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Options of `terrace models speed` that choose the networks and the batches."""

    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Networks. Default: all.")] = None
    batches: Annotated[
        list[int] | None, typer.Option("--batch", min=1, max=10_000, help="Batch size; may be repeated.")
    ] = None
    models: ModelSet = None
    runs: Annotated[
        Path | None, typer.Option(help="Folder of training runs: their FP32 files are measured with the INT8 ones.")
    ] = None
    fp32: Annotated[
        bool,
        typer.Option(
            "--fp32", help="Also measure each INT8 network in FP32, with its weights converted back from INT8."
        ),
    ] = False


@app.command()
@interruptible
@with_options
def speed(
    chosen: Timed,
    computing: Computing,
    json: Json = False,
) -> None:
    """Milliseconds per image by batch size."""
    runs = chosen.runs
    if chosen.fp32:
        with training_extra("the FP32 form of a network"):
            from models.export import dequantize  # noqa: F401  # told before anything is measured
    folder = chosen.models or weights_folder()
    manifest = load_manifest(folder)
    sizes = chosen.batches or [1, 50, 256]
    entries = _chosen(manifest, chosen.names or [], not chosen.names)
    for entry in entries:
        if runs is not None and not (runs / entry.name / FP32_NAME).is_file():
            raise WeightsError(
                f"{runs / entry.name} has no {FP32_NAME}: 'terrace models export {entry.name} --runs {runs}' writes it"
            )
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for entry in entries:
            for file, place in _precisions(entry, folder, runs, Path(scratch) if chosen.fp32 else None):
                say(f"measuring {file.name} ({file.precision}) in batches of {', '.join(map(str, sizes))}")
                model = load_model(
                    file,
                    place,
                    provider=computing.provider,
                    threads=computing.threads,
                    labels=manifest.labels(entry),
                )
                pace = measure_ms_per_image(model, probe_images(entry.input_shape), sizes)
                facts = {"name": entry.name, "precision": file.precision, "size_bytes": file.size_bytes}
                found.append({**facts, "ms_per_image": pace})
    if json:
        print_json(found)
        return
    columns = [f"batch {size}" for size in sizes]
    table = plain_table("network", "precision", "MB", *columns, right=("MB", *columns))
    for row in found:
        cells = [f"{row['ms_per_image'][size]:.3f}" for size in sizes]
        table.add_row(row["name"], row["precision"], f"{row['size_bytes'] / 1e6:.1f}", *cells)
    screen().print(table)
    screen().print("[dim]milliseconds per image[/dim]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """Options of a command that measures a model set and writes into it."""

    out: Out
    data: Data = None
    dataset: DatasetName = CIFAR100
    models: ModelSet = None
    records: Records = None

    @contextmanager
    def open(self) -> Iterator[tuple[Manifest, Dataset]]:
        """Give the manifest of the folder and the pictures; remove a new folder if the command fails."""
        new = not (self.out / MANIFEST_NAME).is_file()
        manifest = begin_weights(self.out, self.models or weights_folder())
        with ExitStack() as undo:
            if new:
                undo.callback(shutil.rmtree, self.out, ignore_errors=True)
            yield manifest, Dataset.open(self.dataset, self.data, hierarchy=manifest.hierarchy)
            undo.pop_all()


app.command("import")(import_network)
app.command("fit")(fit_networks)
app.command("place")(place_layers)
app.command("answers")(answers)


@app.command("cut-encoder")
@interruptible
@with_options
def cut_encoder(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Networks. Default: all with fine answers.")
    ] = None,
    *,
    rewritten: Rewritten,
    threads: Threads = 1,
    json: Json = False,
) -> None:
    """Cut the first convolution off networks, measure its features and enter it into the manifest as an encoder."""
    import_runtime()
    out = rewritten.out
    with rewritten.open() as (manifest, source), progress_bars("image") as progress:
        made = add_conv1(
            names or [entry.name for entry in manifest.models if entry.target == "fine"],
            out,
            source,
            rewritten.records or records_folder(out),
            threads=threads,
            report=_Bars(progress),
        )
    if json:
        print_json([encoder.model_dump(mode="json") for encoder in made])
        return
    _print_encoders(made, flat=manifest.hierarchy.is_flat)
    _print_paths(out / name for name in (*(encoder.head.file for encoder in made), MANIFEST_NAME))


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Options of `terrace models tune-escalation` for the accuracy and the budget of the thresholds."""

    relative_accuracy: Annotated[
        float | None,
        typer.Option(min=0.01, help="Accuracy to aim at, as a share of the upper network's own. Default: 0.99."),
    ] = None
    target_accuracy: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Fine accuracy to aim at, instead of a share.")
    ] = None
    budget: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the images that may go up.")] = 0.5

    def target(self) -> TuningTarget:
        """Return the accuracy and the budget to aim at."""
        if self.relative_accuracy is not None and self.target_accuracy is not None:
            raise typer.BadParameter(
                "--relative-accuracy and --target-accuracy say one thing in two ways: give one of them."
            )
        return TuningTarget(
            accuracy=self.target_accuracy or self.relative_accuracy or 0.99,
            relative=self.target_accuracy is None,
            budget=self.budget,
        )


@app.command("tune-escalation")
@interruptible
@with_options
def tune_escalation(
    *,
    rewritten: Rewritten,
    aim: Aim,
    test: Annotated[bool, typer.Option(help="Measure the chosen thresholds on the test set.")] = True,
    computing: Computing,
    json: Json = False,
) -> None:
    """Choose escalation thresholds on images that the networks have not seen, and store the thresholds with the
    networks."""
    target = aim.target()
    import_runtime()
    with rewritten.open() as (manifest, source), progress_bars("image") as progress:
        report = tune_weights(
            rewritten.out,
            source,
            rewritten.records or records_folder(rewritten.out),
            target,
            test=test,
            provider=computing.provider,
            threads=computing.threads,
            report=_Bars(progress),
        )
    if warning := caution(report.tuning):
        say(f"warning: {warning}")
    if json:
        print_json(
            {
                "data": report.tuning.data,
                "thresholds": _operating_points(report.tuning),
                "test": [asdict(outcome) for outcome in report.test],
                "files": [str(path) for path in report.files],
            }
        )
        return
    _print_tuning(report, flat=manifest.hierarchy.is_flat)


@app.command()
@training_command
def train(name: Name, runs: Runs = _RUNS, *, training: TrainingOptions) -> None:
    """Train a network, or continue a run that was interrupted."""
    with training_extra("training a network"):
        from models.training.config import find_config
        from models.training.run import train_run

    training.run(runs / name, find_config, lambda config, data, options: train_run(config, data, runs, options))


@app.command()
@interruptible
def export(
    name: Name, data: Data = None, dataset: DatasetName = CIFAR100, runs: Runs = _RUNS, json: Json = False
) -> None:
    """Write a trained network as FP32 ONNX, normalisation inside, into its run folder."""
    with training_extra("exporting a network"):
        from models.export.pipeline import export_run
    source = Dataset.open(dataset, data)
    path = export_run(runs / name, source, say)
    if json:
        print_json({"name": name, "file": str(path), "size_bytes": path.stat().st_size})
        return
    screen().print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True, markup=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """Options of `terrace models quantize`."""

    out: Annotated[
        Path,
        typer.Option(
            help="Model set to write into; a new one begins as a copy of Terrace's own.",
            file_okay=False,
            show_default=False,
        ),
    ]
    data: Data = None
    dataset: DatasetName = CIFAR100
    runs: Runs = _RUNS
    records: Records = None
    gpu: Annotated[bool, typer.Option("--gpu", help="Only nodes with a GPU serve it by default.")] = False


@app.command()
@interruptible
@with_options
def quantize(name: Name, *, options: Quantised, json: Json = False) -> None:
    """Export a trained network, quantise it to INT8, calibrate it, measure it and enter it into a manifest."""
    with training_extra("quantising a network"):
        from models.export.pipeline import quantize_run
    out, place = options.out, options.records or records_folder(options.out)
    source = Dataset.open(options.dataset, options.data)
    entry = quantize_run(options.runs / name, source, out, records=place, gpu=options.gpu, say=say)
    if entry.target == "fine":
        say("cutting its encoder off")
        add_conv1([name], out, source, place)
    if json:
        print_json(entry.model_dump(mode="json"))
        return
    screen().print(
        f"{entry.file}: coarse {percent(entry.coarse_accuracy)} (FP32 {percent(entry.fp32_coarse_accuracy)}), "
        f"fine {percent(entry.fine_accuracy)} (FP32 {percent(entry.fp32_fine_accuracy)}), "
        f"ECE {entry.ece_before:.3f} before and {entry.ece_after:.3f} after temperature {entry.temperature:.2f}",
        soft_wrap=True,
        markup=False,
    )
    _print_paths((out / entry.file, out / MANIFEST_NAME, place / entry.trained.record))


def _operating_points(tuning: Tuning) -> list[dict[str, Any]]:
    return [
        {
            "gate": f"{gate.lower.tier}-{gate.upper.tier}",
            "answers": gate.answers,
            "escalate": escalate,
            "aim": aim,
            **point.model_dump(mode="json"),
            "upper_accuracy": gate.upper_accuracy,
        }
        for gate in tuning.gates
        for escalate, aim, point in (
            ("threshold", tuning.relative_accuracy, gate.for_accuracy(tuning.relative_accuracy)),
            ("budget", tuning.budget, gate.for_budget(tuning.budget)),
        )
    ]


def _print_tuning(report: TuningReport, *, flat: bool) -> None:
    out = screen()
    numbers = ("aim", "margin below", "goes up", "accuracy", "relative")
    table = plain_table("gate", "escalate", "answers", *numbers, right=numbers)
    for row in _operating_points(report.tuning):
        table.add_row(
            row["gate"],
            row["escalate"],
            "classes" if flat else row["answers"],
            f"{row['aim']:g}",
            f"{row['below']:.4f}",
            percent(row["share"]),
            percent(row["accuracy"]),
            f"{row['accuracy'] / row['upper_accuracy']:.4f}",
        )
    out.print(f"[bold]Chosen on[/bold] {escape(report.tuning.data)}")
    out.print(table)
    if report.test:
        tiers = ("end", "edge", "cloud")
        # Without superclasses both levels are the same, and every image has the coarse one.
        levels = ("accuracy",) if flat else ("fine", "coarse")
        figures = ("to cloud", *(f"stays: {tier}" for tier in tiers), *levels, "relative")
        table = plain_table("escalate", "from", *figures, right=figures)
        for outcome in report.test:
            table.add_row(
                outcome.escalate,
                outcome.escalate_from,
                percent(outcome.went_to.get("cloud")),
                *(percent(outcome.stayed_at.get(tier)) for tier in tiers),
                *(percent(each) for each in (outcome.fine_accuracy, outcome.coarse_accuracy)[-len(levels) :]),
                f"{outcome.relative_accuracy:.4f}",
            )
        out.print(f"\n[bold]Measured on[/bold] {report.test[0].images:,} test images, which had no part in the choice")
        out.print(table)
    _print_paths(report.files)
    if not report.plot:
        _print_note(f"no plot: that needs the extra 'plots' ({install_command('plots')})")


def _print_note(text: str) -> None:
    screen().print(text, style="dim", markup=False)


def _print_encoders(encoders: Sequence[EncoderEntry], *, flat: bool) -> None:
    levels = () if flat else ("coarse",)
    own = "accuracy" if flat else "fine"
    table = Listing(
        Column(title="encoder"),
        Column(title="features", rank=2, right=True),
        Column(title="scale", rank=5, right=True),
        Column(title="zero", rank=6, right=True),
        *(Column(title=level, rank=1, right=True) for level in levels),
        Column(title=own, rank=1, right=True),
        Column(title=f"{own} FP32", rank=4, right=True),
        Column(title="head kB", rank=3, right=True),
    )
    for encoder in encoders:
        table.add_row(
            encoder.name,
            "x".join(map(str, encoder.feature_shape)),
            f"{encoder.scale:.5f}",
            str(encoder.zero_point),
            *(percent(encoder.coarse_accuracy) for _ in levels),
            percent(encoder.fine_accuracy),
            percent(encoder.fp32_fine_accuracy),
            f"{encoder.head.size_bytes / 1e3:.1f}",
        )
    screen().print(table, crop=False)


def _print_paths(paths: Iterable[Path]) -> None:
    for path in paths:
        screen().print(str(path), style="dim", markup=False, soft_wrap=True)


class _Bars:
    """Progress bars, one for each step of a command; called with the number of images done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def __call__(self, what: str, images: int, of: int) -> None:
        if what not in self._bars:
            self._bars[what] = self._progress.add_task(what, total=of)
        self._progress.advance(self._bars[what], images)


def _chosen(manifest: Manifest, names: list[str], everything: bool) -> list[ModelEntry]:
    if everything and names:
        raise typer.BadParameter("name the networks to measure or say --all, not both.")
    if not everything and not names:
        raise typer.BadParameter("name the networks to measure, or say --all.")
    return list(manifest.models) if everything else [_entry(manifest, name) for name in names]


def _entry(manifest: Manifest, name: str) -> ModelEntry:
    try:
        return manifest.entry(name)
    except NotFound as exc:
        raise typer.BadParameter(f"{exc}.") from exc


def _precisions(
    entry: ModelEntry, folder: Path, runs: Path | None, scratch: Path | None
) -> Iterator[tuple[ModelEntry, Path]]:
    yield entry, folder
    if scratch is not None and entry.precision == "int8":
        from models.export.dequantize import dequantize_onnx

        path = scratch / f"{entry.name}.fp32.onnx"
        path.write_bytes(dequantize_onnx(verify_file(entry, folder).read_bytes()))
        yield entry.with_file(path, precision="fp32"), scratch
    if runs is not None:
        path = runs / entry.name / FP32_NAME
        yield entry.with_file(path, precision="fp32"), path.parent


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)
