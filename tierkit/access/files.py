"""Files with secrets: only their owner may read them, and services read them again when they change."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from tierkit.errors import SetupError

__all__ = [
    "MOST_BYTES",
    "TokenFile",
    "check_private",
    "checked_token",
    "follow_files",
    "read_private",
    "read_token",
    "signature",
]

log = logging.getLogger(__name__)

MOST_BYTES = 4 * 1024 * 1024
"""Most bytes of a file with secrets."""
_PERIOD_S = 1.0
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
"""Bearer tokens in the form of RFC 6750. A shorter one would be a password, which can be guessed."""


def read_private(path: Path, what: str, *, any_owner: bool = False, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file that only its owner may read or change.

    Args:
        what: name of the file in messages, such as "the token file".
        any_owner: accept any owner. For root, who manages the files of services.

    Raises:
        SetupError: it cannot be read, is too long, or others may read or change it.
    """
    try:
        with path.open("rb") as handle:
            check_private(os.fstat(handle.fileno()), path, what, any_owner=any_owner)
            content = handle.read(most_bytes + 1)
    except OSError as exc:
        raise SetupError(f"cannot read {what} {path}: {exc.strerror}") from exc
    if len(content) > most_bytes:
        raise SetupError(f"{what} {path} is longer than {most_bytes} bytes")
    return content


def check_private(
    found: os.stat_result, path: Path, what: str, *, forbidden: int = 0o077, any_owner: bool = False
) -> None:
    """Refuse a file that others may read or change. A file of root's may be readable by its group: that is how root, or
    systemd in its name, hands files to a service.

    Raises:
        SetupError: they may, or it belongs to another user (other than root).
    """
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == 0:
        forbidden &= ~stat.S_IRGRP
    if mode & forbidden:
        wanted = mode & ~forbidden
        raise SetupError(f"others may use {what} {path} (mode {mode:04o}): chmod {wanted:04o} {path}")
    if not any_owner and found.st_uid not in (os.geteuid(), 0):
        raise SetupError(f"{what} {path} belongs to another user (uid {found.st_uid}): chown {os.geteuid()} {path}")


def read_token(path: Path) -> str:
    """Return the token in a file that holds only this token, on one line.

    Raises:
        SetupError: see `read_private`; or the content is not a token.
    """
    return checked_token(read_private(path, "the token file").decode("utf-8", "replace"), f"the token file {path}")


class TokenFile:
    """The token in a file, read again when the file has changed. An unusable change is logged once, and the old token
    stays.

    Raises:
        SetupError: at the first reading; see `read_token`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._seen = signature([self._path])
        self._token = read_token(self._path)

    def __call__(self) -> str:
        """The token as it is now."""
        if (now := signature([self._path])) != self._seen:
            self._seen = now
            try:
                self._token = read_token(self._path)
            except SetupError as exc:
                log.error("the token stays as it was: %s", exc)
            else:
                log.info("the token file was read again", extra={"path": str(self._path)})
        return self._token


def checked_token(text: str, where: str) -> str:
    """Return a token without the white space around it. The message of the error does not repeat it.

    Raises:
        SetupError: the text is not a token.
    """
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise SetupError(f"{where} holds no token: one line of 16 to 512 letters, digits and - . _ ~ + / = is expected")
    return token


def signature(paths: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """Return a value that changes when a file is written, replaced, or given other permissions; () for a missing
    file."""
    found: list[tuple[int, ...]] = []
    for path in paths:
        try:
            facts = path.stat()
        except OSError:
            found.append(())
        else:
            found.append((facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_mode))
    return tuple(found)


async def follow_files(
    paths: Sequence[Path], seen: tuple[tuple[int, ...], ...], read: Callable[[], None], *, what: str
) -> None:
    """Call `read`, in a thread, whenever one of the files has changed, until cancelled. An unusable change has no
    effect, and is logged once.

    Args:
        seen: their signature when they were last read.
        what: names them in the log.
    """
    while True:
        await asyncio.sleep(_PERIOD_S)
        now = await asyncio.to_thread(signature, paths)
        if now == seen:
            continue
        seen = now
        try:
            await asyncio.to_thread(read)
        except SetupError as exc:
            log.error("the %s stay as they were: %s", what, exc)
        else:
            log.info("the %s were read again", what)
