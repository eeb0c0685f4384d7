"""The personal head of a node: found, checked, loaded and let go while the node serves.

A worker trains the head (`terrace train work --personal`) and may replace or delete it at any time.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from end_node.node import EndNode
from models.personal import HeadMark, load_head, mark_of
from models.session import OnnxModel
from tierkit.errors import SetupError, TerraceError
from tierkit.inference.background import in_background
from tierkit.inference.versions import Version

__all__ = ["PersonalHead"]

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two looks at the folder. A look costs two calls of `stat`."""
_MOST_SAID = 500


class PersonalHead:
    """Holds the personal head of the network that a node serves, if there is one.

    A new head is used once it has proved that it works. Until then, and if it is damaged, the one before stays in use.

    Args:
        node: it computes the answers.
        kept: folder of the kept sample.
    """

    def __init__(self, node: EndNode, kept: Path) -> None:
        self._node = node
        self._kept = kept
        self._base = ""
        """sha256 of the network whose head this is."""
        self._version: Version | None = None
        self._leaving: list[Version] = []
        """Heads that are not used any more, to be unloaded."""
        self._seen: tuple[str, HeadMark | None] | None = None
        self.reason = ""
        """Reason why the newest head is not used."""

    @property
    def in_use(self) -> bool:
        """True if a head answers now."""
        return self._version is not None

    def version_for(self, network: Version) -> Version | None:
        """The version that answers for a network of a release; None if that has no head."""
        return self._version if network.key.sha256 == self._base else None

    def set_aside(self, version: Version, why: str) -> None:
        """Use a version no more, until there is another head. Other versions stay."""
        if version is self._version:
            self._fail(why)
            self._drop()

    async def run(self) -> None:
        """Follow the folder and the releases of the node, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Use what is in the folder now."""
        network = self._node.version_of(self._node.usable_releases[0])
        mark = await asyncio.to_thread(mark_of, self._kept, network.key.sha256)
        if (seen := (network.key.sha256, mark)) != self._seen:
            self._seen = seen
            if mark is None or network.key.sha256 != self._base:
                self._drop()
                self.reason = ""
            if mark is not None:
                await self._take(network)
        while self._leaving:
            await self._node.end_hidden(self._leaving[-1])
            self._leaving.pop()

    async def close(self) -> None:
        """Unload the head."""
        self._drop()
        for version in self._leaving:
            await self._node.end_hidden(version)
        self._leaving.clear()

    async def _take(self, network: Version) -> None:
        """Load the head of a network, and use it if it works."""
        try:
            model = network.runner.model
            if not isinstance(model, OnnxModel):
                raise SetupError(f"the network {model.name!r} is not computed by ONNX Runtime here")
            version = await self._node.run_hidden(await in_background(lambda: load_head(self._kept, model)))
        except Exception as exc:  # a broken head must not disturb the node
            self._fail(str(exc) or type(exc).__name__)
            if not isinstance(exc, TerraceError):
                log.error("a personal head cannot be loaded", exc_info=exc)
            return
        self._drop()
        self._base, self._version, self.reason = network.key.sha256, version, ""
        log.info("a personal head answers the pictures of sources", extra={"sha256": version.key.sha256})

    def _drop(self) -> None:
        if self._version is not None:
            self._leaving.append(self._version)
            log.info("a personal head is not used any more", extra={"sha256": self._version.key.sha256})
        self._base, self._version = "", None

    def _fail(self, why: str) -> None:
        self.reason = why[:_MOST_SAID]
        log.warning("the newest personal head is not used: %s", self.reason)
