"""Streams and video files as sources: real readers, real servers, and servers that misbehave."""

import asyncio
import contextlib
import io
import os
import shutil
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme
from PIL import Image
from pydantic import ValidationError

from end_node.settings import SourceSettings
from end_node.sources import keeper as keepers, video as videos
from end_node.sources.keeper import SourceKeeper
from tests.integration.end_node.cameras import (
    HEAD,
    http_camera,
    jpeg,
    part,
    rtsp_camera,
    showing,
    video_file,
    why_no_rtsp,
)
from tests.integration.end_node.intakes import KeepingIntake, kept
from tierkit.http.address import free_port
from tierkit.testing import wait_for

SNAPSHOT = b"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nConnection: close\r\n\r\n" + jpeg()

pytest.importorskip("av", reason="the extra 'video' is not installed")
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not installed")
needs_rtsp = pytest.mark.skipif(bool(why_no_rtsp()), reason=why_no_rtsp())


@pytest.fixture
async def intake() -> AsyncIterator[KeepingIntake]:
    yield KeepingIntake()
    await wait_for(lambda: not readers(), what="the end of the readers")
    for _ in range(5):  # uvloop closes what is left of a process in the next turns
        await asyncio.sleep(0)


def readers() -> list[int]:
    """Process ids of this process's readers."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in found for pid in file.read_text().split() if b"sources.reader" in command_line(pid)]


def command_line(pid: int | str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def size_of(content: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(content)) as picture:
        picture.load()
        assert picture.format == "JPEG"
        return picture.size


async def reason_of(keeper: SourceKeeper, text: str) -> None:
    await wait_for(lambda: text in keeper.status.reason, what=f"the reason '{text}'")


async def test_an_http_address_is_found_to_be_a_stream_and_the_rate_is_kept(intake: KeepingIntake) -> None:
    async with (
        http_camera(showing(lambda number: jpeg(value=number % 256))) as url,
        kept(intake, url, rate=5) as keeper,
    ):
        began = time.monotonic()
        await wait_for(lambda: len(intake.pictures) >= 4, what="the pictures")
        assert time.monotonic() - began >= 3 / 5
        await wait_for(lambda: keeper.status.skipped > 0, what="the frames that were skipped")
        assert (keeper.status.kind, keeper.status.state) == ("stream", "running")
    assert size_of(intake.pictures[0].content) == (64, 48)


async def test_while_the_node_is_busy_only_the_latest_frame_waits(intake: KeepingIntake) -> None:
    shown = 0

    def content(number: int) -> bytes:
        nonlocal shown
        shown = number
        return jpeg(value=number % 256)

    async with http_camera(showing(content)) as url, kept(intake, url, rate=1000) as keeper:
        await wait_for(lambda: bool(intake.pictures), what="the first picture")
        intake.gate.clear()
        held, skipped, until = len(intake.pictures), keeper.status.skipped, shown + 75
        await wait_for(lambda: shown >= until, what="the frames that pass by")
        opened = time.monotonic()
        intake.gate.set()
        await wait_for(lambda: len(intake.pictures) >= held + 3, what="the next pictures")
        await wait_for(lambda: keeper.status.skipped >= skipped + 40, what="the frames that were skipped")
    late = [picture.taken_s for picture in intake.pictures[held:] if picture.taken_s < opened - 1.0]
    assert len(late) <= 1, "only the picture that was in hand when the node became busy may be old"


async def test_frames_that_hardly_differ_are_skipped(intake: KeepingIntake) -> None:
    def content(number: int) -> bytes:
        return jpeg(value=0 if number < 20 or number >= 40 else 100)

    async with http_camera(showing(content)) as url, kept(intake, url, rate=1000, changed=0.1) as keeper:
        await wait_for(lambda: keeper.status.skipped > 60, what="the frames")
        assert keeper.status.state == "running"
    assert len(intake.pictures) == 3


@needs_ffmpeg
async def test_a_file_is_played_at_its_own_speed_and_ends(intake: KeepingIntake, tmp_path: Path) -> None:
    path = video_file(tmp_path / "clip.mp4", seconds=2.0)
    began = time.monotonic()
    async with kept(intake, path, rate=1000) as keeper:
        await wait_for(lambda: keeper.status.state == "finished", what="the end of the file")
        assert keeper.status.restarts == 0
    assert time.monotonic() - began >= 1.8
    assert 2 <= len(intake.pictures) <= 20
    assert size_of(intake.pictures[0].content) == (320, 240)


@needs_ffmpeg
async def test_a_file_of_one_frame_gives_its_picture(intake: KeepingIntake, tmp_path: Path) -> None:
    path = video_file(tmp_path / "clip.mkv", seconds=0.1)
    async with kept(intake, path) as keeper:
        await wait_for(lambda: keeper.status.state == "finished", what="the end of the file")
    assert len(intake.pictures) == 1


@needs_rtsp
async def test_an_rtsp_stream_that_is_cut_resumes_within_5_s(intake: KeepingIntake) -> None:
    port = free_port()
    async with rtsp_camera(port) as url:
        running = kept(intake, url, rate=10)
        keeper = await running.__aenter__()
        await wait_for(lambda: len(intake.pictures) > 3, what="the pictures")
    try:
        await wait_for(lambda: keeper.status.state == "waiting", what="the cut")
        async with rtsp_camera(port):
            restored, before = time.monotonic(), len(intake.pictures)
            await wait_for(lambda: len(intake.pictures) > before, what="the next picture")
            assert time.monotonic() - restored < 5.0
    finally:
        await running.__aexit__(None, None, None)


@needs_rtsp
async def test_the_password_of_a_url_is_nowhere_to_be_seen(
    intake: KeepingIntake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TERRACE_END_SOURCE", "gate=rtsp://me:hidden@camera/")
    async with rtsp_camera(free_port(), "me", "hidden") as url:
        async with kept(intake, url.replace("//", "//me:hidden@"), rate=10):
            await wait_for(lambda: bool(intake.pictures), what="a picture")
            (pid,) = readers()
            assert b"hidden" not in command_line(pid)
            assert b"hidden" not in environment(pid)
        async with kept(intake, url.replace("//", "//me:not-hidden@")) as keeper:
            await reason_of(keeper, "401")
    assert "hidden" not in caplog.text + keeper.status.reason + repr(keeper.settings)


async def test_a_page_is_not_a_stream(intake: KeepingIntake) -> None:
    async def show(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>" + b"no video " * 1000)

    async with http_camera(show) as url, kept(intake, url, kind="stream") as keeper:
        await reason_of(keeper, "it is not a video")


async def test_a_server_that_is_away_is_tried_again(intake: KeepingIntake) -> None:
    port = free_port()
    async with kept(intake, f"http://127.0.0.1:{port}/", kind="stream") as keeper:
        await reason_of(keeper, "Connection refused")
        await wait_for(lambda: keeper.status.restarts >= 3, what="some tries")


async def test_a_header_that_never_ends_is_given_up(intake: KeepingIntake) -> None:
    async def show(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"X: y\r\n")
            await writer.drain()
            await asyncio.sleep(0.1)

    async with http_camera(show) as url, kept(intake, url, kind="stream") as keeper:
        await reason_of(keeper, "it sends nothing for 5 s")


async def test_a_stream_that_stops_in_the_middle_of_a_frame_starts_again(intake: KeepingIntake) -> None:
    async def show(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + part(jpeg()) * 3 + part(jpeg())[:200])
        await writer.drain()
        await asyncio.Event().wait()

    async with http_camera(show) as url, kept(intake, url, rate=100) as keeper:
        await reason_of(keeper, "it sends nothing for 5 s")
        before = len(intake.pictures)
        await wait_for(lambda: len(intake.pictures) > before, what="the picture of the next try")


async def test_damaged_frames_are_skipped(intake: KeepingIntake) -> None:
    def content(number: int) -> bytes:
        return jpeg(value=number % 256) if number % 3 else b"\xff\xd8\xff\xe0" + os.urandom(500)

    async with http_camera(showing(content)) as url, kept(intake, url, rate=100) as keeper:
        await wait_for(lambda: len(intake.pictures) >= 10, what="the pictures")
        assert keeper.status.restarts == 0


async def test_a_stream_may_change_its_size(intake: KeepingIntake) -> None:
    sizes = [(64, 48), (320, 240), (2560, 1440)]

    show = showing(lambda number: jpeg(*sizes[number // 10 % 3]))
    async with http_camera(show) as url, kept(intake, url, rate=1000) as keeper:
        await wait_for(
            lambda: {size_of(each.content) for each in intake.pictures} == {(64, 48), (320, 240), (1920, 1080)},
            what="the three sizes",
        )
        assert keeper.status.restarts == 0


async def test_frames_of_8k_are_reduced(intake: KeepingIntake) -> None:
    content = jpeg(7680, 4320)
    async with http_camera(showing(lambda number: content, fps=3)) as url, kept(intake, url, rate=10):
        await wait_for(lambda: bool(intake.pictures), what="a picture")
    assert size_of(intake.pictures[0].content) == (1920, 1080)


@pytest.mark.parametrize("first", [0, 3])
async def test_frames_beyond_8192_pixels_are_refused_by_name(first: int, intake: KeepingIntake) -> None:
    wide = jpeg(8200, 16)
    show = showing(lambda number: wide if number >= first else jpeg())
    async with http_camera(show) as url, kept(intake, url, rate=100) as keeper:
        await reason_of(keeper, "8200 x 16 pixels, and at most 8192 x 8192 are read")


async def test_a_frame_that_claims_to_be_huge_costs_no_memory(intake: KeepingIntake) -> None:
    content = bytearray(jpeg())
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = b"\xfd\xe8\xfd\xe8"  # 65,000 x 65,000
    async with http_camera(showing(lambda number: bytes(content))) as url, kept(intake, url, rate=100) as keeper:
        await wait_for(lambda: keeper.status.state == "waiting", what="the refusal")
        assert any(text in keeper.status.reason for text in ("65000 x 65000", "MiB of memory", "cannot be decoded"))


async def test_a_playlist_names_no_files_of_the_device(intake: KeepingIntake, tmp_path: Path) -> None:
    secret = tmp_path / "secret.mjpeg"
    secret.write_bytes(jpeg() * 10)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{secret.as_uri()}\n#EXT-X-ENDLIST\n"
    script = f"ffconcat version 1.0\nfile '{secret}'\n"
    for text in (playlist, script):
        local = tmp_path / "list.m3u8"
        local.write_text(text)
        async with kept(intake, local) as keeper:
            await reason_of(keeper, "it is not a video")

        async def show(writer: asyncio.StreamWriter, text: str = text) -> None:
            body = text.encode()
            kind = b"Content-Type: application/vnd.apple.mpegurl"
            writer.write(b"HTTP/1.1 200 OK\r\n%s\r\nContent-Length: %d\r\n\r\n%s" % (kind, len(body), body))

        async with http_camera(show) as url, kept(intake, f"{url}/a.m3u8") as keeper:
            await wait_for(lambda: keeper.status.state == "waiting", what="the refusal")
    assert not intake.pictures


async def test_a_list_of_files_is_refused(intake: KeepingIntake) -> None:
    async with kept(intake, "concat:a.mp4|b.mp4", kind="stream") as keeper:
        await wait_for(lambda: keeper.status.state == "waiting", what="the refusal")


@pytest.mark.parametrize("kind", [None, "stream"])
@pytest.mark.parametrize("url", ["file:///etc/passwd", "udp://127.0.0.1:1", "tcp://127.0.0.1:1", "concat://a"])
def test_other_protocols_are_refused(url: str, kind: str | None) -> None:
    with pytest.raises(ValidationError):
        SourceSettings.model_validate({"name": "gate", "url": url, "kind": kind})


async def test_a_reader_that_is_killed_is_started_again(intake: KeepingIntake) -> None:
    async with http_camera(showing(lambda number: jpeg())) as url, kept(intake, url, rate=50) as keeper:
        await wait_for(lambda: bool(intake.pictures), what="a picture")
        (pid,) = readers()
        os.kill(pid, signal.SIGSEGV)
        await reason_of(keeper, "signal SIGSEGV")
        before = len(intake.pictures)
        await wait_for(lambda: len(intake.pictures) > before, what="the next picture")
        assert keeper.status.restarts == 1


async def test_a_reader_that_hangs_is_ended(intake: KeepingIntake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "_SILENT_S", 2.0)
    async with http_camera(showing(lambda number: jpeg())) as url, kept(intake, url, rate=50) as keeper:
        await wait_for(lambda: keeper.status.state == "running" and len(intake.pictures) > 5, what="the pictures")
        (pid,) = readers()
        os.kill(pid, signal.SIGSTOP)
        await reason_of(keeper, "nothing was decoded for 2 s")
        before = len(intake.pictures)
        await wait_for(lambda: len(intake.pictures) > before, what="the next picture")


async def test_a_reader_ends_with_its_node(intake: KeepingIntake, tmp_path: Path) -> None:
    node = tmp_path / "node.py"
    node.write_text(
        "import asyncio, sys\n"
        "from tests.integration.end_node.intakes import KeepingIntake, kept\n"
        "async def main():\n"
        "    intake = KeepingIntake()\n"
        "    async with kept(intake, sys.argv[1], kind='stream'):\n"
        "        while not intake.pictures:\n"
        "            await asyncio.sleep(0.01)\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    root = str(Path(__file__).parents[3])
    async with http_camera(showing(lambda number: jpeg())) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(node), url),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        (pid,) = (each for each in children_of(process.pid) if b"sources.reader" in command_line(each))
        process.kill()
        await process.wait()
        await wait_for(lambda: not command_line(pid), what="the end of the reader")


async def test_without_the_extra_the_reason_names_it(
    intake: KeepingIntake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(videos, "find_spec", lambda name: None)
    monkeypatch.setattr(keepers, "_LONGEST_POLITE_S", 0.05)
    async with kept(intake, "rtsp://127.0.0.1:1/main") as keeper:
        await wait_for(lambda: keeper.status.restarts >= 3, what="some tries")
        assert "needs the extra 'video'" in keeper.status.reason
    assert caplog.text.count("needs the extra 'video'") == 1


async def test_the_decoder_is_never_loaded_into_the_node() -> None:
    script = (
        "import sys, end_node.__main__, end_node.sources.keeper, end_node.sources.video\nassert 'av' not in sys.modules"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", script)
    assert await process.wait() == 0


@pytest.mark.parametrize("kind", ["stream", "snapshot"])
async def test_a_camera_with_a_certificate_that_is_not_trusted_gets_no_password(
    kind: str, intake: KeepingIntake, tmp_path: Path
) -> None:
    authority, ca_file = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    asked = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            if kind == "stream":
                await showing(lambda number: jpeg())(writer)
            writer.write(SNAPSHOT)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    url = f"https://me:hidden@127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server:
        async with kept(intake, url, kind=kind) as keeper:
            await wait_for(lambda: keeper.status.restarts >= 2, what="some tries")
        assert not asked
        async with kept(intake, url, kind=kind, tls_ca=ca_file):
            await wait_for(lambda: bool(intake.pictures), what="a picture")
