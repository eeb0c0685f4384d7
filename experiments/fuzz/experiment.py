"""`terrace experiment fuzz`: changed and broken requests, beside a client that checks the answers to its own.

The requests are drawn from the seed, so that a request that did harm can be made again (`mutations.make`). A service
that dies ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from experiments.fuzz.corpus import corpus
from experiments.fuzz.mutations import Delivery, Mutant, make
from experiments.harness import Experiment, Options, Record, Run, Table, option
from experiments.peers.processes import peak_bytes
from models.data import read_sample
from models.manifest import load_manifest
from tierkit.errors import ServiceFailed
from tierkit.fleet import Fleet

__all__ = ["FUZZ"]

_CONNECTIONS = 64
_NODES = {"end": 1, "edge": 1, "cloud": 0}
_ANSWER_S = 2.0
"""When a client stops waiting for an answer."""
_HALF_S = 0.05
_MOST_BYTES = 64 * 1024
"""Of an answer, that are read before its connection is closed."""
_KEPT = 50
"""Requests that did harm, that the record holds."""
_TROUBLE = ("Traceback (most recent call last)", "Task was destroyed", "unexpected error")
"""What no service says unless something in it is broken."""
_HONEST = (501, 503, 504)
"""Statuses above 499 that a service gives on purpose: no such method or coding, busy, too late."""


class Chosen(Options):
    """How much is sent."""

    requests: int = option(1_000_000, "Number of requests.", quick=20_000, min=1, max=1_000_000_000)


@asynccontextmanager
async def _bystander(urls: Mapping[str, str]) -> AsyncIterator[Any]:
    """An honest client at work; yields a function that ends it and tells what it has seen."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "experiments.fuzz.bystander"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def ended() -> dict[str, Any]:
        stdin.close()
        return dict(json.loads(await stdout.readline() or b"{}"))

    try:
        stdin.write(json.dumps(urls).encode() + b"\n")
        await stdout.readline()
        yield ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _Fuzzer:
    """Sends the requests of a run over a fixed number of connections."""

    def __init__(self, run: Run, fleet: Fleet, urls: Mapping[str, str], requests: int) -> None:
        self.done = 0
        self.by_status: Counter[str] = Counter()
        """`none`: no answer was waited for, or none came."""
        self.by_delivery: Counter[str] = Counter()
        self._run = run
        self._fleet = fleet
        self._addresses = {name: (urlsplit(url).hostname, urlsplit(url).port) for name, url in urls.items()}
        self._templates = corpus(load_manifest(), read_sample().images[:3])
        self._numbers = iter(range(requests))
        self._kept = 0

    def dead(self) -> list[str]:
        return [name for name, service in self._fleet.services.items() if not service.alive]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(_CONNECTIONS):
                group.create_task(self._client(), name=f"client {number}")

    async def _client(self) -> None:
        """One connection to each service at a time, kept as long as the service keeps it."""
        connections: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        try:
            for number in self._numbers:
                mutant = make(self._templates, self._run.request.seed, number)
                status = await self._send(mutant, connections)
                self.done += 1
                self.by_status[str(status or "none")] += 1
                self.by_delivery[mutant.delivery] += 1
                if status >= 500 and status not in _HONEST and self._kept < _KEPT:
                    self._kept += 1
                    head = mutant.content[:2000].decode("latin-1")
                    self._run.add(what="harm", number=number, service=mutant.service, status=status, request=head)
                if number % 200 == 0 and self.dead():
                    self._numbers = iter(())
        finally:
            for _, writer in connections.values():
                writer.transport.abort()

    async def _send(
        self, mutant: Mutant, connections: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    ) -> int:
        """Send one request; the status of its answer, 0 for none."""
        reader, writer = connections.pop(mutant.service, (None, None))
        status, reusable = 0, False
        try:
            if reader is None or writer is None:
                reader, writer = await asyncio.open_connection(*self._addresses[mutant.service])
            content = mutant.content
            async with asyncio.timeout(_HALF_S if mutant.delivery is Delivery.HALF else _ANSWER_S):
                match mutant.delivery:
                    case Delivery.HALF:
                        content = content[: len(content) // 2]
                    case Delivery.TWICE:
                        content *= 2
                    case Delivery.PIECES:
                        writer.write(content[:40])
                        await asyncio.sleep(0)
                        content = content[40:]
                writer.write(content)
                if mutant.delivery is not Delivery.RESET:
                    await writer.drain()
                    status, reusable = await _answer(reader, mutant.method)
        except (OSError, EOFError, TimeoutError, ValueError):
            reusable = False
        if writer is not None and reader is not None:
            if reusable and mutant.delivery is Delivery.WHOLE:
                connections[mutant.service] = reader, writer
            else:
                writer.transport.abort()
        return status


async def _answer(reader: asyncio.StreamReader, method: str) -> tuple[int, bool]:
    """The status of an answer, and whether another request may follow it on this connection.

    Raises:
        EOFError: the connection was closed before.
        ValueError: it is no HTTP.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as exc:
        raise ValueError("no end of a head") from exc
    first, *lines = head.split(b"\r\n")
    status = int(first.split(b" ", 2)[1])
    if status < 200:  # go on: the answer is still to come
        return await _answer(reader, method)
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    reusable = fields.get(b"connection", b"").lower() != b"close"
    if method == "HEAD" or status in (204, 304):
        return status, reusable
    length = fields.get(b"content-length", b"")
    if length.isdigit() and int(length) <= _MOST_BYTES:
        await reader.readexactly(int(length))
        return status, reusable
    await reader.read(_MOST_BYTES)
    return status, False


class Fuzz(Experiment):
    """What requests that no honest client sends do to a fleet and its other clients."""

    name = "fuzz"
    options = Chosen
    ignores = frozenset({"tasks", "data"})
    quick = "{requests:,} requests"
    profile = "native"
    one_row = True

    async def measure(self, run: Run, chosen: Chosen) -> None:
        requests = chosen.requests
        run.takes(1)
        profile = run.profile.with_nodes(**_NODES)
        run.config |= {"requests": requests, "connections": _CONNECTIONS, "nodes": _NODES}
        run.expect(1)
        trouble: Counter[str] = Counter()

        def watch(name: str, line: str) -> None:
            trouble.update(f"{name}: {text}" for text in _TROUBLE if text in line)

        networks = await run.networks(profile)
        async with (
            run.fleet(profile, networks, {"window": 4}, expects_exits=True, watch=watch) as (fleet, _),
            _bystander(urls := {service.plan.kind: service.url for service in fleet.services.values()}) as ended,
        ):
            fuzzer = _Fuzzer(run, fleet, urls, requests)
            began = time.monotonic()
            try:
                with run.step(f"{requests:,} requests"):
                    await fuzzer.run()
            finally:
                seen = await ended()
                run.add(
                    what="fuzz",
                    requests=fuzzer.done,
                    by_status=dict(sorted(fuzzer.by_status.items())),
                    by_delivery=dict(sorted(fuzzer.by_delivery.items())),
                    crashes=len(fuzzer.dead()),
                    seconds=round(time.monotonic() - began, 1),
                    trouble=dict(trouble),
                    peak_mib={
                        name: round(peak_bytes(service.process.pid) / 2**20)
                        for name, service in fleet.services.items()
                        if service.alive
                    },
                    bystander=seen,
                )
            if dead := fuzzer.dead():
                raise ServiceFailed(f"{', '.join(dead)} died after {fuzzer.done:,} requests")

    def rows(self, record: Record) -> list[dict[str, Any]]:
        point = next((point for point in record["points"] if point["what"] == "fuzz"), None)
        if point is None:  # stopped while the fleet was starting
            return []
        statuses: Mapping[str, int] = point["by_status"]
        bystander = point["bystander"]
        return [
            {
                "requests": point["requests"],
                "by_status": statuses,
                "crashes": point["crashes"],
                "server_errors": sum(
                    count for status, count in statuses.items() if status.startswith("5") and int(status) not in _HONEST
                ),
                "slowest_health_check_s": round(bystander.get("slowest_health_check_s", 0.0), 3),
                "failed_health_checks": bystander.get("failed_health_checks"),
                "health_checks": bystander.get("health_checks"),
                "answers_checked": bystander.get("answers"),
                "answers_wrong": bystander.get("wrong_answers"),
                "answers_missing": bystander.get("missing_answers"),
                "refusals": bystander.get("refusals"),
                "trouble": point["trouble"],
                "peak_mib": point["peak_mib"],
                "seconds": point["seconds"],
            }
        ]

    def table(self, record: Record) -> Table:
        if not (rows := self.rows(record)):
            return Table(headings=" | counted", rows=[])
        (row,) = rows
        shown = {
            "requests": f"{row['requests']:,} in {row['seconds']:,.0f} s",
            "of each status": ", ".join(f"{status} {count:,}" for status, count in row["by_status"].items()),
            "services that died": str(row["crashes"]),
            "internal errors (5xx but 501, 503, 504)": f"{row['server_errors']:,}",
            "slowest health check": f"{row['slowest_health_check_s']:.3f} s (n = {row['health_checks']:,})",
            "health checks without an answer": str(row["failed_health_checks"]),
            "another client's answers: wrong, missing": (
                f"{row['answers_wrong']}, {row['answers_missing']} of {row['answers_checked']:,}"
            ),
            "largest memory": ", ".join(f"{name} {mib} MiB" for name, mib in row["peak_mib"].items()),
        }
        return Table(headings=" | counted", rows=list(shown.items()))


FUZZ = Fuzz()
