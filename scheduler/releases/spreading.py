"""Copies of networks: which node gets the file of a network from which other node, and what the scheduler sends itself.

The rule is the tree of `tierkit.copies`, with the scheduler as its host. Nodes of different sites do not copy from each
other, nor does a node with limited addresses (`allowed_upstreams`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from models.manifest import WeightsFile
from scheduler.core.device import Device
from scheduler.core.fleet import Change, Ledger
from scheduler.metrics import NETWORK_BYTES
from tierkit.copies.files import CHUNK_BYTES, FileParts, sha256_of
from tierkit.copies.tree import Came, Event, Failed, Got, Left, Passed, Tree
from tierkit.errors import Conflict
from tierkit.wire.copies import MOST_CHUNKS, CopyAnswer, CopyReport

__all__ = ["Spreading", "chunk_bytes_of"]

_log = logging.getLogger(__name__)

_TICK_S = 1.0
_MOST_AT_ONCE = 500
"""Most nodes of a fleet that seeks sources at each event. A larger fleet seeks them at intervals."""
_LEAST_PAUSE_S, _PAUSE_OF_ONE_S = 0.1, 5e-5
_WAIT_S = 10.0
"""Longest wait of a node that has no source yet, in seconds."""
_MOST_WAITING = 64
"""Requests that are kept waiting; the others are answered at once: each holds a connection."""
_MOST_PARTS = 64
"""Files whose chunks are remembered."""
_MOST_GONE = 2
"""Nodes in a row that could not reach a source, after which no node is sent there."""
_LEAST_TURN_S, _TURN_BYTES_PER_S = 5.0, 1e7
_HURRIES_S = 5.0


def _tree(size: Callable[[int], int]) -> Tree:
    """The tree along which files of these sizes spread. A node leaves it as soon as it is off the device list."""
    tree = Tree(
        silent_s=math.inf,
        turn_s=lambda file: _LEAST_TURN_S + size(file) / _TURN_BYTES_PER_S,
        hurries_s=_HURRIES_S,
    )
    tree.spares_host = True
    return tree


@dataclass(slots=True)
class _Node:
    incarnation: str
    url: str
    failures: set[str] = field(default_factory=set)
    """Nodes that could not copy from it, since one last could."""


class Spreading:
    """Lives as long as the scheduler leads; nodes tell a new one again what they have.

    Args:
        devices: the fleet.
        file: the file of a network in a release, by name and sha256.
        find: its path.
        secret: of the scheduler; the keys of copies come from it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        devices: Ledger,
        file: Callable[[str, str], WeightsFile],
        find: Callable[[WeightsFile], Awaitable[Path]],
        secret: bytes,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._devices, self._file, self._find, self._secret, self._clock = devices, file, find, secret, clock
        self._files: list[WeightsFile] = []
        """Files by their numbers in the tree."""
        self._numbers: dict[str, int] = {}
        self._parts: dict[int, FileParts] = {}
        self._reading = asyncio.Lock()
        self._tree = _tree(lambda number: self._files[number].size_bytes)
        self._nodes: dict[str, _Node] = {}
        self._waiting = 0
        self._due = False
        """True if something has happened since a source was last sought."""
        self._changed = asyncio.Event()

    async def told(self, node_id: str, report: CopyReport) -> CopyAnswer:
        """Take in how far a node is, and tell it from whom to copy, once there is someone, or after some seconds.

        Raises:
            NotFound: the node is not on the list; or no release has the file.
            Conflict: another process has the node's id.
        """
        device = self._devices.get(node_id)
        if device.incarnation != report.incarnation:
            raise Conflict(f"another process is {node_id!r} now")
        number = self._number(report)
        node = self._nodes.get(node_id)
        if node is None or node.incarnation != device.incarnation or node.url != device.registration.url:
            node = self._nodes[node_id] = _Node(device.incarnation, device.registration.url)
        self._take(device, report, number)
        if not (report.got or report.ended):
            await self._assigned(node_id, wait=report.waits)
        copy = self._tree.copy_of(node_id)
        answer = CopyAnswer(
            key=self._key(_group(device)),
            go=copy is not None,
            source=None if copy is None else self._url(copy.source),
        )
        if report.plan:
            parts = await self._parts_of(number)
            plan = {"bytes": parts.bytes, "chunk_bytes": parts.chunk_bytes, "chunks": parts.chunks}
            answer = answer.model_copy(update=plan)
        return answer

    def node_changed(self, change: Change) -> None:
        """A node has registered, or something has become of it: one that is gone sends nothing any more."""
        known = self._nodes.get(change.node_id)
        if known is None:
            return
        device = self._devices.find(change.node_id)
        gone = device is None or device.left or (change.health is not None and change.health.gone)
        if device is None or gone or device.incarnation != known.incarnation:
            del self._nodes[change.node_id]
            self._on(Left(worker=change.node_id))

    async def run(self) -> None:
        """Notice who is silent, and whose copies take long, until cancelled."""
        looked = 0.0
        while True:
            pause_s = max(_LEAST_PAUSE_S, len(self._nodes) * _PAUSE_OF_ONE_S)
            await asyncio.sleep(pause_s if self._tree.collects else _TICK_S)
            if self._nodes and (self._due or self._clock() - looked >= _TICK_S):
                self._due, looked = False, self._clock()
                self._on(Passed())

    def _number(self, report: CopyReport) -> int:
        number = self._numbers.get(report.sha256)
        if number is None:
            file = self._file(report.name, report.sha256)
            number = self._numbers[report.sha256] = len(self._files)
            self._files.append(file)
        return number

    def _take(self, device: Device, report: CopyReport, number: int) -> None:
        name, copy = device.node_id, self._tree.copy_of(device.node_id)
        if report.failed is not None and copy is not None and self._url(copy.source) == report.failed_source:
            self._failed(name, copy.source, report)
        if report.got and copy is not None and copy.file == number:
            if copy.source in self._nodes:
                self._nodes[copy.source].failures.clear()
            NETWORK_BYTES.labels("nodes").inc(min(report.bytes_from_nodes, self._files[number].size_bytes))
            self._on(Got(worker=name, file=number, bytes_per_s=report.bytes_per_s))
        holds = {self._numbers[each] for each in report.holds if each in self._numbers}
        self._on(
            Came(
                worker=name,
                serves=device.takes_tasks and len(self._nodes[name].failures) < _MOST_GONE,
                wanted=frozenset() if report.got or report.ended else frozenset({number}),
                holds=frozenset(holds | {number} if report.got else holds),
                group=_group(device),
            )
        )

    def _failed(self, name: str, source: str, report: CopyReport) -> None:
        assert report.failed is not None
        # A cache may be cleared: a node that lacks a file has not lied about its content.
        reason: Literal["wrong", "gone"] = "wrong" if report.failed == "wrong" else "gone"
        trusted = self._tree.trusts(source)
        self._on(Failed(worker=name, reason=reason))
        if trusted and not self._tree.trusts(source):
            _log.warning("%s says that %s sent wrong bytes of a network: it sends no more", name, source)
        if reason == "gone" and source in self._nodes:
            self._nodes[source].failures.add(name)
            if len(self._nodes[source].failures) == _MOST_GONE:
                _log.info("no node is sent to %s for networks any more: it cannot be reached from others", source)
                self._on(Left(worker=source))  # until it reports again, and then it serves no others

    def _url(self, source: str) -> str | None:
        return self._nodes[source].url if source in self._nodes else None

    async def _assigned(self, name: str, *, wait: bool) -> None:
        """Return when the node has a source, or must not wait any longer."""
        if not wait or self._tree.copy_of(name) is not None or self._waiting >= _MOST_WAITING:
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(_WAIT_S):
                while name in self._tree and self._tree.copy_of(name) is None:
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    async def _parts_of(self, number: int) -> FileParts:
        """The chunks of a file, which is read once."""
        async with self._reading:
            if number not in self._parts:
                path = await self._find(self._files[number])
                self._parts[number] = await asyncio.to_thread(_parts, path, self._files[number].sha256)
                if len(self._parts) > _MOST_PARTS:
                    del self._parts[next(iter(self._parts))]
            return self._parts[number]

    def _key(self, group: str) -> str:
        """Known to the nodes that may copy from each other. It opens files of networks and nothing else."""
        digest = hmac.digest(self._secret, b"copies of networks\n" + group.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")

    def _on(self, event: Event) -> None:
        self._tree.collects = len(self._nodes) > _MOST_AT_ONCE
        effects = self._tree.on(event, self._clock())
        self._due |= bool(effects) or not isinstance(event, Passed)
        if effects:
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()


def chunk_bytes_of(size: int) -> int:
    """The size of the chunks of such a file."""
    chunk_bytes = CHUNK_BYTES
    while size > chunk_bytes * MOST_CHUNKS:
        chunk_bytes *= 2
    return chunk_bytes


def _parts(path: Path, sha256: str) -> FileParts:
    """The chunks of a file. Reads it."""
    size = path.stat().st_size
    chunk_bytes = chunk_bytes_of(size)
    with path.open("rb") as file:
        chunks = tuple(sha256_of(chunk) for chunk in iter(lambda: file.read(chunk_bytes), b""))
    return FileParts(sha256=sha256, bytes=size, chunk_bytes=chunk_bytes, chunks=chunks)


def _group(device: Device) -> str:
    """Nodes of a group may copy from each other: all of a site, and all without a site."""
    return f"{device.site}\n{device.node_id}" if device.registration.allowed_upstreams else device.site
