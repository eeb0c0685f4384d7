"""What a network runs on, as an option."""

from __future__ import annotations

from enum import StrEnum

import typer

from models.session import check_threads
from tierkit.errors import SetupError

__all__ = ["Processor", "within_cores"]


class Processor(StrEnum):
    """What a network runs on."""

    CPU = "cpu"
    CUDA = "cuda"


def within_cores(threads: int | None) -> int | None:
    """So many threads, if there are cores for them."""
    if threads is not None:
        try:
            check_threads(threads)
        except SetupError as error:
            raise typer.BadParameter(str(error)) from error
    return threads
