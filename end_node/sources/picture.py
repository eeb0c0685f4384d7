"""One picture of a source, and the interface between a source and the node that answers its pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from end_node.settings import SourceSettings

__all__ = ["Intake", "PictureSource", "SourceKind", "TakenPicture"]


class TakenPicture(Struct, frozen=True, kw_only=True):
    """A picture in hand."""

    content: bytes
    """A JPEG, PNG or WebP file; a frame of a video comes as a JPEG."""
    taken_s: float = msgspec.field(default_factory=time.monotonic)
    """Time at which it was taken, on the clock of `time.monotonic`."""
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


class SourceKind(Protocol):
    """An entry point of `terrace.sources`: a class of sources, or a function that makes one."""

    def __call__(self, settings: SourceSettings, tls_ca: Path | None, /) -> PictureSource:
        """The source that the settings describe. Connect in `PictureSource.run`, not here.

        Args:
            settings: `url`, `rate` and `changed` are for the source to keep to.
            tls_ca: file with the certificates to trust, instead of the usual public authorities.

        Raises:
            InvalidInput: the settings do not fit this kind.
            MissingExtra: something that it needs is not installed.
        """
        ...
