"""A source whose pictures programs post to the node."""

from __future__ import annotations

from pathlib import Path

from end_node.settings import SourceSettings
from end_node.sources.picture import PictureSource
from tierkit.errors import InvalidInput

__all__ = ["open_push"]


def open_push(settings: SourceSettings, tls_ca: Path | None) -> PictureSource:
    """The kind `push`; see `end_node.sources.picture.SourceKind`. There is nothing to read.

    Raises:
        InvalidInput: always.
    """
    raise InvalidInput("programs post the pictures of a push source: there is nothing to open")
