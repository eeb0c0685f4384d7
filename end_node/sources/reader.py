"""Process that reads one video for a node: `python -m end_node.sources.reader`. See `end_node.sources.pipe`.

It decodes the frames as they come, and keeps only the latest one. A second thread hands that one over when the node is
ready and the rate allows it. If the machine is too slow to decode all frames of a live stream, it decodes key frames
until it has caught up.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from threading import Condition, Lock, Thread
from typing import BinaryIO

import av
import msgspec
import simplejpeg
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from end_node.sources.change import GREY_SIDE, ChangeFilter
from end_node.sources.lag import Backlog
from end_node.sources.pipe import ALIVE, DONE, ERROR, HEAD, PICTURE, PROGRESS, TAKEN, ReaderOrder
from tierkit.orphan import die_with_parent

__all__ = ["main"]

_MEMORY_BYTES = 2**30
"""Memory that a codec may allocate; a stream of 8192 x 8192 with some reference frames needs most of it."""
_LARGEST, _LONGEST_SIDE = 8192, 1920
_QUALITY = 90
_TIMEOUT_S = 5.0
_ALIVE_S = 0.5
_LONGEST_PAUSE_S = 0.25
_LONGEST_USUAL_S = 1.0
"""Most time between two frames for which it is worth waiting for the next one."""
_MOST_JUMP_S = 60.0
"""A file whose frames are further apart is not waited for."""
_MOST_DAMAGED = 100
"""Packets in a row that cannot be decoded."""

_CONTAINERS = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,m4v,mjpeg,mpjpeg,h264,hevc,av1,obu,ivf,flv,ogg,asf,gif,nut,dv,mxf"
)
"""Formats that hold the video themselves: a list of files (concat, HLS, DASH) could name other files of the device."""
_HLS = "hls,aac,mp3,ac3,eac3,webvtt"
"""Formats of a playlist and what it names, allowed over HTTP only: there the protocols keep it from files."""


class VideoFault(Exception):
    """A video cannot be read; the text says why."""


class _Reader:
    """Latest frame of a video, and the pipe to the node."""

    def __init__(self, order: ReaderOrder, out: BinaryIO) -> None:
        self._order = order
        self._out = out
        self._writing = Lock()
        self._changed = Condition()
        self._latest: tuple[VideoFrame, float] | None = None
        self._busy = False
        """True while a frame is compared, encoded and sent."""
        self._ready = 0
        self._over = False
        self._taken = 0
        self._skipped = 0
        self._beats = 0
        self._longest_s = self._usual_s = 0.0
        self._shown_at = math.inf
        """Time of the latest frame."""
        self._change = ChangeFilter(order.changed)
        self._grey, self._colour = VideoReformatter(), VideoReformatter()

    def grant(self) -> None:
        """Note that the node takes one more picture."""
        with self._changed:
            self._ready += 1
            self._changed.notify_all()

    def read(self) -> None:
        """Decode until the end of the video.

        Raises:
            VideoFault: it is not a file, and has ended; or it cannot be read.
        """
        with _opened(self._order) as container:
            stream = _video_of(container)
            finite = not self._order.url.startswith("rtsp") and container.duration is not None
            live = Backlog() if self._order.url.startswith("rtsp") else None
            zero = last = -math.inf
            for frame in self._frames(container, stream):
                _check_size(frame.width, frame.height)
                if finite and frame.time is not None:
                    if not 0 <= frame.time - last <= _MOST_JUMP_S:
                        zero = time.monotonic() - frame.time
                    last = frame.time
                    self._pause_until(zero + frame.time)
                elif live is not None and frame.time is not None:
                    live.decoded(frame.time, time.monotonic())
                    # The end of a backlog is noticed at a key frame, which the frames after it build on.
                    stream.codec_context.skip_frame = "NONKEY" if live.long else "DEFAULT"
                self._show(frame)
        if not finite:
            raise VideoFault("the stream has ended")
        with self._changed:  # a file so short that the node was not ready before its end
            self._changed.wait_for(lambda: not self._busy and (self._taken or self._latest is None), timeout=_TIMEOUT_S)

    def _frames(self, container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
        """Frames that are whole; damaged packets are skipped."""
        damaged = 0
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.error.InvalidDataError as exc:
                damaged += 1
                if damaged > _MOST_DAMAGED:
                    raise VideoFault("its pictures cannot be decoded") from exc
                continue
            if stream.codec_context.skip_frame == "NONKEY":
                self._beats += 1  # the next key frame may be far away
            for frame in frames:
                if isinstance(frame, VideoFrame) and not frame.is_corrupt:
                    damaged = 0
                    yield frame

    def _pause_until(self, due: float) -> None:
        """Play a file at its own speed."""
        while (left_s := due - time.monotonic()) > 0:
            time.sleep(min(left_s, _LONGEST_PAUSE_S))
            self._beats += 1

    def _show(self, frame: VideoFrame) -> None:
        now = time.monotonic()
        with self._changed:
            self._longest_s = max(self._longest_s, now - self._shown_at)
            self._usual_s += (min(max(0.0, now - self._shown_at), _LONGEST_USUAL_S) - self._usual_s) / 8
            self._shown_at = now
            self._beats += 1
            if self._latest is not None:
                self._skipped += 1
            self._latest = frame, now
            self._changed.notify_all()

    def hand_over(self) -> None:
        """Send pictures and signs of life until the video is over."""
        interval_s, due, said_at, said = 1.0 / self._order.rate, 0.0, 0.0, 0
        while not self._over:
            found = self._next(due)
            now = time.monotonic()
            if found is not None and self._offer(*found):
                due = (due if now - due < interval_s else now) + interval_s
            del found  # a frame may be large
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                beats = self._beats
                tells = beats != said and now - said_at >= _ALIVE_S
                if tells:
                    said, said_at = beats, now
                    skipped, self._skipped = self._skipped, 0
            if tells:
                self._send(ALIVE, PROGRESS.pack(min(skipped, 2**32 - 1), self._longest_s))

    def _next(self, due: float) -> tuple[VideoFrame, float] | None:
        """Take the latest frame, if the node is ready and the time has come, perhaps after a wait."""

        def wait_s() -> float:
            if self._latest is None or not self._ready:
                return _ALIVE_S
            # A frame from before that time is old: the next one is better, if it comes soon.
            late_s = 0.0 if self._latest[1] >= due else 1.5 * self._usual_s
            return min(_ALIVE_S, due + late_s - time.monotonic())

        with self._changed:
            if wait_s() > 0:
                self._changed.wait(wait_s())
            if self._latest is None or not self._ready or wait_s() > 0:
                return None
            found, self._latest, self._busy = self._latest, None, True
            return found

    def _offer(self, frame: VideoFrame, taken_s: float) -> bool:
        """Send a frame if it differs from the last one sent. Returns True if it does."""
        if not self._differs(frame):
            with self._changed:
                self._skipped += 1
            return False
        picture = self._encoded(frame)
        with self._changed:
            self._ready -= 1
            self._taken += 1
        self._send(PICTURE, TAKEN.pack(taken_s) + picture)
        return True

    def end(self, kind: bytes, body: bytes = b"") -> None:
        """Send the last message."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._send(kind, body)

    def _send(self, kind: bytes, body: bytes) -> None:
        with self._writing:
            self._out.write(HEAD.pack(kind, len(body)) + body)
            self._out.flush()

    def _differs(self, frame: VideoFrame) -> bool:
        if not self._change.active:
            return True
        small = self._grey.reformat(frame, GREY_SIDE, GREY_SIDE, "gray", interpolation="AREA")
        return self._change.differs(small.to_ndarray())

    def _encoded(self, frame: VideoFrame) -> bytes:
        """The frame as a JPEG, at most 1920 pixels wide and high."""
        scale = min(1.0, _LONGEST_SIDE / max(frame.width, frame.height))
        width, height = (max(1, round(side * scale)) for side in (frame.width, frame.height))
        pixels = self._colour.reformat(frame, width, height, "rgb24", interpolation="AREA").to_ndarray()
        encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=_QUALITY)
        return encoded


def _opened(order: ReaderOrder) -> InputContainer:
    scheme, is_url, _ = order.url.lower().partition("://")
    timeout_us = str(int(_TIMEOUT_S * 1e6))
    options = {"analyzeduration": "1000000", "fpsprobesize": "0", "fflags": "discardcorrupt"}
    if order.camera:
        return av.open(order.url, format="v4l2", timeout=_TIMEOUT_S)
    if not is_url:
        options |= {"protocol_whitelist": "file", "format_whitelist": _CONTAINERS}
        return av.open(f"file:{order.url}", options=options, timeout=_TIMEOUT_S)
    options |= {"tls_verify": "1", "ca_file": order.tls_ca}
    if scheme in ("rtsp", "rtsps"):
        options |= {
            "protocol_whitelist": "rtsp,rtsps,rtp,srtp,tcp,tls",
            "format_whitelist": f"rtsp,rtp,sdp,{_CONTAINERS}",
            "rtsp_transport": "tcp",
            "fflags": "nobuffer+discardcorrupt",
            "timeout": timeout_us,
        }
    elif scheme in ("http", "https"):
        options |= {
            "protocol_whitelist": "http,https,tcp,tls,crypto",
            "format_whitelist": f"{_CONTAINERS},{_HLS}",
            "rw_timeout": timeout_us,
        }
    else:
        raise VideoFault(f"streams are read by RTSP and HTTP, not by {scheme[:32]}")
    return av.open(order.url, options=options, timeout=_TIMEOUT_S)


def _video_of(container: InputContainer) -> VideoStream:
    if not container.streams.video:
        raise VideoFault("there is no video in it")
    stream = container.streams.video[0]
    _check_size(stream.codec_context.width, stream.codec_context.height)
    # Threads that decode one frame each would hold a frame back for each of them.
    stream.thread_type = "SLICE"
    return stream


def _check_size(width: int, height: int) -> None:
    if max(width, height) > _LARGEST:
        raise VideoFault(f"its pictures have {width} x {height} pixels, and at most {_LARGEST} x {_LARGEST} are read")


def _fault(error: Exception) -> str:
    """The fault as a sentence, without the URL."""
    match error:
        case VideoFault():
            return str(error)
        case MemoryError() | av.error.MemoryError():
            return f"its pictures need more than {_MEMORY_BYTES // 2**20} MiB of memory"
        case av.error.ExitError() | TimeoutError():
            return f"it sends nothing for {_TIMEOUT_S:g} s"
        case av.error.InvalidDataError() | av.error.FFmpegError(errno=errno.EINVAL):
            return "it is not a video that can be read"
        case av.error.FFmpegError(errno=errno.EIO):
            return "it is not a video, or it breaks off"
        case av.error.FFmpegError():
            return f"it cannot be read: {error.strerror}"
        case _:
            return f"its reader fails with {type(error).__name__}"


def _listen(reader: _Reader) -> None:
    """Pass on the node's readiness, and end this process when the node has gone."""
    while os.read(sys.stdin.fileno(), 1):
        reader.grant()
    os._exit(0)


def _first_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            sys.exit("this process is started by an end node")
        line += byte
    return bytes(line)


def main() -> None:
    """Read the video that standard input names."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which ends this process
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what a library prints
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    av.logging.set_level(None)
    reader = _Reader(msgspec.json.decode(_first_line(), type=ReaderOrder), out)
    Thread(target=_listen, args=(reader,), daemon=True).start()
    Thread(target=_run, args=(reader, reader.hand_over), daemon=True).start()
    _run(reader, reader.read)
    reader.end(DONE)
    os._exit(0)


def _run(reader: _Reader, work: Callable[[], None]) -> None:
    """Do a thread's work; an error ends the process."""
    try:
        work()
    except Exception as exc:
        reader.end(ERROR, _fault(exc).encode())
        os._exit(0)


if __name__ == "__main__":
    main()
