"""Write-ahead journal of a host: the state of its run at some time, and all calls since.

A call is in the journal before its answer is sent. So a host that was killed repeats the calls, and has every version
that it has acknowledged: updates are sent at least once and applied exactly once. The journal grows as fast as updates
arrive; when it is much longer than the state, the state is written again and the journal restarts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import re
import secrets
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tierkit.atomic import private_folder, write_atomically
from tierkit.errors import SetupError
from training.units import Flat

__all__ = ["Journal"]

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<16sQIQI")
"""The journal's key; the number of the call; bytes of the call and of its body; and the CRC-32 of all of these, the
call and the body. The file begins with only the key.
"""
_KEY_BYTES, _CRC_AT = 16, 36
"""Length of the key, and the offset of the CRC-32 in the head."""
_LONGEST_CALL = 1 << 20
_SHORTEST = 64 << 20
"""A journal of fewer bytes is never replaced."""
_LENGTHS = 8
"""A journal is replaced by a new one when it is this many times as long as the state."""
_FILE = re.compile(r"(?:state-(\d+)\.safetensors|journal-(\d+)|\.state-\d+\.safetensors\..+)")

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
        self._key = b""
        """Begins the journal and each of its calls; drawn at random for each journal, and kept with the state."""
        self._calls = 0
        """Number of calls in the journal."""
        self._length = self._state_bytes = 0
        self._added = self._dirty = False
        self._changing = threading.Lock()
        """Held while the file is exchanged, or is written to disk."""
        try:
            private_folder(folder, of="lock")
            (folder / "lock").touch(mode=0o600)
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
        """Return the last state that was written; None if there is none. `calls` returns the calls after it.

        Raises:
            SetupError: it is damaged, or missing although there is a journal.
        """
        files = {each: found for each in self.folder.iterdir() if (found := _FILE.fullmatch(each.name))}
        numbers = [int(found[1]) for found in files.values() if found[1]]
        if not numbers:
            for each, found in files.items():
                if found[2] and each.stat().st_size > _KEY_BYTES:
                    raise SetupError(
                        f"{each} has updates, and the state that they belong to is missing: bring "
                        f"{self._state_path(int(found[2])).name} back from a copy, or start over in another folder"
                    )
            return None
        self._number = max(numbers)
        path = self._state_path(self._number)
        try:
            with safe_open(path, "numpy") as file:
                vectors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
                metadata = file.metadata()
            self._key = bytes.fromhex(metadata["key"])
            if metadata["crc"] != _crc_of(vectors, metadata["figures"], self._key):
                raise ValueError("its checksum is another one")
            figures = json.loads(metadata["figures"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as exc:
            raise SetupError(
                f"{path} is damaged ({exc}), and the run cannot continue: bring the file back from a copy, or start "
                "over in another folder"
            ) from exc
        self._state_bytes = path.stat().st_size
        return vectors, figures

    def calls(self, *, accept_loss: bool = False) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Each call since that state, with its body. What the last write before a crash has left unfinished was never
        acknowledged: it is cut off, and kept in a file until the next time.

        Args:
            accept_loss: treat damage to a call whose length is there in the same way.

        Raises:
            SetupError: there is such damage; nothing is changed.
        """
        path = self._journal_path(self._number)
        if not path.exists():
            self._cut(path, 0, 0, lost=True, accept_loss=accept_loss)
            self._create(self._number)
        with path.open("rb") as file:
            begun = file.read(_KEY_BYTES) == self._key
            whole = _KEY_BYTES if begun else 0
            while begun and (found := self._read(file, whole, self._calls)) is not None:
                call, body = found
                yield json.loads(call), body
                whole, self._calls = file.tell(), self._calls + 1
            size = path.stat().st_size
            if whole < size or not begun:
                lost = not begun or self._goes_on(file, whole)
                self._cut(path, whole, size - whole, lost=lost, accept_loss=accept_loss)
        os.truncate(path, whole)
        if not begun:
            self._create(self._number)
        self._open()
        self._clean_up()

    def _read(self, file: IO[bytes], place: int, number: int | None = None) -> tuple[bytes, bytes] | None:
        """Return the whole call at a place of the journal, and its body; None if there is none, or if it has another
        number.
        """
        file.seek(place)
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        key, found, call_bytes, body_bytes, crc = _HEAD.unpack(head)
        left = os.fstat(file.fileno()).st_size - file.tell()
        if key != self._key or number not in (None, found):
            return None
        if call_bytes > _LONGEST_CALL or call_bytes + body_bytes > left:
            return None
        call, body = file.read(call_bytes), file.read(body_bytes)
        right = zlib.crc32(body, zlib.crc32(call, zlib.crc32(head[:_CRC_AT]))) == crc
        return (call, body) if right else None

    def _goes_on(self, file: IO[bytes], place: int) -> bool:
        """True if the journal continues after a place where no call is whole: either a whole call follows, which no
        worker can imitate without the key, or the damaged call has its full length.
        """
        file.seek(place)
        if len(head := file.read(_HEAD.size)) == _HEAD.size:
            key, _, call_bytes, body_bytes, _ = _HEAD.unpack(head)
            if key == self._key and place + _HEAD.size + call_bytes + body_bytes == os.fstat(file.fileno()).st_size:
                return True
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            place -= 1
            while (place := content.find(self._key, place + 1)) >= 0:
                if self._read(file, place) is not None:
                    return True
        return False

    def _cut(self, path: Path, whole: int, rest: int, *, lost: bool, accept_loss: bool) -> None:
        copy = path.with_name(f"{path.name}-from-{whole}.cut" if lost else "torn.cut")
        if lost and not accept_loss:
            raise SetupError(
                f"{path} is {'missing or damaged' if whole == 0 else 'damaged'} at byte {whole:,}: updates that were "
                "acknowledged would be lost. Check the disk, and bring the file back from a copy; or start with "
                f"--accept-loss, which continues without the last {rest:,} bytes, and keeps them in {copy.name}"
            )
        if path.exists():
            copy.touch(mode=0o600)
            with path.open("rb") as source, copy.open("wb") as kept:
                source.seek(whole)
                shutil.copyfileobj(source, kept)
                os.fsync(kept.fileno())
        log.warning(
            "%s: the last %d bytes are %s; they are cut off, and kept in %s",
            path,
            rest,
            "damaged, and acknowledged updates are lost with them" if lost else "no whole call, as after a crash",
            copy,
        )

    def _clean_up(self) -> None:
        """Remove what a host that was killed in `begin` has left."""
        for each in self.folder.iterdir():
            found = _FILE.fullmatch(each.name)
            if found and int(found[1] or found[2] or -1) != self._number:
                each.unlink()

    def add(self, call: Mapping[str, Any], body: bytes | memoryview = b"", *, lasting: bool = True) -> None:
        """Write down a call; `flush` makes it outlast this process, and `sync` the machine.

        Args:
            lasting: True if a caller relies on it; other calls do not wait for the disk.

        Raises:
            OSError: the disk is full, or fails.
        """
        assert self._file is not None
        written = json.dumps(call).encode()
        head = _HEAD.pack(self._key, self._calls, len(written), len(body), 0)[:_CRC_AT]
        self._calls += 1
        crc = zlib.crc32(body, zlib.crc32(written, zlib.crc32(head)))
        self._length += self._file.write(head + crc.to_bytes(4, "little") + written)
        if body:
            self._length += self._file.write(body)
        self._added |= lasting

    def flush(self) -> None:
        """Hand the added calls to the operating system. Raises OSError; see `add`."""
        assert self._file is not None
        self._file.flush()
        if self._added:
            # In this order: `sync` may run meanwhile, and answers only for what was the system's before.
            self._added, self._dirty = False, True

    def sync(self) -> None:
        """Put all flushed calls on disk. May be called in another thread than the other methods."""
        with self._changing:
            if self._dirty and self._file is not None:
                self._dirty = False
                os.fdatasync(self._file.fileno())

    @property
    def long(self) -> bool:
        """True if it is time to begin a new journal."""
        return self._length > max(_SHORTEST, _LENGTHS * self._state_bytes)

    def begin(self, state: State) -> None:
        """Write the state, and begin a new journal after it.

        Raises:
            SetupError: it could not be written; all is as it was.
        """
        vectors, figures = state
        text, key = json.dumps(figures), secrets.token_bytes(16)
        content = save(vectors, metadata={"figures": text, "key": key.hex(), "crc": _crc_of(vectors, text, key)})
        number, former_key, self._key = self._number + 1, self._key, key
        try:
            self._create(number)  # before the state, so that a journal which is missing is known to be lost
            write_atomically(self._state_path(number), content)
        except OSError:
            self._key = former_key
            raise
        former, self._number, self._state_bytes, self._calls = self._number, number, len(content), 0
        self._open()
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

    def _create(self, number: int) -> None:
        """A journal without calls."""
        path = self._journal_path(number)
        path.touch(mode=0o600)
        with path.open("wb") as file:
            file.write(self._key)
            file.flush()
            os.fsync(file.fileno())

    def _open(self) -> None:
        with self._changing:
            if self._file is not None:
                self._file.close()
            self._file = self._journal_path(self._number).open("ab")
            self._length = self._file.tell()
            self._added = self._dirty = False

    def _state_path(self, number: int) -> Path:
        return self.folder / f"state-{number}.safetensors"

    def _journal_path(self, number: int) -> Path:
        return self.folder / f"journal-{number}"


def _crc_of(vectors: Mapping[str, Flat], figures: str, key: bytes) -> str:
    """Return the CRC-32 over everything in a state."""
    crc = zlib.crc32(figures.encode(), zlib.crc32(key))
    for name in sorted(vectors):
        each = np.ascontiguousarray(vectors[name])
        crc = zlib.crc32(
            each.data.cast("B") if each.size else b"", zlib.crc32(f"{name} {each.dtype} {each.shape}".encode(), crc)
        )
    return f"{crc:08x}"
