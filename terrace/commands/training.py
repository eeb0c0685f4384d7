"""Options and output that the commands for training share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from models.dataset import Dataset
from terrace.commands.processors import Processor, within_cores
from terrace.console import print_json, progress_bars, screen
from terrace.options import Data, Json, OtherDataset, with_options
from terrace.stoppable import interruptible
from tierkit.errors import InvalidInput, SetupError

if TYPE_CHECKING:
    from models.training.config import TrainConfig
    from models.training.record import TrainingRecord
    from models.training.run import RunOptions

__all__ = ["TeacherFile", "TorchThreads", "TrainingOptions", "say", "training_command"]

TeacherFile = Annotated[
    Path | None,
    typer.Option(
        "--answers",
        metavar="FILE",
        help="Answers of the network's teacher, made by 'terrace models answers'.",
        dir_okay=False,
    ),
]
TorchThreads = Annotated[
    int | None, typer.Option(min=1, callback=within_cores, help="CPU threads. Default: torch's own choice.")
]
Config = TypeVar("Config", bound="TrainConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The options of a command that trains."""

    config: Annotated[
        Path | None, typer.Option(help="Configuration. Default: the bundled one of this name.", dir_okay=False)
    ] = None
    data: Data = None
    dataset: OtherDataset = None
    device: Annotated[Processor, typer.Option(help="Processor to train on.")] = Processor.CPU
    threads: TorchThreads = None
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0, help="Stop after this many minutes, at the end of a step; the same command continues from there."
        ),
    ] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Stop when the run has done this many steps in all.")] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images per step. Default: the configuration's. Use few for a try.")
    ] = None
    json: Json = False

    def run(
        self,
        folder: Path,
        find_config: Callable[[str, Path | None], Config],
        train: Callable[[Config, Dataset, RunOptions], TrainingRecord],
    ) -> None:
        """Train the configuration that the run folder is named after, and print the result."""
        from models.training.run import RunOptions

        try:
            config = find_config(folder.name, self.config)
        except (InvalidInput, SetupError) as error:
            raise typer.BadParameter(str(error)) from error
        if self.batch_size is not None:
            config = config.model_copy(update={"batch_size": self.batch_size})
        with progress_bars("step") as progress:
            bar = progress.add_task(folder.name, total=None)
            options = RunOptions(
                device=self.device,
                threads=self.threads,
                minutes=self.minutes,
                steps=self.steps,
                report=lambda step: progress.update(bar, completed=step.step, total=step.steps),
                say=say,
            )
            record = train(config, Dataset.open(self.dataset or config.dataset, self.data), options)
        if self.json:
            print_json(record.model_dump(mode="json"))
            return
        more = "the same command" if self.steps is None else "the command without --steps"
        done = "finished" if record.steps == record.planned_steps else f"stopped; {more} goes on"
        screen().print(
            f"{folder.name}: {done} after {record.steps:,} of {record.planned_steps:,} steps, "
            f"{record.minutes:.1f} min; see {folder}",
            soft_wrap=True,
            markup=False,
        )


def training_command(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command that Ctrl-C stops cleanly, with the fields of its `TrainingOptions` as options."""
    return _told(interruptible(with_options(command)))


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command report what Ctrl-C costs."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        try:
            command(**given)
        except KeyboardInterrupt:
            say("stopped; a checkpoint is written every two minutes, and the same command goes on from the last one")
            raise

    return run


def say(text: str) -> None:
    """Print a note on standard error."""
    screen(stderr=True).print(text, style="dim", markup=False, soft_wrap=True)
