"""`terrace privacy train`, `export` and `front`: how learned encoders are made and compared. Needs `train`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from encryption.front import save_front, undominated
from models.dataset import CIFAR100, Dataset
from models.manifest import MANIFEST_NAME, records_folder, weights_folder
from terrace.commands.models import Processor
from terrace.console import Column, Listing, percent, print_json, progress_bars, screen
from terrace.options import Data, DatasetName, Json, Weights, training_extra
from tierkit.errors import InvalidInput, SetupError

__all__ = ["export", "front", "train"]

_RUNS = Path("runs") / "encoders"
_UPPER_RUNS = Path("runs") / "models"

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the configuration.", show_default=False)]
Runs = Annotated[Path, typer.Option(help="Folder of the encoders' training runs, one folder each.", file_okay=False)]


def train(
    name: Name,
    config: Annotated[
        Path | None, typer.Option(help="Configuration; the bundled one of this name unless given.", dir_okay=False)
    ] = None,
    data: Data = None,
    dataset: DatasetName = CIFAR100,
    weights: Weights = None,
    runs: Runs = _RUNS,
    upper_runs: Annotated[
        Path, typer.Option(help="Runs of 'terrace models train', where a configuration starts from one.")
    ] = _UPPER_RUNS,
    device: Annotated[Processor, typer.Option(help="What to train on.")] = Processor.CPU,
    threads: Annotated[
        int | None, typer.Option(min=1, max=os.cpu_count() or 1, help="CPU threads; torch's own choice unless given.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after so long, at the end of a step; the same command goes on from there."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop when the run has done so many steps in all.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images per step in place of the configuration's; small to try it out.")
    ] = None,
    json: Json = False,
) -> None:
    """Train an encoder and the network behind it against an adversary, or go on with an interrupted run."""
    with training_extra("training an encoder"):
        from encryption.training.config import find_config
        from encryption.training.run import train_encoder

    try:
        chosen = find_config(name, config)
    except (InvalidInput, SetupError) as error:
        raise typer.BadParameter(str(error)) from error
    if batch_size is not None:
        chosen = chosen.model_copy(update={"batch_size": batch_size})
    err = screen(stderr=True)
    with progress_bars("step") as progress:
        bar = progress.add_task(name, total=None)

        def show(step: Any) -> None:
            progress.update(bar, completed=step.step, total=step.steps)
            if (row := step.row) is not None:
                err.print(
                    f"epoch {row.epoch}: loss {row.loss:.3f}, adversary's SSIM {row.adversary_ssim:.3f}, held-out fine "
                    f"{percent(row.held_out_fine)}, {row.seconds:.0f} s, {step.seconds_left / 60:.0f} min left",
                    soft_wrap=True,
                )

        record = train_encoder(
            chosen,
            Dataset.open(dataset, data),
            runs,
            upper_runs=upper_runs,
            weights=weights,
            device=device,
            threads=threads,
            minutes=minutes,
            steps=steps,
            progress=show,
            say=lambda text: err.print(text, style="dim", markup=False),
        )
    if json:
        print_json(record.model_dump(mode="json"))
        return
    done = "finished" if record.steps == record.planned_steps else "stopped; the same command goes on"
    screen().print(
        f"{name}: {done} after {record.steps:,} of {record.planned_steps:,} steps, {record.minutes:.1f} min; "
        f"see {runs / name}",
        soft_wrap=True,
    )


def export(
    name: Name,
    data: Data = None,
    dataset: DatasetName = CIFAR100,
    runs: Runs = _RUNS,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Weights folder to enter it into, begun as a copy of the bundled one. Default: one in the run folder.",
            file_okay=False,
        ),
    ] = None,
    noise: Annotated[
        float | None, typer.Option(min=0, help="Noise on the device in place of the configuration's; hides more.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a trained encoder as INT8 head and tail, measure it and enter it into a manifest."""
    with training_extra("exporting an encoder"):
        from encryption.training.export import export_encoder
    err = screen(stderr=True)
    place = out or runs / name / "weights"
    entry = export_encoder(
        runs / name,
        Dataset.open(dataset, data),
        place,
        noise=noise,
        say=lambda text: err.print(text, style="dim", markup=False),
    )
    if json:
        print_json(entry.model_dump(mode="json"))
        return
    screen().print(
        f"{entry.name} from {name}: fine {percent(entry.fine_accuracy)} as sent, "
        f"{percent(entry.fp32_fine_accuracy)} without noise and rounding",
        soft_wrap=True,
    )
    for file in (entry.head.file, entry.tail.file, MANIFEST_NAME):
        screen().print(str(place / file), style="dim", markup=False, soft_wrap=True)


def front(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Weights folders, of 'terrace privacy export'.", show_default=False),
    ],
    network: Annotated[str, typer.Option(metavar="NAME", help="Whose encoders are compared.")] = "resnet-34",
    images: Annotated[int, typer.Option(min=8, max=10_000, help="Test images to attack.")] = 200,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON, CSV and plot. Default: the bundled records.", file_okay=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn by chance.")] = 0,
    queries: Annotated[
        int, typer.Option(min=1000, help="Pictures that each attacker may send through the head.")
    ] = 160_000,
    threads: Annotated[
        int | None, typer.Option(min=1, max=os.cpu_count() or 1, help="CPU threads; torch's own choice unless given.")
    ] = None,
    data: Data = None,
    dataset: DatasetName = CIFAR100,
    json: Json = False,
) -> None:
    """Attack several learned encoders of one network, and draw what each gives away against how well it answers."""
    with training_extra("attacking an encoder"):
        import torch

        from encryption.training.compare import compare_encoders
    if threads is not None:
        torch.set_num_threads(threads)
    err = screen(stderr=True)
    found = compare_encoders(
        places,
        network,
        Dataset.open(dataset, data),
        images=images,
        queries=queries,
        seed=seed,
        say=lambda text: err.print(text, style="dim", markup=False),
    )
    written = save_front(found, out or records_folder(weights_folder()))
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
        f"{network} on pixels: fine {percent(found.plain_accuracy)}; {found.end_network} takes "
        f"{found.end_ms_per_image:.3f} ms per image here",
        soft_wrap=True,
    )
    for path in written:
        screen().print(str(path), style="dim", markup=False, soft_wrap=True)
