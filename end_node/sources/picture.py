"""One picture of a source, and the interface between a source and the node that answers its pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec
from msgspec import Struct

__all__ = ["Intake", "PictureSource", "TakenPicture"]


class TakenPicture(Struct, frozen=True, kw_only=True):
    """A picture in hand."""

    content: bytes
    """A JPEG, PNG or WebP file; a frame of a video comes as a JPEG."""
    taken_s: float = msgspec.field(default_factory=time.monotonic)
    """When it was taken, on the clock of `time.monotonic`."""
    name: str = ""
    """Name of its file, relative to the folder."""
    mark: str = ""
    """Identifies the file, so that it is taken once, even across restarts; "" for a picture that is not a file."""


class Intake(Protocol):
    """The receiver of the pictures of a source."""

    async def take(self, picture: TakenPicture) -> None:
        """Answer a picture and store the answer, durably. The source may then forget it."""

    async def known(self, marks: Collection[str]) -> Collection[str]:
        """The marks whose pictures have been taken, now or before a restart."""


class PictureSource(Protocol):
    """Reads pictures from one place."""

    async def run(self, intake: Intake, alive: Callable[[int], None]) -> None:
        """Read until cancelled; return only where there is nothing more to come, at the end of a file.

        Args:
            intake: takes the pictures.
            alive: called each time that the source has been heard of, with the number of pictures skipped since the
                last call.

        Raises:
            TerraceError: it broke, or the picture was not taken; trying again may help.
        """
