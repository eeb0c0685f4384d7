"""Terrace: cloud-edge-end hierarchical image classification.

from terrace import Client

with Client() as terrace:
    job = terrace.submit("photos/")
    for result in terrace.stream_results(job):
        print(result.name, result.label)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkit.client import AsyncClient, Client

    __version__: str

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    # On demand: every command passes through this package, and most have no use for these.
    if name == "__version__":
        from tierkit.distribution import installed_version

        return installed_version()
    if name in ("AsyncClient", "Client"):
        import tierkit.client

        return getattr(tierkit.client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
