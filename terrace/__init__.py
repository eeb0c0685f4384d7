"""Terrace: cloud-edge-end hierarchical image classification.

from terrace import Client

with Client() as terrace:
    job = terrace.submit("photos/")
    for result in terrace.stream_results(job):
        print(result.name, result.label)
"""

from __future__ import annotations

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkit.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]

__version__ = _version("terrace")


def __getattr__(name: str) -> Any:
    # On demand: `terrace end` passes through this package and must not pay for a client that it never uses.
    if name in ("AsyncClient", "Client"):
        import tierkit.client

        return getattr(tierkit.client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
