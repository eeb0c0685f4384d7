"""Personal heads: the network of a release with a last layer that a device has trained on its own pictures.

A worker writes the network's file and then its record into the folder `personal` of the kept sample, and the node reads
both.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from models.manifest import Digest
from models.session import OnnxModel, load_model
from tierkit.atomic import alone_in, private_folder, write_atomically
from tierkit.documents import Frozen, read_json
from tierkit.errors import SetupError, WeightsError

__all__ = ["MOST_HEAD_BYTES", "HeadMark", "PersonalRecord", "load_head", "mark_of", "write_head"]

MOST_HEAD_BYTES = 64 << 20
"""Bound on the file of a network with a personal head."""
_MOST_RECORD_BYTES = 64 << 10
_FOLDER = "personal"

HeadMark = tuple[int, ...]
"""Differs each time that a head has been written."""
_UNKNOWN: HeadMark = (0,)


class PersonalRecord(Frozen):
    """A personal head: the network that it belongs to, and the pictures that it was trained and judged on."""

    model_config = ConfigDict(allow_inf_nan=False)

    base: Digest
    """sha256 of the release's network."""
    sha256: Digest
    """sha256 of the network with the head."""
    size_bytes: Annotated[int, Field(gt=0, le=MOST_HEAD_BYTES)]
    release: Annotated[int, Field(ge=0)]
    """Number of the release."""
    temperature: Annotated[float, Field(gt=0, le=1000)]
    """`softmax(logits / temperature)` is calibrated, or less sure than that."""
    pictures: Annotated[int, Field(ge=0)]
    """Kept pictures that the head was trained on, and that have judged it."""
    figures: Annotated[dict[str, float], Field(max_length=64)]
    """Results of the comparison with the release's network."""
    made_at: datetime


def write_head(kept: Path, record: PersonalRecord, content: bytes) -> Path:
    """Write a head; it replaces all others. Returns the path of the network's file.

    Args:
        kept: folder of the kept sample.
        content: file of the network.

    Raises:
        SetupError: it cannot be written, or another process writes one.
    """
    folder = kept / _FOLDER
    network, written = _paths(kept, record.base)
    try:
        private_folder(folder, of=written.name)
    except OSError as error:
        raise SetupError(f"cannot make the folder {folder}: {error.strerror}") from error
    with alone_in(folder, otherwise=f"another process writes a personal head into {folder}: wait for its end"):
        write_atomically(network, content)
        write_atomically(written, record.model_dump_json(indent=1).encode())
        try:
            for other in folder.iterdir():
                if other not in (network, written):  # of another network, or half written when a process was killed
                    other.unlink(missing_ok=True)
        except OSError as error:
            raise SetupError(f"cannot delete an old head in {folder}: {error.strerror}") from error
    return network


def mark_of(kept: Path, base: str) -> HeadMark | None:
    """The mark of a network's head in a folder; None if there is no head. Blocks.

    Args:
        kept: folder of the kept sample.
        base: sha256 of the network.
    """
    network, written = _paths(kept, base)
    try:
        network.stat()
        now = written.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return _UNKNOWN  # reading the head says why
    return now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def load_head(kept: Path, network: OnnxModel) -> OnnxModel:
    """Load the personal head of a network that a node serves. Blocks.

    Args:
        kept: folder of the kept sample.

    Raises:
        WeightsError: a file is missing or damaged, belongs to another network, or has other inputs or classes.
        SetupError: see `models.session.load_model`.
    """
    file, written = _paths(kept, network.sha256)
    _check_size(written, _MOST_RECORD_BYTES)
    record = read_json(written, PersonalRecord, what="record of a personal head", error=WeightsError)
    if record.base != network.sha256:
        raise WeightsError(f"the personal head in {file} belongs to the network {record.base}: train it again")
    _check_size(file, record.size_bytes)
    entry = network.entry.model_copy(
        update={
            "file": file.name,
            "sha256": record.sha256,
            "size_bytes": record.size_bytes,
            "temperature": record.temperature,
            "coarse_accuracy": None,
            "fine_accuracy": None,
        }
    )
    return load_model(
        entry,
        file.parent,
        provider=network.provider,
        threads=network.threads,
        labels=network.labels["logits"],
        decode=network.inputs[0].decode,
    )


def _paths(kept: Path, base: str) -> tuple[Path, Path]:
    """Files of the network and of the record."""
    folder = kept / _FOLDER
    return folder / f"{base}.onnx", folder / f"{base}.json"


def _check_size(path: Path, most: int) -> None:
    """Raise WeightsError if a file is larger than it may be, so that it is not read into memory."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise WeightsError(f"cannot read the personal head {path}: {error.strerror}") from error
    if found > most:
        raise WeightsError(f"the personal head {path} has {found:,} bytes, and {most:,} were expected: train it again")
