"""Memory that was needed once."""

from __future__ import annotations

import ctypes

__all__ = ["give_back"]

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; others give memory back by themselves


def give_back() -> None:
    """Return to the system what has been freed: the allocator keeps some hundred megabytes after a large picture or
    body. Takes milliseconds, and lets other threads run."""
    if _trim is not None:
        _trim(0)
