"""Virtual devices in a second process: each sends the answers of one source in batches over a connection that it keeps.

They write HTTP by hand, so that the load takes little of the machine. A batch looks like one of an end node:
compressed, with the state of the device.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import multiprocessing
import random
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe

from experiments.bench.load import loop_factory
from models.manifest import load_manifest
from tierkit.types import Tier
from tierkit.wire.messages import ModelOffer, Registration
from tierkit.wire.observations import (
    DeviceStatus,
    LocalAnswer,
    Observation,
    ObservationBatch,
    ReportedSource,
    read_receipt,
    write_batch,
)

__all__ = ["SOURCE", "DeviceFleet", "SendingPlan", "SentBatches", "device_fleet", "device_name"]

SOURCE = "gate"
_INCARNATION = "0123456789abcdef"
_LEASE_S = 90.0
_BEAT_S = 30.0
_AGAIN_S, _LIMIT_S = 0.2, 60.0
_AT_ONCE = 20
"""Devices that register at a time."""
_BEAT = json.dumps({"incarnation": _INCARNATION, "in_flight": 0, "queued_images": 0, "images_done": 0}).encode()
_STATUS = re.compile(rb"^HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class SendingPlan:
    """Rate, size and duration of a load."""

    host: str
    port: int
    count: int
    rate: float
    """Pictures a second of each device."""
    interval_s: float
    """Seconds between two batches of a device."""
    seconds: float
    probe_s: float | None = None
    """Seconds between two heartbeats of one device whose delays are measured; None to skip this measurement."""


@dataclass(kw_only=True)
class SentBatches:
    """Observations of a load, and the answers to their batches."""

    observations: int = 0
    stored: int = 0
    known: int = 0
    failures: int = 0
    """Requests that were not answered with 200; their batches were sent again."""
    first_failure: str = ""
    body_bytes: int = 0
    wire_bytes: int = 0
    """Requests and answers, with headers."""
    post_ms: list[float] = field(default_factory=list)
    beat_ms: list[float] = field(default_factory=list)


def device_name(number: int) -> str:
    """Node id of a device."""
    return f"camera-{number:05}"


class _HttpFailed(Exception):
    """A request was answered with another status than 2xx."""


class _Wire:
    """A kept connection of HTTP/1.1."""

    def __init__(self, plan: SendingPlan) -> None:
        self._plan = plan
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def until_taken(self, target: str, body: bytes, sent: SentBatches, *, packed: bool = False) -> bytes:
        """POST again and again, until it is taken; returns the body of the answer. Raises the last error when the time
        is over."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            try:
                return await self._ask(target, body, sent, packed)
            except (OSError, asyncio.IncompleteReadError, _HttpFailed) as exc:
                self.close()
                sent.failures += 1
                sent.first_failure = sent.first_failure or f"{target}: {exc}"
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_AGAIN_S)

    async def _ask(self, target: str, body: bytes, sent: SentBatches, packed: bool) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._plan.host, self._plan.port)
        reader, writer = self._streams
        coding = "Content-Encoding: gzip\r\n" if packed else ""
        head = (
            f"POST {target} HTTP/1.1\r\nHost: {self._plan.host}:{self._plan.port}\r\nContent-Type: application/json\r\n"
            f"{coding}Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(answer)
        said = await reader.readexactly(0 if length is None else int(length[1]))
        sent.wire_bytes += len(head) + len(body) + len(answer) + len(said)
        status = _STATUS.match(answer)
        if status is None or status[1][:1] != b"2":
            raise _HttpFailed(f"{answer.splitlines()[0].decode()}: {said[:200].decode(errors='replace')}")
        return said

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class _VirtualDevice:
    """A device with one source."""

    def __init__(self, number: int, plan: SendingPlan) -> None:
        self.node_id = device_name(number)
        self._wire = _Wire(plan)
        self._spool = f"{number:016x}"
        self._chance = random.Random(number)
        self._next = 1
        """Sequence number."""
        network = load_manifest().default_for(Tier.END)
        self._answer = LocalAnswer(model=network.name, sha256=network.sha256, label=0, confidence=0.5)
        self._classes = len(load_manifest().hierarchy.coarse)

    def _registration(self) -> bytes:
        offer = ModelOffer(name=self._answer.model, sha256=self._answer.sha256, ms_per_image=1.0)
        registration = Registration(
            node_id=self.node_id,
            incarnation=_INCARNATION,
            tier=Tier.END,
            url="http://127.0.0.1:9",
            models=(offer,),
            version="0",
            spool=self._spool,
            lease_s=_LEASE_S,
        )
        return registration.model_dump_json().encode()

    def _batch(self, taken: list[float], now: float) -> bytes:
        """A compressed batch, with pictures that were taken at these times."""
        chance, wall = self._chance, time.time()
        observations = tuple(
            Observation(
                source=SOURCE,
                sequence=self._next + place,
                age_s=now - at,
                taken_at=wall - (now - at),
                local=LocalAnswer(
                    model=self._answer.model,
                    sha256=self._answer.sha256,
                    label=chance.randrange(self._classes),
                    confidence=chance.random(),
                ),
            )
            for place, at in enumerate(taken)
        )
        status = DeviceStatus(
            sources=(ReportedSource(name=SOURCE, state="running"),),
            spool_bytes=len(taken) * 280,
            spool_size_bytes=200_000_000,
            spent_bytes=1_234_567,
        )
        batch = ObservationBatch(
            node_id=self.node_id,
            incarnation=_INCARNATION,
            spool=self._spool,
            observations=observations,
            device=status,
        )
        return gzip.compress(write_batch(batch), compresslevel=6, mtime=0)

    async def join(self, sent: SentBatches) -> None:
        """Register."""
        await self._wire.until_taken("/v1/devices", self._registration(), sent)

    async def run(self, plan: SendingPlan, sent: SentBatches, began: float, phase: float) -> None:
        """Send batches until the time is over and all have been accepted."""
        pictures = max(1, round(plan.rate * plan.interval_s))
        due, beat_at = began + phase * plan.interval_s, began + phase * _BEAT_S
        while due < began + plan.seconds:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            body = self._batch([due - place / plan.rate for place in reversed(range(pictures))], max(now, due))
            asked = time.perf_counter()
            said = await self._wire.until_taken("/v1/observations", body, sent, packed=True)
            sent.post_ms.append(1000 * (time.perf_counter() - asked))
            receipt = read_receipt(said)
            sent.stored, sent.known = sent.stored + receipt.stored, sent.known + receipt.known
            sent.observations += pictures
            sent.body_bytes += len(body)
            self._next += pictures
            due += plan.interval_s
            if time.monotonic() >= beat_at:
                beat_at += _BEAT_S
                await self._beat(sent)

    async def probe(self, plan: SendingPlan, sent: SentBatches, began: float) -> None:
        """Send heartbeats, and note how long each takes."""
        assert plan.probe_s is not None
        while time.monotonic() < began + plan.seconds:
            asked = time.perf_counter()
            await self._beat(sent)
            sent.beat_ms.append(1000 * (time.perf_counter() - asked))
            await asyncio.sleep(plan.probe_s)

    async def _beat(self, sent: SentBatches) -> None:
        await self._wire.until_taken(f"/v1/devices/{self.node_id}/heartbeat", _BEAT, sent)


async def _join(devices: list[_VirtualDevice]) -> SentBatches:
    sent, few = SentBatches(), asyncio.Semaphore(_AT_ONCE)

    async def join(device: _VirtualDevice) -> None:
        async with few:
            await device.join(sent)

    async with asyncio.TaskGroup() as group:
        for device in devices:
            group.create_task(join(device))
    return sent


async def _send(devices: list[_VirtualDevice], plan: SendingPlan) -> SentBatches:
    sent, began = SentBatches(), time.monotonic() + _AGAIN_S
    prober, *others = devices
    async with asyncio.TaskGroup() as group:
        if plan.probe_s is not None:
            group.create_task(prober.probe(plan, sent, began))
        for number, device in enumerate(others):
            group.create_task(device.run(plan, sent, began, number / len(others)))
    return sent


def _serve(pipe: Pipe) -> None:
    """The second process: takes plans, and answers each with what was sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process
    devices: list[_VirtualDevice] = []
    with suppress(EOFError), asyncio.Runner(loop_factory=loop_factory()) as runner:
        while True:
            joins, plan = pipe.recv()
            try:
                if joins:
                    devices = [_VirtualDevice(number, plan) for number in range(plan.count + 1)]
                pipe.send(runner.run(_join(devices) if joins else _send(devices, plan)))
            except BaseExceptionGroup as exc:
                pipe.send(RuntimeError(f"a device gave up: {exc.exceptions[0]!r}"))


class DeviceFleet:
    """The devices. They continue their sequence numbers from one plan to the next."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    async def join(self, plan: SendingPlan) -> None:
        """Register new devices, and one that only probes. Raises RuntimeError if a device gave up."""
        await self._ask(True, plan)

    async def send(self, plan: SendingPlan) -> SentBatches:
        """Send what a plan says, from the devices that have joined. Raises RuntimeError if a device gave up."""
        return await self._ask(False, plan)

    async def _ask(self, joins: bool, plan: SendingPlan) -> SentBatches:
        self._pipe.send((joins, plan))
        answer: SentBatches | Exception = await asyncio.to_thread(self._pipe.recv)
        if isinstance(answer, Exception):
            raise answer
        return answer


@asynccontextmanager
async def device_fleet() -> AsyncIterator[DeviceFleet]:
    """Devices in a second process."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield DeviceFleet(ours)
    finally:
        process.terminate()
        process.join()
