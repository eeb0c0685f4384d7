"""The kind of a source: as its settings say, or as its URL and what it answers show."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import NamedTuple, cast

from end_node.settings import SOURCES, SourceSettings, scheme_of
from end_node.sources.picture import PictureSource, SourceKind
from tierkit.errors import InvalidInput, SourceUnavailable
from tierkit.extensions import load
from tierkit.picture_files import SUFFIXES

__all__ = ["Opened", "open_source_of"]


class Opened(NamedTuple):
    """A source and its kind."""

    kind: str
    source: PictureSource


async def open_source_of(settings: SourceSettings, tls_ca: Path | None) -> Opened:
    """Make the source that the settings describe.

    Raises:
        InvalidInput: Terrace does not read such a URL, or the settings do not fit the kind.
        SourceUnavailable: it is not there now.
        MissingExtra: a stream or camera, without PyAV.
        BrokenExtension: the package of the kind cannot be used.
    """
    kind = settings.kind or await _kind_of(settings.url, tls_ca)
    try:
        settings.check_kind(kind)
    except ValueError as exc:
        raise InvalidInput(str(exc)) from exc
    # Each kind is imported when it is used: a device without sources needs none of them. It may take long.
    make = cast(SourceKind, await asyncio.to_thread(load, SOURCES, kind))
    return Opened(kind, make(settings, tls_ca))


async def _kind_of(url: str, tls_ca: Path | None) -> str:
    match scheme_of(url):
        case "rtsp" | "rtsps":
            return "stream"
        case "http" | "https":
            from end_node.sources.snapshot import kind_by_answer

            return await kind_by_answer(url, tls_ca)
        case "":
            return await asyncio.to_thread(_kind_of_path, url)
        case other:
            raise InvalidInput(f"a source is rtsp://, rtsps://, http://, https:// or a path, not {other[:32]}://")


def _kind_of_path(url: str) -> str:
    path = Path(url).expanduser()
    if str(path).startswith("/dev/video"):
        return "camera"
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise SourceUnavailable(f"cannot find {path}: {reason}") from exc
    if stat.S_ISDIR(mode):
        return "folder"
    if path.suffix.lower() in SUFFIXES and path.suffix.lower() != ".gif":
        raise InvalidInput(f"{path} is a single picture: name its folder, or a video")
    if stat.S_ISREG(mode):
        return "stream"
    raise InvalidInput(f"{path} is neither a folder nor a file")
