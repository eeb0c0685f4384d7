"""What the commands that train have in common: their options, and what they show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel
from rich.progress import Progress

from terrace.commands.processors import Processor, within_cores
from terrace.console import percent, print_json, screen
from tierkit.errors import InvalidInput, SetupError

__all__ = [
    "BatchSize",
    "ConfigFile",
    "Device",
    "Display",
    "Minutes",
    "Steps",
    "TorchThreads",
    "chosen_config",
    "say",
    "tell_end",
]

ConfigFile = Annotated[
    Path | None, typer.Option(help="Configuration; the bundled one of this name unless given.", dir_okay=False)
]
Device = Annotated[Processor, typer.Option(help="What to train on.")]
TorchThreads = Annotated[
    int | None, typer.Option(min=1, callback=within_cores, help="CPU threads; torch's own choice unless given.")
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0, help="Stop after so long, at the end of a step; the same command goes on from there."),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Stop when the run has done so many steps in all.")]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Images per step in place of the configuration's; small to try it out.")
]

Config = TypeVar("Config", bound=BaseModel)


def chosen_config(
    find: Callable[[str, Path | None], Config], name: str, path: Path | None, batch_size: int | None
) -> Config:
    """The configuration that the options name."""
    try:
        config = find(name, path)
    except (InvalidInput, SetupError) as error:
        raise typer.BadParameter(str(error)) from error
    return config if batch_size is None else config.model_copy(update={"batch_size": batch_size})


def say(text: str) -> None:
    """Tell what is going on."""
    screen(stderr=True).print(text, style="dim", markup=False)


class Display:
    """A bar of steps, and a plain line for each finished epoch.

    Args:
        measured: what the line says of an epoch's row beside loss, fine accuracy and times.
    """

    def __init__(self, progress: Progress, name: str, measured: Callable[[Any], str]) -> None:
        self._progress = progress
        self._measured = measured
        self._bar = progress.add_task(name, total=None)

    def __call__(self, step: Any) -> None:
        self._progress.update(self._bar, completed=step.step, total=step.steps)
        if (row := step.row) is not None:
            screen(stderr=True).print(
                f"epoch {row.epoch}: loss {row.loss:.3f}, {self._measured(row)}, fine {percent(row.held_out_fine)}, "
                f"{row.seconds:.0f} s, {step.seconds_left / 60:.0f} min left",
                soft_wrap=True,
                markup=False,
            )


def tell_end(record: Any, folder: Path, *, json: bool) -> None:
    """Show what has come of a run in `folder`, or print its record."""
    if json:
        print_json(record.model_dump(mode="json"))
        return
    done = "finished" if record.steps == record.planned_steps else "stopped; the same command goes on"
    screen().print(
        f"{folder.name}: {done} after {record.steps:,} of {record.planned_steps:,} steps, {record.minutes:.1f} min; "
        f"see {folder}",
        soft_wrap=True,
        markup=False,
    )
