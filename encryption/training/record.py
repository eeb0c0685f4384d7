"""The record of an encoder's training run, as it is kept beside the weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from encryption.training.config import BottleneckConfig
from encryption.training.loop import EncoderTrainer
from models.atomic import write_atomically
from models.manifest import TrainingFacts
from models.training.record import environment, hardware, source_commit
from tierkit.errors import WeightsError

__all__ = ["EncoderRecord", "load_record", "make_record", "save_record"]

_FILE = "record.json"


class EncoderRecord(BaseModel):
    """One run: what was trained, on what, and how it went."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: BottleneckConfig
    data: str
    """Name of the data set."""
    train_images: int
    held_out_images: int
    steps: int
    """Steps done; fewer than the configuration asks for where the run was cut short."""
    planned_steps: int
    minutes: float
    """Wall time of the training steps; pauses of the process and other work on the machine are part of it."""
    hardware: str
    environment: dict[str, str]
    commit: str | None
    """Commit of the working tree, with `+changes` after it where the tree had some; None outside a repository."""
    epochs: tuple[dict[str, Any], ...]
    """One row per finished epoch, as in `EncoderRow`."""

    def facts(self, file_name: str, before: Sequence[EncoderRecord]) -> TrainingFacts:
        """The summary that stands in the manifest.

        Args:
            before: the runs that this one's weights come from.
        """
        return TrainingFacts(
            record=file_name,
            config=self.config.name,
            epochs=len(self.epochs),
            minutes=round(self.minutes, 1),
            total_epochs=sum(len(record.epochs) for record in (self, *before)),
            total_minutes=round(sum(record.minutes for record in (self, *before)), 1),
            hardware=self.hardware,
            initial=self.config.initial,
            teachers=self.config.teacher.runs if self.config.teacher else (),
            data=f"{self.data}: {self.train_images} training images, {self.held_out_images} more held out",
        )


def make_record(
    config: BottleneckConfig, trainer: EncoderTrainer, *, data: str, held_out: int, device: str
) -> EncoderRecord:
    """Gather a record of this process's run."""
    return EncoderRecord(
        config=config,
        data=data,
        train_images=trainer.train_images,
        held_out_images=held_out,
        steps=trainer.step,
        planned_steps=trainer.steps,
        minutes=trainer.seconds / 60,
        hardware=hardware(device),
        environment=environment(),
        commit=source_commit(Path(__file__).parent),
        epochs=tuple(asdict(row) for row in trainer.rows),
    )


def save_record(record: EncoderRecord, folder: Path, file_name: str = _FILE) -> None:
    """Write a record into `folder`; a run folder has it as `record.json`."""
    content = json.dumps(record.model_dump(mode="json"), indent=1)
    write_atomically(folder / file_name, (content + "\n").encode())


def load_record(folder: Path, file_name: str = _FILE) -> EncoderRecord:
    """Read a record from a run folder, or by name from a folder of records.

    Raises:
        WeightsError: there is none, or it is damaged.
    """
    path = folder / file_name
    try:
        return EncoderRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"cannot read the training record {path}: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(f"the training record {path} is damaged: {error}") from error
