"""Files that commands write their results to."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import typer

__all__ = ["check_out_file", "check_out_folder", "format_of"]

_SUFFIXES = (".jsonl", ".csv")


def format_of(out: Path) -> Literal["jsonl", "csv"]:
    """Return the format of a file of results."""
    return "csv" if out.suffix.lower() == ".csv" else "jsonl"


def check_out_file(out: Path) -> None:
    """Check that a file of results can be written, before any work."""
    if out.suffix.lower() not in _SUFFIXES:
        raise typer.BadParameter("the name of the file must end in .jsonl or .csv", param_hint="--out")
    check_out_folder(out.absolute().parent)


def check_out_folder(folder: Path) -> None:
    """Check that files can be written to a folder, before any work."""
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}", param_hint="--out")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise typer.BadParameter(
            f"the folder {folder} cannot be written to ({exc.strerror})", param_hint="--out"
        ) from exc
