"""A stream, a video file or a camera as a source. A separate process decodes it: `end_node.sources.reader`.

A codec that hangs or crashes takes only that process with it. The node asks for each picture, and the process keeps
only the latest frame meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import certifi
import msgspec

from end_node.settings import SourceSettings
from end_node.sources.picture import Intake, TakenPicture
from end_node.sources.pipe import (
    ALIVE,
    DONE,
    ERROR,
    HEAD,
    MAX_BODY_BYTES,
    PICTURE,
    PROGRESS,
    READY,
    TAKEN,
    ReaderOrder,
)
from tierkit.errors import MissingExtra, SourceUnavailable
from tierkit.orphan import PARENT_VARIABLE

__all__ = ["VideoSource", "open_camera", "open_stream"]

_READER = (sys.executable, "-P", "-m", "end_node.sources.reader")
_DEFAULT_RATE = 1.0
_OPENING_S = 15.0
"""Longest silence before the first frame: the reader starts, and gives a server 5 s to connect and 5 s to send."""
_SILENT_S = 10.0
_INTERVALS = 4.0
"""A reader hangs if it is silent for this many times the longest time between two frames, and for `_SILENT_S`."""
_MOST_SAID = 300


def open_stream(settings: SourceSettings, tls_ca: Path | None) -> VideoSource:
    """The kind `stream`; see `end_node.sources.picture.SourceKind`."""
    return VideoSource(settings, camera=False, tls_ca=tls_ca)


def open_camera(settings: SourceSettings, tls_ca: Path | None) -> VideoSource:
    """The kind `camera`."""
    return VideoSource(settings, camera=True, tls_ca=tls_ca)


class VideoSource:
    """Reads a video in a process.

    Args:
        settings: their `url` is an RTSP or HTTP URL, a file or a device.
        camera: it is a device.
        tls_ca: file with the certificates to trust.

    Raises:
        MissingExtra: PyAV is not installed.
    """

    def __init__(self, settings: SourceSettings, *, camera: bool, tls_ca: Path | None = None) -> None:
        if find_spec("av") is None:
            raise MissingExtra("video", "a stream or a camera")
        is_path = "://" not in settings.url
        self._order = ReaderOrder(
            url=os.path.abspath(os.path.expanduser(settings.url)) if is_path else settings.url,
            camera=camera,
            rate=settings.rate or _DEFAULT_RATE,
            changed=settings.changed,
            tls_ca=str(tls_ca or certifi.where()),
        )

    async def run(self, intake: Intake, alive: Callable[[int], None]) -> None:
        """Take frames until cancelled, or until the end of a file.

        Raises:
            SourceUnavailable: the video cannot be read, or its reader hangs or has crashed.
            TerraceError: a picture was not taken.
        """
        process = await _start()
        try:
            await _send(process, msgspec.json.encode(self._order) + b"\n" + READY)
            silent_s = _OPENING_S
            while True:
                kind, body = await _message(process, silent_s)
                if kind == ALIVE:
                    skipped, longest_s = PROGRESS.unpack(body)
                    silent_s = max(_SILENT_S, _INTERVALS * longest_s)
                    alive(skipped)
                elif kind == PICTURE:
                    (taken_s,) = TAKEN.unpack_from(body)
                    await intake.take(TakenPicture(content=body[TAKEN.size :], taken_s=taken_s))
                    await _send(process, READY)
                elif kind == DONE:
                    return
                else:
                    raise SourceUnavailable(body.decode(errors="replace")[:_MOST_SAID])
        finally:
            await _end(process)


async def _start() -> Process:
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(*_READER, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=_environment())
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:  # uvloop would leave the process
        await _end(await starting)
        raise


async def _end(process: Process) -> None:
    if process.returncode is None:
        # Not `process.kill`: it would take the exit code of a process that has just ended from asyncio.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    assert process.stdin is not None
    process.stdin.close()
    await process.communicate()
    with contextlib.suppress(ConnectionError):
        await process.stdin.wait_closed()


def _environment() -> dict[str, str]:
    """The reader's environment, without Terrace's settings: they may hold tokens and the URLs of other cameras."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TERRACE_")}
    return {**kept, PARENT_VARIABLE: str(os.getpid())}


async def _send(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)
    with contextlib.suppress(ConnectionError):  # it has ended, and has perhaps said why
        await process.stdin.drain()


async def _message(process: Process, silent_s: float) -> tuple[bytes, bytes]:
    """The next message of the reader.

    Raises:
        SourceUnavailable: there is none in this time, or the reader has ended without one.
    """
    assert process.stdout is not None
    try:
        async with asyncio.timeout(silent_s):
            kind, size = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
            if size > MAX_BODY_BYTES or kind not in (ALIVE, PICTURE, ERROR, DONE):
                raise SourceUnavailable("the process that reads it has sent nonsense, and was ended")
            return kind, await process.stdout.readexactly(size)
    except TimeoutError:
        raise SourceUnavailable(f"nothing was decoded for {silent_s:g} s, so its process was ended") from None
    except asyncio.IncompleteReadError:
        code = await process.wait()
        how = f"with the signal {signal.Signals(-code).name}" if code < 0 else f"with the code {code}"
        raise SourceUnavailable(f"the process that reads it has ended {how}") from None
