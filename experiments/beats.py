"""How many heartbeats a second one scheduler takes, and what each costs it.

    terrace experiment beats --nodes 100 --nodes 1000 --repeats 3

The scheduler is a process of its own, on a core of its own. So many end devices are registered, each with its own
connection, as real ones have; they beat in turn, 16 at a time, each as soon as the scheduler has answered. So its core
is full, and the rate is what one core can do; no pause lets its code leave the processor's caches, as between the
heartbeats of a small fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.bench.http import Connection, Origin, encode_http
from experiments.peers.processes import ServerProcesses, check_cores, on_core, serving
from experiments.record import RunRecord, made_folder, spread
from tierkit.commandline import Json
from tierkit.errors import ServiceFailed
from tierkit.types import Tier
from tierkit.wire.messages import Heartbeat, ModelOffer, Registration

__all__ = ["run"]

_AT_A_TIME = 16
_SPARE_CONNECTIONS = 64
_ANSWER_S = 10.0
_JSON = {"Content-Type": "application/json"}
_INCARNATION = "12345678"
_TIMES = ("--heartbeat-s", "2", "--suspect-s", "5", "--lease-s", "30")
"""As a large fleet has them: no node is suspect while the others register."""


async def _ask(connection: Connection, question: bytes, status: int) -> None:
    reply = await connection.request(question, timeout_s=_ANSWER_S)
    if reply.status != status:
        raise ServiceFailed(f"the scheduler answered {reply.status} where {status} was expected: {reply.body[:200]!r}")


def _registration(node_id: str) -> bytes:
    offer = ModelOffer(name="null", sha256="0" * 64, ms_per_image=1.0)
    registration = Registration(
        node_id=node_id,
        incarnation=_INCARNATION,
        tier=Tier.END,
        url="http://127.0.0.1:9",
        models=(offer,),
        version="0",
    )
    return registration.model_dump_json().encode()


async def _measure(url: str, server: ServerProcesses, nodes: int, seconds: float) -> tuple[float, float]:
    """Heartbeats a second, and milliseconds of the scheduler's processor time for each."""
    origin = Origin.parse(url)
    beat = Heartbeat(incarnation=_INCARNATION, in_flight=0, queued_images=0, images_done=0).model_dump_json().encode()
    async with contextlib.AsyncExitStack() as stack:
        ways: list[tuple[Connection, bytes]] = []
        for number in range(nodes):
            node_id = f"end-{number}"
            connection = await stack.enter_async_context(Connection(origin))
            await _ask(connection, encode_http("POST", origin, "/v1/devices", _JSON, _registration(node_id)), 200)
            ways.append((connection, encode_http("POST", origin, f"/v1/devices/{node_id}/heartbeat", _JSON, beat)))

        async def beat_until(end: float, mine: Sequence[tuple[Connection, bytes]]) -> int:
            count = 0
            while time.perf_counter() < end:
                for connection, question in mine:
                    await _ask(connection, question, 204)
                    count += 1
            return count

        begun, cpu_begun = time.perf_counter(), server.cpu_s()
        counts = await asyncio.gather(
            *(beat_until(begun + seconds, ways[first::_AT_A_TIME]) for first in range(min(_AT_A_TIME, nodes)))
        )
        spent, cpu = time.perf_counter() - begun, server.cpu_s() - cpu_begun
    return sum(counts) / spent, 1000 * cpu / sum(counts)


def run(
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, max=10_000, help="Nodes that beat; may be repeated. Default: 100, 1000.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Length of a run.")] = 5.0,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each number of nodes.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the record.", file_okay=False)] = Path("runs"),
    server_core: Annotated[int, typer.Option(min=0, help="Core of the scheduler.")] = 0,
    load_core: Annotated[int, typer.Option(min=0, help="Core of the nodes.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure how many heartbeats a second one scheduler takes."""
    check_cores(server_core, load_core)
    made_folder(out)
    sizes = nodes or [100, 1000]
    samples: dict[str, list[float]] = {}
    for _ in range(repeats):
        for size in sizes:
            with tempfile.TemporaryDirectory(prefix="terrace-beats-") as state:
                flags = ["--state", state, "--max-connections", str(size + _SPARE_CONNECTIONS)]
                with (
                    serving(["terrace", "scheduler", *_TIMES, *flags], core=server_core) as (url, server),
                    on_core(load_core),
                ):
                    rate, cpu_ms = asyncio.run(_measure(url, server, size, seconds))
            samples.setdefault(f"{size}_beats_per_s", []).append(rate)
            samples.setdefault(f"{size}_cpu_ms_per_beat", []).append(cpu_ms)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        rates = spread(samples[f"{size}_beats_per_s"])
        row = {
            "nodes": size,
            "n": rates.n,
            "beats_per_s": round(rates.median, 1),
            "min_beats_per_s": round(rates.minimum, 1),
            "max_beats_per_s": round(rates.maximum, 1),
            "cpu_ms_per_beat": round(spread(samples[f"{size}_cpu_ms_per_beat"]).median, 3),
        }
        rows.append(row)
        if not as_json:
            typer.echo(json.dumps(row))
    record = RunRecord(
        experiment="beats",
        config={"nodes": sizes, "seconds": seconds, "repeats": repeats, "at_a_time": _AT_A_TIME},
        samples=samples,
        results={"rows": rows},
    )
    path = record.write(out)
    typer.echo(json.dumps(rows, indent=2) if as_json else f"record: {path}")
