"""What a host keeps on disk: the state of its run at some time, and a journal of all calls since.

A call is in the journal before its answer goes out, so a host that is killed repeats the calls and has every version
that it has acknowledged. The journal grows as fast as updates come; when it is much longer than the state is large, the
state is written anew and the journal begins again.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from models.atomic import write_atomically
from tierkit.errors import SetupError
from training.units import Flat

__all__ = ["Journal"]

_HEAD = struct.Struct("<IQI")
"""Bytes of the call and of its body, and the CRC-32 of both."""
_LONGEST_CALL = 1 << 20
_SHORTEST = 64 << 20
"""A journal of fewer bytes is never begun anew."""
_LENGTHS = 8
"""A journal is begun anew when it has so many times the bytes of the state."""

State = tuple[dict[str, Flat], dict[str, Any]]


class Journal:
    """The files of one run, in a folder that no other host uses meanwhile.

    Raises:
        SetupError: the folder cannot be used, or another host has it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[bytes] | None = None
        self._number = -1
        self._length = self._state_bytes = 0
        self._added = self._dirty = False
        self._changing = threading.Lock()
        """Held while the file is exchanged, or is written to disk."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            self._lock.close()
            raise SetupError(
                f"another host keeps its run in {folder}: stop it, or give this one another folder"
            ) from exc
        except OSError as exc:
            raise SetupError(f"cannot use the folder {folder}: {exc.strerror}") from exc

    def load(self) -> State | None:
        """The last state that was written; None where there is none. `calls` gives what came after it.

        Raises:
            SetupError: it is damaged.
        """
        numbers = [int(path.stem.removeprefix("state-")) for path in self.folder.glob("state-*.safetensors")]
        if not numbers:
            return None
        self._number = max(numbers)
        path = self._state_path(self._number)
        try:
            with safe_open(path, "numpy") as file:
                vectors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
                figures = json.loads(file.metadata()["figures"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as exc:
            raise SetupError(f"{path} is damaged ({exc}): begin the run anew in another folder") from exc
        self._state_bytes = path.stat().st_size
        return vectors, figures

    def calls(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Each call since that state, with its body. What the last write before a crash has left unfinished was never
        acknowledged, and is cut off."""
        path = self._journal_path(self._number)
        path.touch()
        with path.open("rb") as file:
            whole = 0
            while (head := file.read(_HEAD.size)) and len(head) == _HEAD.size:
                call_bytes, body_bytes, crc = _HEAD.unpack(head)
                left = path.stat().st_size - file.tell()
                if call_bytes > _LONGEST_CALL or call_bytes + body_bytes > left:
                    break
                call, body = file.read(call_bytes), file.read(body_bytes)
                if zlib.crc32(body, zlib.crc32(call)) != crc:
                    break
                yield json.loads(call), body
                whole = file.tell()
        os.truncate(path, whole)
        self._open(append=True)

    def add(self, call: Mapping[str, Any], body: bytes | memoryview = b"", *, lasting: bool = True) -> None:
        """Write down a call; `flush` makes it outlast this process, and `sync` the machine.

        Args:
            lasting: whether anybody relies on it; the disk is not waited for on behalf of other calls.

        Raises:
            OSError: the disk is full, or fails.
        """
        assert self._file is not None
        written = json.dumps(call).encode()
        crc = zlib.crc32(body, zlib.crc32(written))
        self._length += self._file.write(_HEAD.pack(len(written), len(body), crc) + written)
        if body:
            self._length += self._file.write(body)
        self._added |= lasting

    def flush(self) -> None:
        """What was added is the system's to write; raises OSError as `add`."""
        assert self._file is not None
        self._file.flush()
        if self._added:
            # In this order: `sync` may run meanwhile, and answers only for what was the system's before.
            self._added, self._dirty = False, True

    def sync(self) -> None:
        """All that was flushed is on disk when this returns. May be called in another thread than the rest.

        Raises:
            OSError: as `add`.
        """
        with self._changing:
            if self._dirty and self._file is not None:
                self._dirty = False
                os.fdatasync(self._file.fileno())

    @property
    def long(self) -> bool:
        """Whether it is time to begin it anew."""
        return self._length > max(_SHORTEST, _LENGTHS * self._state_bytes)

    def begin(self, state: State) -> None:
        """Write the state, and begin a new journal after it.

        Raises:
            SetupError: it could not be written; all is as it was.
        """
        vectors, figures = state
        content = save(vectors, metadata={"figures": json.dumps(figures)})
        number = self._number + 1
        write_atomically(self._state_path(number), content)
        former, self._number, self._state_bytes = self._number, number, len(content)
        self._open(append=False)
        for path in (self._state_path(former), self._journal_path(former)):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let the folder go."""
        if self._file is not None:
            with suppress(OSError):
                self.flush()
                self.sync()
            self._file.close()
        self._lock.close()

    def _open(self, *, append: bool) -> None:
        with self._changing:
            if self._file is not None:
                self._file.close()
            self._file = self._journal_path(self._number).open("ab" if append else "wb")
            self._length = self._file.tell()
            self._added = self._dirty = False

    def _state_path(self, number: int) -> Path:
        return self.folder / f"state-{number}.safetensors"

    def _journal_path(self, number: int) -> Path:
        return self.folder / f"journal-{number}"
