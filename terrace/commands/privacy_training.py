"""`terrace privacy train`, `export` and `front`: how learned encoders are made and compared. Needs `train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from experiments.record import RunRecord
from models.dataset import CIFAR100, Dataset
from models.manifest import MANIFEST_NAME
from terrace.commands.training import TorchThreads, TrainingOptions, say, training_command
from terrace.console import Column, Listing, percent, print_json, screen
from terrace.options import Data, DatasetName, Json, ModelSet, with_options
from terrace.stoppable import interruptible
from tierkit.atomic import made_folder
from tierkit.extras import training_extra

__all__ = ["export", "front", "train"]

_RUNS = Path("runs") / "encoders"
_UPPER_RUNS = Path("runs") / "models"

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the configuration.", show_default=False)]
Runs = Annotated[Path, typer.Option(help="Folder of the encoders' training runs, one folder each.", file_okay=False)]


@training_command
def train(
    name: Name,
    models: ModelSet = None,
    runs: Runs = _RUNS,
    upper_runs: Annotated[
        Path, typer.Option(help="Folder of the runs of 'terrace models train', if a configuration starts from one.")
    ] = _UPPER_RUNS,
    *,
    training: TrainingOptions,
) -> None:
    """Train an encoder and the network behind it against an adversary, or continue an interrupted run."""
    with training_extra("training an encoder"):
        from encryption.training.config import find_encoder_config
        from encryption.training.run import train_encoder

    training.run(
        runs / name,
        find_encoder_config,
        lambda config, data, options: train_encoder(config, data, runs, options, upper_runs=upper_runs, weights=models),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Options of `terrace privacy export`."""

    data: Data = None
    dataset: DatasetName = CIFAR100
    runs: Runs = _RUNS
    out: Annotated[
        Path | None,
        typer.Option(
            help="Model set to write into; a new one begins as a copy of Terrace's own. Default: one in the "
            "run folder.",
            file_okay=False,
        ),
    ] = None
    noise: Annotated[
        float | None,
        typer.Option(min=0, help="Noise that the device adds, instead of the configuration's. More noise hides more."),
    ] = None


@interruptible
@with_options
def export(name: Name, options: Exported, json: Json = False) -> None:
    """Write a trained encoder as INT8 head and tail, measure it and enter it into a manifest."""
    with training_extra("exporting an encoder"):
        from encryption.training.export import export_encoder
    place = options.out or options.runs / name / "weights"
    source = Dataset.open(options.dataset, options.data)
    entry = export_encoder(options.runs / name, source, place, noise=options.noise, say=say)
    if json:
        print_json(entry.model_dump(mode="json"))
        return
    screen().print(
        f"{entry.name} from {name}: fine {percent(entry.fine_accuracy)} as sent, "
        f"{percent(entry.fp32_fine_accuracy)} without noise and rounding",
        soft_wrap=True,
        markup=False,
    )
    for file in (entry.head.file, entry.tail.file, MANIFEST_NAME):
        screen().print(str(place / file), style="dim", markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """Options of `terrace privacy front`."""

    out: Annotated[Path, typer.Option(help="Folder for record, CSV and plot.", file_okay=False, show_default=False)]
    network: Annotated[str, typer.Option(metavar="NAME", help="Network whose encoders are compared.")] = "resnet-34"
    images: Annotated[int, typer.Option(min=8, max=10_000, help="Held-out images to attack.")] = 200
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0
    queries: Annotated[int, typer.Option(min=1000, help="Pictures that each attacker may send through the head.")] = (
        160_000
    )
    threads: TorchThreads = None
    data: Data = None
    dataset: DatasetName = CIFAR100


@interruptible
@with_options
def front(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Weights folders, of 'terrace privacy export'.", show_default=False),
    ],
    *,
    options: FrontOptions,
    json: Json = False,
) -> None:
    """Attack several learned encoders of one network, and plot how much each gives away against its accuracy."""
    with training_extra("attacking an encoder"):
        import torch

        from encryption.front import save_front, undominated
        from encryption.training.compare import compare_encoders
    made_folder(options.out)  # first, so that no hour of attacks is lost
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = compare_encoders(
        places,
        options.network,
        Dataset.open(options.dataset, options.data),
        images=options.images,
        queries=options.queries,
        seed=options.seed,
        say=say,
    )
    record = RunRecord(
        experiment="privacy-front",
        config={"queries": options.queries, "data": options.dataset, "threads": torch.get_num_threads()},
        samples={},
        results=found.model_dump(mode="json"),
        seed=options.seed,
    )
    written = [record.write(options.out), *save_front(found, options.out)]
    if json:
        print_json(found.model_dump(mode="json"))
        return
    best = {setting.name for setting in undominated(found.settings)}
    table = Listing(
        *(
            Column(title=title, right=title not in ("setting", "attack", "front"))
            for title in ("setting", "SSIM", "attack", "fine", "bytes", "ms", "front")
        )
    )
    for setting in sorted(found.settings, key=lambda each: each.ssim):
        table.add_row(
            setting.name,
            f"{setting.ssim:.3f}",
            setting.attack,
            percent(setting.fine_accuracy),
            f"{setting.payload_bytes:.0f}",
            f"{setting.device_ms_per_image:.3f}",
            "yes" if setting.name in best else "no",
        )
    screen().print(table)
    screen().print(
        f"{options.network} on pixels: fine {percent(found.plain_accuracy)}; {found.end_network} takes "
        f"{found.end_ms_per_image:.3f} ms per image here",
        soft_wrap=True,
        markup=False,
    )
    for path in written:
        screen().print(str(path), style="dim", markup=False, soft_wrap=True)
