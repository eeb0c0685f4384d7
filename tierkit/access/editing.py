"""Changing a file of tokens: what each command does to its entries (pure), and how the file is replaced."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from tierkit.access.files import MOST_BYTES
from tierkit.access.tokens import MOST_TOKENS, TokenEntry, digest_of, read_book, write_book
from tierkit.errors import Conflict, NotFound, SetupError

__all__ = ["added", "editing", "revoked", "rotated", "write_private"]

Entries = Sequence[TokenEntry]


def added(entries: Entries, entry: TokenEntry) -> list[TokenEntry]:
    """The entries with one more. Raises Conflict when the name has a token already."""
    if any(other.name == entry.name for other in entries):
        raise Conflict(f"{entry.name!r} has a token: 'terrace token rotate {entry.name}' replaces it")
    return [*entries, entry]


def rotated(
    entries: Entries, name: str, token: str, *, now: datetime, grace: timedelta, lifetime: timedelta | None
) -> list[TokenEntry]:
    """The entries with a further token of `name`, and an end to those that it has.

    Args:
        token: the new one; has the limits of the newest old one.
        grace: time for which the old ones stay valid.
        lifetime: of the new one; None for as long as the newest old one had.

    Raises:
        NotFound: the name has no token.
        Conflict: it is an invitation.
    """
    old = [entry for entry in entries if entry.name == name]
    if not old:
        raise NotFound(f"{name!r} has no token; those who have are listed by 'terrace token list'")
    last = old[-1]
    if last.run is not None:  # its token says what it is
        raise Conflict(f"{name!r} is an invitation, which is not exchanged: revoke it, and invite again")
    if lifetime is None and last.expires is not None and last.created is not None:
        lifetime = last.expires - last.created
    fresh = last.model_copy(
        update={
            "sha256": digest_of(token.encode()).hex(),
            "created": now,
            "expires": None if lifetime is None else now + lifetime,
        }
    )
    end = now + grace
    ending = [
        entry.model_copy(update={"expires": min(entry.expires or end, end)}) if entry.name == name else entry
        for entry in entries
    ]
    return [*ending, fresh]


def revoked(entries: Entries, which: str) -> list[TokenEntry]:
    """The entries without those whose name or id is `which`. Raises NotFound when there are none."""
    kept = [entry for entry in entries if which not in (entry.name, entry.id)]
    if len(kept) == len(entries):
        raise NotFound(f"no token has the name or id {which!r}; 'terrace token list' shows them")
    return kept


@contextlib.contextmanager
def editing(path: Path) -> Iterator[list[TokenEntry]]:
    """The entries of a file (none if it is not there yet), to be changed in place; written in one step at the end of
    the block, unless it raised. One process at a time.

    Raises:
        SetupError: the file cannot be read or written, or would be too long.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        raise SetupError(f"cannot write the file of tokens {path}: {exc.strerror}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = list(read_book(path, any_owner=os.geteuid() == 0)) if path.exists() else []
        yield entries
        content = write_book(entries)
        if len(entries) > MOST_TOKENS or len(content) > MOST_BYTES:  # ASCII
            raise SetupError(
                f"the file of tokens {path} was not changed, because it would be too long to be read again (at most "
                f"{MOST_TOKENS:,} tokens and {MOST_BYTES:,} bytes): revoke unused tokens"
            )
        _replace(path, content)
    finally:
        os.close(lock)


def _replace(path: Path, content: str) -> None:
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        owner = (path if path.exists() else path.parent).stat()
        write_private(part, content)
        if os.geteuid() == 0:
            os.chown(part, owner.st_uid, owner.st_gid)  # root works for the service's user, who must be able to read it
        part.replace(path)
    except OSError as exc:
        raise SetupError(f"cannot write the file of tokens {path}: {exc.strerror}") from exc
    finally:
        part.unlink(missing_ok=True)


def write_private(path: Path, content: str) -> None:
    """Write a new file that only its owner may read or change, from its first byte on.

    Raises:
        OSError: it exists, or cannot be written.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
