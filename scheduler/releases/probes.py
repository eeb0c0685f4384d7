"""Probe pictures: each network's answers to them are known, so that a node which answers otherwise is found.

A node may hold a file that is not the one it claims, by mistake or by a fault of its disk, memory or runtime. The
scheduler asks for the answers when a node registers with a network, and every ten minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from models.manifest import Manifest, weights_folder
from scheduler.core import events
from scheduler.core.device import Device
from scheduler.core.fleet import Change, Ledger
from scheduler.core.release import differs
from scheduler.releases.computing import OUTPUT, compute, probe_pictures
from scheduler.releases.files import NetworkFiles
from tierkit.errors import TerraceError, UpstreamError
from tierkit.inference.oip_client import InferOptions, OipClient
from tierkit.tensors import Array
from tierkit.wire.oip import InferRequest, RequestedOutput, Tensor

__all__ = ["Prober", "compute_answers", "known_answers"]

_log = logging.getLogger(__name__)

_BUDGET_S = 10.0
_AGAIN_S = 600.0
_AGAIN_FAILED_S = 2.0
_LOOK_S = 1.0
_AT_ONCE = 16
_WAITS = "has not answered the probe pictures yet"


async def known_answers(manifest: Manifest, files: NetworkFiles) -> dict[str, Any]:
    """Return the answers of the networks of a manifest to the probe pictures, by sha256. Answers of the bundled
    networks ship with them; others are computed now.

    Raises:
        InvalidInput, NotFound: see `compute_answers`.
    """
    shipped = await asyncio.to_thread(_shipped)
    if all(entry.sha256 in shipped for entry in manifest.models):
        return {entry.sha256: shipped[entry.sha256] for entry in manifest.models}
    return await compute_answers(manifest, files)


def _shipped() -> dict[str, Any]:
    answers: dict[str, Any] = json.loads((weights_folder() / "probes.json").read_text())
    return answers


async def compute_answers(manifest: Manifest, files: NetworkFiles) -> dict[str, Any]:
    """Return the answers of the networks of a manifest to the probe pictures, by sha256; empty if ONNX Runtime is not
    installed.

    Raises:
        InvalidInput: see `compute`.
        NotFound: a file is not here.
    """
    answers: dict[str, Any] = {}
    for entry in manifest.models:
        found = await compute(manifest, entry, await files.find(entry))
        if found is None:
            return {}
        answers[entry.sha256] = found
    return answers


@dataclass(slots=True)
class _Record:
    """Answers of a process of a node so far."""

    incarnation: str
    right: set[str] = field(default_factory=set)
    """Its networks that have answered rightly, by sha256."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Its networks that have answered wrongly, by sha256, and the reason."""
    next_at: dict[str, float] = field(default_factory=dict)
    """Time at which each is asked again."""
    asking: bool = False


class Prober:
    """Asks nodes for their answers to the probe pictures, and bars networks that answer otherwise from work.

    Args:
        devices: the nodes.
        handle: takes what becomes of that.
        http: to ask with.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        devices: Ledger,
        handle: Callable[[events.What], None],
        http: aiohttp.ClientSession,
        clock: Callable[[], float],
    ) -> None:
        self._devices = devices
        self._handle = handle
        self._client = OipClient(http)
        self._clock = clock
        self._known: dict[str, tuple[Array, Array]] = {}
        """Pictures and answers by sha256."""
        self._records: dict[str, _Record] = {}
        """Records by node id."""
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def learn(self, manifest: Manifest, answers: Mapping[str, Any], *, in_use: bool = False) -> None:
        """Take the known answers of a release's networks.

        Args:
            in_use: nodes work with these networks already. They keep their work until an answer is wrong. If all of
                them waited for the probe at once, tasks would lose their finer answers.
        """
        for entry in manifest.models:
            if entry.sha256 in answers and entry.sha256 not in self._known:
                pictures = probe_pictures(*entry.input_shape[:2])
                self._known[entry.sha256] = pictures, np.asarray(answers[entry.sha256], np.float64)
        if in_use:
            self._wake.set()
            return
        for view in self._devices.present(self._clock()):
            self._bar(view.device)

    def keep_only(self, wanted: set[str]) -> None:
        """Forget the answers of all other networks."""
        self._known = {sha256: known for sha256, known in self._known.items() if sha256 in wanted}

    def knows(self, sha256: str) -> bool:
        return sha256 in self._known

    def node_changed(self, change: Change) -> None:
        """A node has registered, or something has become of it."""
        device = self._devices.find(change.node_id)
        if device is None:
            self._records.pop(change.node_id, None)
        elif change.health is None:
            self._bar(device)

    def _bar(self, device: Device) -> None:
        """Let the networks of a node that has registered wait until they are proven."""
        record = self._records.get(device.node_id)
        if record is None or record.incarnation != device.incarnation:
            record = self._records[device.node_id] = _Record(device.incarnation)
        if not device.takes_tasks:
            return  # it saves bytes, and gets no work
        waiting = {
            sha256: record.wrong.get(sha256, _WAITS)
            for sha256 in self._networks_of(device)
            if sha256 not in record.right
        }
        if waiting:
            self._handle(events.Barred(device.node_id, device.incarnation, waiting))
            self._wake.set()

    def _networks_of(self, device: Device) -> dict[str, str]:
        """The names of a node's networks whose answers are known, by sha256."""
        return {offer.sha256: offer.name for offer in device.registration.models if offer.sha256 in self._known}

    async def run(self) -> None:
        """Ask nodes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._wake.clear()
                now = self._clock()
                for node_id, record in self._records.items():
                    device = self._devices.find(node_id)
                    if device is None or device.incarnation != record.incarnation or record.asking:
                        continue
                    if device.death is not None or not device.takes_tasks:
                        continue
                    due = {s: n for s, n in self._networks_of(device).items() if record.next_at.get(s, 0.0) <= now}
                    if due:
                        record.asking = True
                        group.create_task(self._ask(device, record, due), name=f"probe pictures for {node_id}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()

    async def _ask(self, device: Device, record: _Record, networks: Mapping[str, str]) -> None:
        """Ask a node for the answers of these networks, which are named by sha256."""
        try:
            async with self._slots:
                for sha256, name in networks.items():
                    await self._prove(device, record, name, sha256)
        finally:
            record.asking = False
            self._wake.set()

    async def _prove(self, device: Device, record: _Record, name: str, sha256: str) -> None:
        try:
            why = await self._trouble(device, name, sha256)
        except TerraceError as exc:
            _log.debug("%s was not asked for probe pictures: %s", device.node_id, exc)
            record.next_at[sha256] = self._clock() + _AGAIN_FAILED_S
            return  # what it had counts on
        if why:
            if record.wrong.get(sha256) != why:
                _log.error("%s gets no work for %s: %s", device.node_id, name, why)
            record.right.discard(sha256)
            record.wrong[sha256] = why
            record.next_at[sha256] = self._clock() + _AGAIN_FAILED_S
        else:
            record.wrong.pop(sha256, None)
            record.right.add(sha256)
            record.next_at[sha256] = self._clock() + _AGAIN_S * random.uniform(0.8, 1.2)
        now = self._devices.find(device.node_id)
        if now is not None and now.incarnation == record.incarnation:
            unproven = (s for s in self._networks_of(now) if s in record.wrong or s in now.barred.keys() - record.right)
            barred = {s: record.wrong.get(s, _WAITS) for s in unproven}
            if barred != now.barred:
                self._handle(events.Barred(device.node_id, device.incarnation, barred))

    async def _trouble(self, device: Device, name: str, sha256: str) -> str:
        """Reason why a network of a node is another one than it claims; "" if it is right, or cannot be asked.

        Raises:
            TerraceError: there was no answer.
        """
        pictures, known = self._known[sha256]
        request = InferRequest(
            inputs=(Tensor(name="images", data=pictures),),
            outputs=(RequestedOutput(name=OUTPUT),),
        )
        options = InferOptions(sha256=sha256, budget_s=_BUDGET_S, token=device.registration.key)
        try:
            response = await self._client.infer(device.registration.url, name, request, options)
        except UpstreamError as exc:
            if exc.status_code in (400, 401, 403, 404, 405, 501):
                return ""  # it offers no way to ask it
            if exc.status_code is not None:
                raise
            return str(exc)
        found = response.output(OUTPUT)
        assert found is not None, "the client checks that"
        return differs(np.asarray(found, np.float64), known)
