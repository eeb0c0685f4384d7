"""Option for the processor of a network."""

from __future__ import annotations

from enum import StrEnum

import typer

from models.session import check_threads
from tierkit.errors import SetupError

__all__ = ["Processor", "within_cores"]


class Processor(StrEnum):
    """Processor of a network."""

    CPU = "cpu"
    CUDA = "cuda"


def within_cores(threads: int | None) -> int | None:
    """Check that there are as many cores as threads."""
    if threads is not None:
        try:
            check_threads(threads)
        except SetupError as error:
            raise typer.BadParameter(str(error)) from error
    return threads
