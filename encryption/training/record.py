"""The record of an encoder's training run, as it is kept beside the weights."""

from __future__ import annotations

from pathlib import Path

from encryption.training.config import BottleneckConfig
from encryption.training.loop import EncoderTrainer
from models.training.record import RunRecord, facts_of, read_record, save_record

__all__ = ["EncoderRecord", "load_record", "make_record", "save_record"]


class EncoderRecord(RunRecord):
    """One run; its epochs are as in `EncoderRow`."""

    config: BottleneckConfig


def make_record(trainer: EncoderTrainer, *, data: str, device: str) -> EncoderRecord:
    """Gather a record of this process's run."""
    return EncoderRecord(**facts_of(trainer, data=data, device=device, package=Path(__file__).parent))


def load_record(folder: Path, file_name: str = "record.json") -> EncoderRecord:
    """Read a record from a run folder, or by name from a folder of records.

    Raises:
        WeightsError: there is none, or it is damaged.
    """
    return read_record(EncoderRecord, folder, file_name)
