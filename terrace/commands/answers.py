"""`terrace models answers`: teachers' answers to the training images in one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from models.dataset import CIFAR100, Dataset
from terrace.commands.training import TorchThreads, say
from terrace.console import print_json, screen
from terrace.options import Data, DatasetName, Json, ModelSet, with_options
from terrace.stoppable import interruptible
from tierkit.extras import training_extra
from tierkit.plaintext import one_line

__all__ = ["answers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options of `terrace models answers`."""

    out: Annotated[
        Path,
        typer.Option(help="File to write, such as answers.safetensors.", show_default=False, dir_okay=False),
    ]
    runs: Annotated[
        Path | None,
        typer.Option(help="Folder of training runs that has the teachers. Default: the model set.", file_okay=False),
    ] = None
    models: ModelSet = None
    top: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Keep the K likeliest classes only. Default: all.")
    ] = None
    data: Data = None
    dataset: DatasetName = CIFAR100
    threads: TorchThreads = None


@interruptible
@with_options
def answers(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="The teachers, in the order of the configuration.", show_default=False),
    ],
    options: Asked,
    json: Json = False,
) -> None:
    """Write the answers of teachers to all training images and their mirror images into one file."""
    with training_extra("asking teachers"):
        from encryption.training.upper import answers_of_networks
        from models.training.run import RunOptions
        from models.training.teacher import answers_of_runs, kept_answers, save_again
    RunOptions(threads=options.threads).prepare()
    source = Dataset.open(options.dataset, options.data)
    images = source.read("train")
    if options.runs is not None:
        asked = answers_of_runs([options.runs / name for name in names], images, source.hierarchy)
    else:
        asked = answers_of_networks(tuple(names), images, options.models)
    facts, teachers = asked
    say(f"asking {', '.join(names)} about {len(images):,} images and their mirror images")
    found = kept_answers(teachers, images, source.hierarchy, facts, options.out)
    if options.top is not None:
        found = save_again(options.out, found, source.hierarchy, options.top)
    size = options.out.stat().st_size
    if json:
        facts_shown = found.facts.model_dump(mode="json")
        print_json({"file": str(options.out), "size_bytes": size, "sha256": found.digest, **facts_shown})
        return
    screen().print(one_line(f"{options.out}: {size / 1e6:.1f} MB"), soft_wrap=True, markup=False, highlight=False)
