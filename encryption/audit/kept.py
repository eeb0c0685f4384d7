"""An audit as it is kept for the page: a record and its pictures in one folder. Needs no torch."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import AwareDatetime, ConfigDict, Field, field_validator

from encryption.audit.rows import Row
from tierkit.atomic import write_atomically
from tierkit.documents import Frozen, read_json
from tierkit.errors import DataError, SetupError
from tierkit.tensors import Array

__all__ = ["ORIGINALS", "RECORD", "KeptAudit", "keep_audit", "read_audit", "read_picture"]

RECORD = "audit.json"
ORIGINALS = "originals"
"""Name of the picture that shows what was attacked; the reconstructions have the numbers of their rows."""

_SHOWN = 8
_MOST_RECORD_BYTES = 2**20
_MOST_PICTURE_BYTES = 8 * 2**20


class KeptAudit(Frozen):
    """Stored results of the attacks of an audit."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    measured_at: AwareDatetime
    """Time of the audit."""
    quick: bool
    """True if the attackers were weaker than they could be."""
    heads: Mapping[str, str]
    """SHA-256 of the heads that were attacked, by the name of the encoder."""
    rows: Annotated[tuple[Row, ...], Field(max_length=999)]
    """Results, one for each encoder, form and attack."""

    @field_validator("rows")
    @classmethod
    def _measurable(cls, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        for row in rows:
            recognised = (row.recognised, row.recognised_low, row.recognised_high, row.recognised_originals)
            shares = (row.ssim, *recognised, row.fine_accuracy, row.accuracy_lost)
            if not (all(-1 <= share <= 1 for share in shares) and 0 <= row.payload_bytes < math.inf):
                raise ValueError("a figure is outside its possible range")
        return rows


def keep_audit(folder: Path, audit: KeptAudit, originals: Array, reconstructions: Sequence[Array]) -> None:
    """Write the record and its pictures into `folder`; they replace an earlier audit.

    Args:
        originals: UINT8 `[n, h, w, 3]`; the first 8 are kept.
        reconstructions: for each row, in the same shape.

    Raises:
        SetupError: it could not be written; then the folder holds no audit, or the earlier one.
    """
    record = folder / RECORD
    try:
        record.unlink(missing_ok=True)
    except OSError as exc:
        raise SetupError(f"cannot replace {record}: {exc.strerror}") from exc
    for name, images in ((ORIGINALS, originals), *((str(row), each) for row, each in enumerate(reconstructions))):
        write_atomically(_picture(folder, name), _strip(images[:_SHOWN]))
    write_atomically(record, audit.model_dump_json(indent=1).encode() + b"\n")


def read_audit(folder: Path) -> KeptAudit | None:
    """Return the audit that is kept in a folder; None if there is no audit.

    Raises:
        DataError: the file cannot be read, or is not an audit.
    """
    path = folder / RECORD
    try:
        if path.stat().st_size > _MOST_RECORD_BYTES:
            raise DataError(f"the audit {path} has more than {_MOST_RECORD_BYTES // 2**20} MiB")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise DataError(f"cannot read the audit {path}: {exc.strerror}") from exc
    return read_json(path, KeptAudit, what="audit", error=DataError)


def _picture(folder: Path, name: str) -> Path:
    """Return the path of a picture.

    Args:
        name: `ORIGINALS`, or the number of a row.
    """
    return folder / f"{name}.png"


def read_picture(folder: Path, name: str) -> bytes | None:
    """A picture of an audit, a PNG; None if there is none, or what is there is no PNG of a fair size."""
    try:
        with _picture(folder, name).open("rb") as file:
            content = file.read(_MOST_PICTURE_BYTES + 1)
    except OSError:
        return None
    return content if content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) <= _MOST_PICTURE_BYTES else None


def _strip(images: Array) -> bytes:
    """Images side by side, as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(np.concatenate(list(images), axis=1))).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
