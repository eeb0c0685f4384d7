"""Files in chunks with a hash each: a chunk can be checked, and passed on, before the rest has come."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

__all__ = ["CHUNK_BYTES", "FileParts", "Sha256", "sha256_of"]

CHUNK_BYTES = 256 * 1024
"""Chunk size, unless a file has too many chunks then."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def sha256_of(content: bytes | memoryview) -> str:
    """Return the sha256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileParts:
    """A file that can be copied."""

    sha256: str
    bytes: int
    chunk_bytes: int
    chunks: tuple[str, ...]
    """Hash of each chunk; the last one may be shorter than the others."""

    def chunk(self, number: int) -> range:
        """The bytes of a chunk."""
        start = number * self.chunk_bytes
        return range(start, min(start + self.chunk_bytes, self.bytes))
