"""The record of a training run: what was run, on what, and how it went."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict

from models.atomic import write_atomically
from models.manifest import TrainingFacts
from models.training.config import TrainConfig
from models.training.driver import Driver
from tierkit.errors import WeightsError

__all__ = [
    "RunRecord",
    "TrainingRecord",
    "facts_of",
    "hardware",
    "load_record",
    "make_record",
    "read_record",
    "record_name",
    "save_record",
]

_PACKAGE = Path(__file__).parent
_FILE = "record.json"


class RunRecord(BaseModel):
    """One run, as it is kept beside the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: TrainConfig
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
    """One row per finished epoch, as in `EpochRow`."""

    def facts(self, file_name: str, before: Sequence[RunRecord]) -> TrainingFacts:
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


class TrainingRecord(RunRecord):
    """The run of a network that is served."""

    source_sha256: str
    """Digest of the training package's files, as they were when the record was written."""


def facts_of(trainer: Driver[Any, Any], *, data: str, device: str, package: Path) -> dict[str, Any]:
    """The fields of a `RunRecord` for this process's run.

    Args:
        data: name of the data set.
        package: whose code has run.
    """
    return {
        "config": trainer.config,
        "data": data,
        "train_images": trainer.train_images,
        "held_out_images": trainer.held_out_images,
        "steps": trainer.step,
        "planned_steps": trainer.steps,
        "minutes": trainer.seconds / 60,
        "hardware": hardware(device),
        "environment": _environment(),
        "commit": _source_commit(package),
        "epochs": tuple(asdict(row) for row in trainer.rows),
    }


def make_record(trainer: Driver[Any, Any], *, data: str, device: str) -> TrainingRecord:
    """Gather a record of this process's run of a network."""
    facts = facts_of(trainer, data=data, device=device, package=_PACKAGE)
    return TrainingRecord(**facts, source_sha256=_source_digest())


def record_name(name: str) -> str:
    """File name of a network's record in `models/records/`."""
    return f"{name}.json"


def save_record(record: RunRecord, folder: Path, file_name: str = _FILE) -> None:
    """Write a record into `folder`; a run folder has it as `record.json`."""
    content = json.dumps(record.model_dump(mode="json"), indent=1)
    write_atomically(folder / file_name, (content + "\n").encode())


def load_record(folder: Path) -> TrainingRecord:
    """Read the record of a run folder. Raises as `read_record`."""
    return read_record(TrainingRecord, folder)


Record = TypeVar("Record", bound=RunRecord)


def read_record(kind: type[Record], folder: Path, file_name: str = _FILE) -> Record:
    """Read a record from a run folder, or by name from a folder of records.

    Raises:
        WeightsError: there is none, or it is damaged.
    """
    path = folder / file_name
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"cannot read the training record {path}: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(f"the training record {path} is damaged: {error}") from error


def _environment() -> dict[str, str]:
    """Versions, and the number of torch's threads."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


def hardware(device: str) -> str:
    """What a run on `device` computes with, in words."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    threads = torch.get_num_threads()
    return f"{threads} {'core' if threads == 1 else 'cores'} of {model}, shared with other work"


def _source_commit(package: Path) -> str | None:
    """Commit of the working tree that a package lies in, `+changes` after it where the package had some."""
    head = _git(package, "rev-parse", "HEAD")
    return head and head + ("+changes" if _git(package, "status", "--porcelain", "--", str(package)) else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
