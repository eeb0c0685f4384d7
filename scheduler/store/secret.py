"""The scheduler's own secret. It lies beside the pixels of unfinished jobs, and keeps the same ones."""

from __future__ import annotations

import secrets
from pathlib import Path

from tierkit.access.editing import write_private
from tierkit.errors import SetupError

__all__ = ["kept_secret"]

_FILE = "noise.key"
_BYTES = 32


def kept_secret(folder: Path) -> bytes:
    """32 random bytes, drawn when a state folder is first used and the same ever after.

    Raises:
        SetupError: the file can be neither read nor written, or is damaged.
    """
    path = folder / _FILE
    try:
        if not path.exists():
            part = path.with_name(f"{_FILE}.part")
            part.unlink(missing_ok=True)
            write_private(part, secrets.token_hex(_BYTES))
            part.replace(path)
        secret = bytes.fromhex(path.read_text(encoding="ascii"))
    except OSError as exc:
        raise SetupError(f"cannot use {path}: {exc.strerror}") from exc
    except ValueError:
        secret = b""
    if len(secret) != _BYTES:
        raise SetupError(f"{path} is damaged: remove it, and a new one is made")
    return secret
