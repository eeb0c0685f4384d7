"""Unloading and loading the models of a node by operators (Triton's extension `model_repository`)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tierkit.errors import TerraceError, Unavailable
from tierkit.inference.model import Loadable
from tierkit.inference.runner import ModelRunner
from tierkit.inference.versions import Versions

__all__ = ["Repository"]

log = logging.getLogger(__name__)

_UNLOADED = "an operator has unloaded it"

_BUDGET_S = 60.0
"""Seconds for the requests that came before an unload, and for a load."""


class Repository:
    """The models of a node, all of which it serves when it starts.

    Args:
        versions: the models.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._turn = asyncio.Lock()

    @property
    def whole(self) -> bool:
        """True if all models are served. A node that lacks one takes no tasks: its scheduler counts on all of them."""
        return not any(version.runner.not_served for version in self._versions)

    def index(self, *, ready: bool) -> list[dict[str, Any]]:
        """Name, version, state and reason of each version of a model; `ready`: only of those that are served."""
        return [
            {
                "name": version.key.name,
                "version": version.key.sha256,
                "state": "UNAVAILABLE" if (reason := version.runner.not_served) else "READY",
                "reason": reason,
            }
            for version in self._versions
            if not (ready and version.runner.not_served)
        ]

    async def unload(self, runner: ModelRunner) -> None:
        """Refuse new requests for a model from now on; return when earlier requests are answered and its memory is
        freed.

        Raises:
            Unavailable: they take too long. A further call continues to wait for them.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(_BUDGET_S):
                    await runner.pause(_UNLOADED)
            except TimeoutError as exc:
                raise Unavailable(
                    f"the model '{runner.model.name}' takes no more requests, and computes earlier ones still: unload "
                    "it once more to have its memory back"
                ) from exc
            if isinstance(runner.model, Loadable):
                await asyncio.to_thread(runner.model.unload)
            log.warning("a model was unloaded: this node takes no tasks", extra={"model": runner.model.name})

    async def load(self, runner: ModelRunner) -> None:
        """Serve a model again; nothing happens to one that is served.

        Raises:
            Unavailable: it does not work; the index says why.
        """
        async with self._turn:
            if not runner.paused:
                return
            try:
                async with asyncio.timeout(_BUDGET_S):
                    if isinstance(runner.model, Loadable):
                        await asyncio.to_thread(runner.model.load)
                    await runner.prove()
            except Exception as exc:  # whatever is wrong with a model, it stays unloaded, and the index says why
                log.exception("a model cannot be loaded", extra={"model": runner.model.name})
                runner.paused = str(exc) if isinstance(exc, TerraceError) else f"it fails: {type(exc).__name__}"
                runner.check_served()
            runner.paused = ""
            log.info("a model was loaded", extra={"model": runner.model.name})
