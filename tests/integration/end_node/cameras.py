"""Cameras for tests: an MJPEG server that may misbehave, an RTSP server of GStreamer, and videos made by ffmpeg."""

import asyncio
import io
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from PIL import Image

from tierkit.testing import listening

DEBIANS_PYTHON = "/usr/bin/python3"
RTSP_SERVER = Path(__file__).with_name("rtsp_server.py")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=frame\r\n\r\n"

Show = Callable[[asyncio.StreamWriter], Awaitable[None]]


def jpeg(width: int = 64, height: int = 48, value: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (value, value, value)).save(file, "JPEG")
    return file.getvalue()


def part(content: bytes) -> bytes:
    return b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (len(content), content)


@asynccontextmanager
async def http_camera(show: Show) -> AsyncIterator[str]:
    """An HTTP server whose answers are written by `show`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await show(writer)

    async with listening(handle) as url:
        yield url


def showing(pictures: Callable[[int], bytes], fps: float = 50.0) -> Show:
    """An endless MJPEG stream of `pictures(0)`, `pictures(1)`, ..."""

    async def show(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        number = 0
        while not writer.is_closing():
            writer.write(part(pictures(number)))
            await writer.drain()
            await asyncio.sleep(1 / fps)
            number += 1

    return show


def why_no_rtsp() -> str:
    """Why there is no RTSP server on this machine; "" if there is one."""
    script = 'import gi; gi.require_version("GstRtspServer", "1.0")'
    found = shutil.which(DEBIANS_PYTHON) and subprocess.run([DEBIANS_PYTHON, "-c", script], capture_output=True)
    return "" if found and not found.returncode else "gir1.2-gst-rtsp-server-1.0 and python3-gi are not installed"


@asynccontextmanager
async def rtsp_camera(port: int, *credentials: str, size: tuple[int, int] = (320, 240)) -> AsyncIterator[str]:
    """An RTSP server in a process of its own; yields its URL without credentials."""
    command = [DEBIANS_PYTHON, str(RTSP_SERVER), str(port), *map(str, size), *credentials]
    # Not a process of the event loop: uvloop keeps handles of it a little longer than the loop of a test may last.
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220  # it starts at once
        assert process.stdout is not None
        try:
            assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
            yield f"rtsp://127.0.0.1:{port}/main"
        finally:
            process.kill()


def video_file(path: Path, *, seconds: float = 2.0, size: str = "320x240", fps: int = 10) -> Path:
    """A video made by ffmpeg."""
    made = ["-f", "lavfi", "-i", f"testsrc=size={size}:rate={fps}", "-t", str(seconds)]
    subprocess.run(["ffmpeg", "-loglevel", "error", *made, str(path)], check=True)
    return path
