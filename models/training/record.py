"""The record of a training run: what was run, on what, and how it went."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from models.atomic import write_atomically
from models.manifest import TrainingFacts
from models.training.checkpoint import EpochRow
from models.training.config import TrainConfig
from tierkit.errors import WeightsError

__all__ = [
    "TrainingRecord",
    "environment",
    "hardware",
    "load_record",
    "make_record",
    "record_name",
    "save_record",
    "source_commit",
]

_PACKAGE = Path(__file__).parent
_FILE = "record.json"


class TrainingRecord(BaseModel):
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
    source_sha256: str
    """Digest of the training package's files, as they were when the record was written."""
    epochs: tuple[dict[str, Any], ...]
    """One row per finished epoch, as in `EpochRow`."""

    def facts(self, file_name: str, before: Sequence[TrainingRecord]) -> TrainingFacts:
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
    config: TrainConfig,
    rows: list[EpochRow],
    *,
    data: str,
    train_images: int,
    held_out_images: int,
    steps: int,
    planned_steps: int,
    seconds: float,
    device: str,
) -> TrainingRecord:
    """Gather a record of this process's run."""
    return TrainingRecord(
        config=config,
        data=data,
        train_images=train_images,
        held_out_images=held_out_images,
        steps=steps,
        planned_steps=planned_steps,
        minutes=seconds / 60,
        hardware=hardware(device),
        environment=environment(),
        commit=source_commit(_PACKAGE),
        source_sha256=_source_digest(),
        epochs=tuple({name: getattr(row, name) for name in EpochRow.__slots__} for row in rows),
    )


def record_name(name: str) -> str:
    """File name of a network's record in `models/records/`."""
    return f"{name}.json"


def save_record(record: TrainingRecord, folder: Path, file_name: str = _FILE) -> None:
    """Write a record into `folder`; a run folder has it as `record.json`."""
    content = json.dumps(record.model_dump(mode="json"), indent=1)
    write_atomically(folder / file_name, (content + "\n").encode())


def load_record(folder: Path) -> TrainingRecord:
    """Read the record of a run folder.

    Raises:
        WeightsError: there is none, or it is damaged.
    """
    path = folder / _FILE
    try:
        return TrainingRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"cannot read the training record {path}: {error.strerror}") from error
    except ValueError as error:
        raise WeightsError(f"the training record {path} is damaged: {error}") from error


def environment() -> dict[str, str]:
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


def source_commit(package: Path) -> str | None:
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
