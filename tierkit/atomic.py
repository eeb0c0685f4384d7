"""Writing files so that a crash or a full disk leaves the old file whole."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from tierkit.errors import SetupError

__all__ = [
    "alone_in",
    "finish_writing",
    "made_folder",
    "private_folder",
    "replace_file",
    "write_atomically",
    "write_new",
]

_writing = threading.Lock()


def made_folder(folder: Path) -> Path:
    """Make a folder, if it does not exist: before what is to be written there is computed, which would be lost.

    Raises:
        SetupError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder


def private_folder(folder: Path, *, of: str) -> None:
    """Make a folder private to its owner, with what `replace_file` writes there. A folder with other things in it keeps
    its mode.

    Args:
        of: a file that such a folder has when it was made earlier.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / of).exists() or not any(folder.iterdir()):
        folder.chmod(0o700)


@contextlib.contextmanager
def alone_in(folder: Path, *, otherwise: str | None = None) -> Iterator[None]:
    """Lock a folder for one process at a time, and make it if it is missing. The lock ends with the process, however
    that ends.

    Args:
        otherwise: error message if another process has it; None waits for that process.

    Raises:
        SetupError: another process has it, or it cannot be made or locked.
    """
    import fcntl  # not everywhere; those that only read networks do without

    made_folder(folder)
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if otherwise is None else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise SetupError(otherwise) from error
        except OSError as error:
            raise SetupError(f"cannot lock the folder {folder}: {error.strerror}") from error
        yield


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file next to `path`; on success it is synced to disk and replaces `path`. Others on the machine
    may read it, unless they may not enter its folder.

    Raises:
        SetupError: the file could not be written (no space, no permission); `path` is as it was before.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as handle:
            temporary = Path(handle.name)
            try:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        try:
            temporary.chmod(0o644 if path.parent.stat().st_mode & 0o077 else 0o600)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror or error}; the old file, if any, is whole") from error


def write_atomically(path: Path, content: bytes | IO[bytes] | Callable[[IO[bytes]], object]) -> None:
    """Replace `path` by `content`, or raise `SetupError` and leave it as it was.

    Args:
        content: bytes, a file, or a function that writes to a file.
    """
    with _writing, replace_file(path) as handle:
        if isinstance(content, bytes):
            handle.write(content)
        elif callable(content):
            content(handle)
        else:
            shutil.copyfileobj(content, handle)


def write_new(folder: Path, name: str, content: bytes) -> str:
    """Write a file into a folder without replacing another one, which a running service may use. Return its name, with
    a digest in it if another file has the name already.

    Raises:
        SetupError: the file could not be written.
    """
    path = folder / name
    if path.exists() and path.read_bytes() != content:
        path = folder / f"{path.stem}.{hashlib.sha256(content).hexdigest()[:12]}{path.suffix}"
    write_atomically(path, content)
    return path.name


def finish_writing() -> None:
    """Wait until no other thread is in `write_atomically`; from then on none begins to write."""
    _writing.acquire()


def _sync_folder(folder: Path) -> None:
    # Without this the rename itself may be lost in a power failure.
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
