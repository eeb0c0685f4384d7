"""Changes that operators make to nodes: durable before they count, so that no restart forgets them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Protocol

from scheduler.core import events
from scheduler.core.device import NO_INTENT, Intent, KnownNode
from scheduler.core.fleet import Change, Ledger
from tierkit.errors import Conflict, Forbidden, Unavailable

__all__ = ["Operators"]

_log = logging.getLogger(__name__)

_AT_ONCE = 1000
"""Nodes whose rows are written in one go, so that the event loop is free in between."""
_SAVE_S = 1.0
"""Seconds between two writes of changes that happen by themselves: nodes that come and go."""


class _Store(Protocol):
    async def save(self, changed: Mapping[str, KnownNode | None]) -> None: ...

    async def save_sites(self, changed: Mapping[str, Intent | None]) -> None: ...


class Operators:
    """Drain, remove, trust and forget nodes. One change at a time.

    Args:
        devices: the device list.
        store: where nodes are kept.
        handle: takes what operators want. `node_changed` is called with each change of a node.
    """

    def __init__(self, devices: Ledger, store: _Store, handle: Callable[[events.What], None]) -> None:
        self._devices = devices
        self._store = store
        self._handle = handle
        self._turn = asyncio.Lock()
        self._unsaved: dict[str, None] = {}
        """Nodes whose row in the database is out of date."""
        self._saved_sites = set(devices.sites)
        """Sites that have a row in the database."""
        self._unsaved_sites: set[str] = set()
        """Sites that lack one."""

    def node_changed(self, change: Change) -> None:
        """Something has become of a node."""
        if change.to_save:
            self._unsaved[change.node_id] = None
            site = self._devices.site_of(change.node_id)
            if site is not None and site not in self._saved_sites:
                self._unsaved_sites.add(site)

    async def intend_site(self, site: str, by: str, *, drained: bool = False, removed: bool = False) -> None:
        """Drain or remove the nodes that register for a site from now on.

        Raises:
            NotFound: no such site.
            Unavailable: the database refuses it.
        """
        async with self._turn:
            self._devices.site_intent(site)
            intent = Intent(drained=drained, removed=removed, by=by) if drained or removed else NO_INTENT
            await self._store.save_sites({site: intent})
            self._saved_sites.add(site)
            self._handle(events.SiteIntended(site, intent))
            _log.info("an operator has changed what is wanted with a site", extra={"site": site, **asdict(intent)})

    async def forget_site(self, site: str) -> None:
        """Know nothing of a site any more. Raises NotFound, Unavailable, and Conflict if nodes belong to it."""
        async with self._turn:
            self._devices.site_intent(site)
            if any(True for _ in self._devices.members(site)):
                raise Conflict(f"nodes on the list belong to the site {site!r}")
            await self._store.save_sites({site: None})
            self._saved_sites.discard(site)
            self._handle(events.SiteForgotten(site))

    async def drain(self, node_id: str, by: str) -> None:
        """Give the node no new tasks from now on; those that it has may finish. Raises NotFound, Unavailable."""
        await self._intend(node_id, by, lambda intent: replace(intent, drained=True))

    async def resume(self, node_id: str, by: str) -> None:
        """Take back `drain` and `remove`.

        Raises:
            NotFound: no such node.
            Conflict: the node itself takes no tasks.
            Unavailable: the database refuses it.
        """
        device = self._devices.get(node_id)
        said = device.intent.drained or device.intent.removed
        if device.leaving and device.death is None and not said:
            raise Conflict(
                f"node {node_id!r} takes no tasks by its own word: it shuts down, or a model was unloaded there"
            )
        await self._intend(node_id, by, lambda intent: replace(intent, drained=False, removed=False))

    async def remove(self, node_id: str, by: str) -> None:
        """Take the node off those that work, and keep it off; its tasks go to others. Raises NotFound, Unavailable."""
        await self._intend(node_id, by, lambda intent: replace(intent, removed=True))

    async def trust(self, node_id: str, by: str, trusted: bool | None) -> None:
        """Say whether the node may see pixels; None: as the setting says. Raises NotFound, Unavailable."""
        await self._intend(node_id, by, lambda intent: replace(intent, trusted=trusted))

    async def forget(self, node_id: str, *, trust: bool) -> None:
        """Know nothing of a node any more that is gone, not even that it was removed.

        Args:
            trust: True if what was said of its trust may be forgotten as well.

        Raises:
            NotFound: no such node.
            Forbidden: more was said of it than may be forgotten.
            Conflict: it is not gone, and would be back with its next heartbeat.
            Unavailable: the database refuses it.
        """
        async with self._turn:
            self._check_gone(node_id)
            if not trust and self._devices.get(node_id).intent.trusted is not None:
                raise Forbidden(f"an admin has said whether node {node_id!r} may see pixels: an admin forgets it")
            try:
                await self._store.save({node_id: None})
                self._check_gone(node_id)
            except Conflict:
                self._unsaved[node_id] = None  # it has come back meanwhile: its row belongs there
                raise
            self._handle(events.Forgotten(node_id))

    def _check_gone(self, node_id: str) -> None:
        if self._devices.get(node_id).death is None:
            raise Conflict(f"node {node_id!r} has not ended, and would come back: stop it, or remove it")

    async def _intend(self, node_id: str, by: str, change: Callable[[Intent], Intent]) -> None:
        async with self._turn:
            device = self._devices.get(node_id)
            intent = replace(change(device.intent), by="")
            intent = intent if intent == NO_INTENT else replace(intent, by=by)
            known = KnownNode(registration=device.registration, intent=intent)
            try:
                await self._store.save({node_id: known})
            finally:
                # It may have left or come again meanwhile; and what was refused may be in the database all the same.
                self._unsaved[node_id] = None
            self._handle(events.Intended(node_id, intent))
            _log.info("an operator has changed what is wanted with a node", extra={"node": node_id, **asdict(intent)})

    async def run(self) -> None:
        """Write the nodes that come and go, until cancelled."""
        while True:
            await asyncio.sleep(_SAVE_S)
            await self.flush(_AT_ONCE)

    async def flush(self, most: int | None = None) -> None:
        """Write what has changed by itself, of `most` nodes; what the database refuses is written later."""
        async with self._turn:
            taken = list(itertools.islice(self._unsaved, most))
            for node_id in taken:
                del self._unsaved[node_id]
            new, self._unsaved_sites = self._unsaved_sites, set()
            known = set(self._devices.sites) if new else set()
            # The list has forgotten sites where there were too many.
            changed = dict.fromkeys(self._saved_sites - known) if new else {}
            changed |= {site: self._devices.site_intent(site) for site in new & known}
            try:
                await self._store.save_sites(changed)
                self._saved_sites = (self._saved_sites & known) | (new & known) if new else self._saved_sites
                await self._store.save({node_id: self._devices.known(node_id) for node_id in taken})
            except (Unavailable, asyncio.CancelledError) as exc:
                self._unsaved.update(dict.fromkeys(taken))
                self._unsaved_sites |= new - self._saved_sites
                if not isinstance(exc, Unavailable):
                    raise
