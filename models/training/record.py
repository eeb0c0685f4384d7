"""The record of a training run: configuration, data, hardware and progress."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from models.manifest import TrainingFacts
from models.training.config import TrainConfig
from models.training.data import TrainingData
from tierkit.atomic import write_atomically
from tierkit.documents import Frozen, read_json
from tierkit.errors import WeightsError

__all__ = [
    "FleetFacts",
    "Reached",
    "TrainingRecord",
    "hardware",
    "make_record",
    "read_record",
    "read_records",
    "save_record",
    "unfinished",
]

_FILE = "record.json"


class Reached(Frozen):
    """The moment at which a run had the accuracy that it was to reach."""

    accuracy: float
    """Accuracy on the held-out images."""
    seconds: float
    """Seconds from the first unit of work to the last update."""
    updates: int
    steps: int


class FleetFacts(Frozen):
    """Facts about a run that was spread over several machines."""

    strategy: str
    """Name of the strategy, or of its file."""
    workers: int
    """Number of workers that the run was set up for."""
    updates: int
    """Updates of workers that are in the weights."""
    reached: Reached | None = None
    """The moment that ended the run before its last step; None where nothing did."""


class TrainingRecord(Frozen):
    """Record of one run, kept next to the weights."""

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
    """Hardware that computed the run; for a run on a fleet, the hardware of its host."""
    environment: dict[str, str]
    commit: str | None
    """Commit of the working tree, with `+changes` after it where the tree had some; None outside a repository."""
    epochs: tuple[dict[str, Any], ...]
    """One row per finished epoch, as in `EpochRow`; none for a run on a fleet."""
    source_sha256: str | None = None
    """Digest of the training package's files, as they were when the record was written."""
    fleet: FleetFacts | None = None
    """None for a run of one process."""

    @property
    def finished_epochs(self) -> int:
        """Epochs whose steps are all done."""
        return len(self.epochs) if self.fleet is None else self.config.all_epochs * self.steps // self.planned_steps

    def facts(self, before: Sequence[TrainingRecord]) -> TrainingFacts:
        """Return the summary for the manifest.

        Args:
            before: the runs that this one's weights come from.
        """
        return TrainingFacts(
            record=f"{self.config.name}.json",
            config=self.config.name,
            epochs=self.finished_epochs,
            minutes=round(self.minutes, 1),
            total_epochs=sum(record.finished_epochs for record in (self, *before)),
            total_minutes=round(sum(record.minutes for record in (self, *before)), 1),
            hardware=self.hardware
            if self.fleet is None
            else f"{self.fleet.workers} workers of a fleet, strategy {self.fleet.strategy}; host: {self.hardware}",
            initial=self.config.initial,
            teachers=self.config.teacher.runs if self.config.teacher else (),
            data=f"{self.data}: {self.train_images} training images, {self.held_out_images} more held out",
        )


Record = TypeVar("Record", bound=TrainingRecord)


def make_record(
    kind: type[Record],
    config: TrainConfig,
    images: TrainingData,
    *,
    data: str,
    steps: int,
    planned_steps: int,
    seconds: float,
    epochs: Sequence[Mapping[str, Any]] = (),
    fleet: FleetFacts | None = None,
) -> Record:
    """Gather a record of a run.

    Args:
        kind: class of the record; the package that it belongs to is the one whose code has run.
        images: images of the run.
        data: name of the data set.
        seconds: seconds of the steps.
    """
    package = Path(inspect.getfile(kind)).parent
    return kind(
        config=config,
        data=data,
        train_images=images.train_images,
        held_out_images=len(images.held_out),
        steps=steps,
        planned_steps=planned_steps,
        minutes=seconds / 60,
        hardware=hardware(str(images.device)),
        environment={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
        },
        commit=_source_commit(package),
        epochs=tuple(dict(row) for row in epochs),
        source_sha256=_source_digest(package),
        fleet=fleet,
    )


def save_record(record: TrainingRecord, folder: Path, file_name: str = _FILE) -> None:
    """Write a record into `folder`: `record.json` in a run folder, `NAME.json` in a folder of records."""
    content = json.dumps(record.model_dump(mode="json"), indent=1)
    write_atomically(folder / file_name, (content + "\n").encode())


def read_record(kind: type[Record], folder: Path, file_name: str = _FILE) -> Record:
    """Read a record from a run folder, or by name from a folder of records.

    Raises:
        WeightsError: there is none, or it is damaged.
    """
    return read_json(folder / file_name, kind, what="training record", error=WeightsError)


def read_records(kind: type[Record], folder: Path) -> list[Record]:
    """Read the record of a run, and the records of the runs that its weights come from, latest first. See `read_record`
    for errors.
    """
    chain = [read_record(kind, folder)]
    while (name := chain[-1].config.initial) is not None:
        chain.append(read_record(kind, folder.parent / name))
    return chain


def unfinished(folder: Path, kind: type[TrainingRecord] = TrainingRecord) -> str | None:
    """A sentence on a run that has steps before it; None for one that has ended, or has no record of how far it is."""
    if not (folder / _FILE).is_file():
        return None  # the checkpoint was copied without it
    record = read_record(kind, folder)
    if record.steps >= record.planned_steps or (record.fleet is not None and record.fleet.reached is not None):
        return None
    return f"{folder.name} is not finished: it has done {record.steps:,} of {record.planned_steps:,} steps"


def hardware(device: str) -> str:
    """Describe the hardware that a run on `device` computes with, in words."""
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
    """Commit of the working tree that contains a package, with `+changes` after it if the package has uncommitted
    changes.
    """
    head = _git(package, "rev-parse", "HEAD")
    return head and head + ("+changes" if _git(package, "status", "--porcelain", "--", str(package)) else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _source_digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
