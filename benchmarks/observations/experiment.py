"""Observations at the scheduler, measured: many devices, many rows, many readers.

The scheduler is a process like any other, on SQLite or on the database that `--database` names. There are four parts.
In `devices`, devices send pictures for some minutes, and all must be stored once. `pages` reads pages of many stored
rows with each filter. In `retention`, devices send before and while the scheduler deletes old rows. `readers` measures
the scheduler's processor time with and without readers of the list of sources, in turns.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.observations.devices import DeviceFleet, SendingPlan, SentBatches, device_fleet
from benchmarks.observations.rows import ABSENT, COMMON, RARE, STORED_SOURCES, StoredRows, fill, stored_name
from experiments.bench.summary import percentile
from experiments.harness import MOST_RUNS, Experiment, Options, Record, Run, Table, option
from experiments.processes import cpu_s, resident_bytes
from models.manifest import load_manifest
from scheduler.settings import SchedulerSettings
from tierkit.errors import InvalidInput, ServiceFailed
from tierkit.testing import service_process

__all__ = ["OBSERVATIONS"]

PARTS = ("devices", "pages", "retention", "readers")
_HOUR_S = 3600.0
_START_S = 6.0
"""Seconds that the scheduler and the devices need to start."""
_ASKED = 100
_PROBE_S, _POLL_S, _LIMIT_S = 0.02, 1.0, 120.0
_READ_SOURCES, _READ_RATE, _READ_INTERVAL_S = 100, 2.0, 0.5
_START = (
    "import scheduler.runtime.assembly as assembly; assembly._PURGE_OBSERVATIONS_S = {purge_s}; "
    "from scheduler.__main__ import main; main()"
)
"""Starts a scheduler that looks for old rows at other intervals."""


class ObservationLoad(Options):
    """Parts and sizes."""

    only: list[str] | None = option(None, "This part; may be repeated.", metavar="|".join(PARTS))
    devices: int = option(1000, "Devices.", quick=50, min=1, max=10_000)
    rate: float = option(1.0, "Pictures a second of each device.", min=0.01, max=1000)
    interval_s: float = option(2.0, "Seconds between two batches of a device.", min=0.05, max=900)
    seconds: float = option(600.0, "Duration in seconds.", quick=10.0, min=1, max=86_400)
    rows: int = option(1_000_000, "Stored rows.", quick=20_000, min=1000, max=100_000_000)
    doomed: int = option(100_000, "Rows that are deleted.", quick=5000, min=100, max=10_000_000)
    pages: int = option(200, "Pages for each filter.", quick=20, min=1, max=10_000)
    readers: int = option(20, "Readers of the list of sources.", quick=4, min=1, max=100)
    window_s: float = option(30.0, "Seconds of each turn with and without readers.", quick=3.0, min=1, max=3600)
    repeats: int = option(3, "Turns of each kind.", quick=1, min=1, max=MOST_RUNS)
    database: str | None = option(None, "A database as the setting of the scheduler; an empty one. Default: SQLite.")


@dataclass(frozen=True, kw_only=True)
class RunningScheduler:
    """A scheduler's process."""

    pid: int
    url: str

    def plan(self, chosen: ObservationLoad, **changes: Any) -> SendingPlan:
        """A load of devices on it."""
        at = httpx.URL(self.url)
        plan = SendingPlan(
            host=at.host,
            port=at.port or 80,
            count=chosen.devices,
            rate=chosen.rate,
            interval_s=chosen.interval_s,
            seconds=chosen.seconds,
        )
        return replace(plan, **changes)


@asynccontextmanager
async def _scheduler(
    folder: Path, database: str | None, *, retention_s: float = 7 * 86400.0, purge_s: float = 60.0
) -> AsyncIterator[RunningScheduler]:
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    flags: dict[str, Any] = {
        "port": 0,
        "state": folder,
        "max-observations": 10**9,
        "max-connections": 11_000,  # one for each device, and those of readers
        "retention-s": retention_s,
    }
    if database is not None:
        flags["database"] = database
    words = [f"--{name}={value}" for name, value in flags.items()]
    command = ["-c", _START.format(purge_s=purge_s), *words]
    async with service_process(command, ready_file=folder / "ready", timeout_s=120.0) as process:
        yield RunningScheduler(pid=process.process.pid, url=process.url)


def _spread(name: str, values: list[float]) -> dict[str, float]:
    """Percentiles of times in ms."""
    ordered = sorted(values)
    return {
        f"{name}_p50_ms": percentile(ordered, 50),
        f"{name}_p99_ms": percentile(ordered, 99),
        f"{name}_max_ms": ordered[-1],
    }


def _check(sent: SentBatches) -> None:
    """Raises ServiceFailed if not all observations were stored once."""
    if sent.stored != sent.observations or sent.known:
        raise ServiceFailed(
            f"{sent.observations} observations were sent, {sent.stored} stored and {sent.known} known: "
            f"{sent.first_failure or 'no request failed'}"
        )


async def _stored_once(url: str) -> int:
    """Read all observations from the export, and return their number. Raises ServiceFailed if one comes twice, or is
    missing between two others."""
    numbers: Counter[str] = Counter()
    target = f"{url}/v1/observations/export?format=jsonl"
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http, http.stream("GET", target) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            seen = json.loads(line)
            numbers[seen["node"]] += 1
            if seen["sequence"] != numbers[seen["node"]]:
                raise ServiceFailed(f"{seen['node']} has {seen['sequence']} as its {numbers[seen['node']]}th")
    return numbers.total()


class ObservationsBenchmark(Experiment):
    """Devices, pages, retention and readers."""

    name = "observations"
    options = ObservationLoad
    repeats = ("n", "turns")
    quick = "{devices} devices for 10 s, and few rows"
    ignores = frozenset({"seed", "share", "data", "tasks"})
    profile = None

    async def measure(self, run: Run, chosen: ObservationLoad) -> None:
        parts = chosen.only or PARTS
        if unknown := set(parts) - set(PARTS):
            raise InvalidInput(f"--only takes {', '.join(PARTS)}, not {min(unknown)}")
        if chosen.database is not None and len(parts) > 1:
            raise InvalidInput("with --database, name one part with --only: each needs an empty database")
        run.config |= {
            **chosen.model_dump(exclude={"database"}),
            "database": "SQLite" if chosen.database is None else "named",
        }
        run.expect(len(parts))
        async with device_fleet() as fleet:
            for part in parts:
                with run.step(part):
                    measure = getattr(self, f"_{part}")
                    await measure(run, chosen, fleet, run.folder / part)

    async def _devices(self, run: Run, chosen: ObservationLoad, fleet: DeviceFleet, folder: Path) -> None:
        async with _scheduler(folder, chosen.database) as scheduler:
            await fleet.join(scheduler.plan(chosen))
            cpu_before, began = cpu_s(scheduler.pid), time.perf_counter()
            sent = await fleet.send(scheduler.plan(chosen))
            seconds, used_s = time.perf_counter() - began, cpu_s(scheduler.pid) - cpu_before
            memory = resident_bytes(scheduler.pid)
            _check(sent)
            stored = await _stored_once(scheduler.url)
        if stored != sent.observations:
            raise ServiceFailed(f"{sent.observations} observations were sent, and the export has {stored}")
        run.add(
            what="devices",
            devices=chosen.devices,
            seconds=seconds,
            observations=stored,
            posts=len(sent.post_ms),
            failures=sent.failures,
            first_failure=sent.first_failure,
            cores=used_s / seconds,
            body_bytes_per_s=sent.body_bytes / seconds,
            wire_bytes_per_s=sent.wire_bytes / seconds,
            resident_bytes=memory,
            **_spread("post", sent.post_ms),
        )

    async def _pages(self, run: Run, chosen: ObservationLoad, fleet: DeviceFleet, folder: Path) -> None:
        await _filled(folder, chosen.database, StoredRows(rows=chosen.rows))
        names = load_manifest().hierarchy.coarse
        noon = datetime.fromtimestamp(time.time() - 43_200, UTC).isoformat()
        filters: dict[str, Mapping[str, str]] = {
            "none": {},
            "source": {"node": stored_name(7), "source": "gate"},
            "common class": {"label": names[COMMON]},
            "rare class": {"label": names[RARE]},
            "absent class": {"label": names[ABSENT]},
            "below": {"below": "0.1"},
            "hardly any below": {"below": "0.000001"},
            "since": {"since": noon},
            "amended": {"amended": "true"},
            "all": {"source": "gate", "label": names[COMMON], "since": noon, "below": "0.1", "amended": "true"},
        }
        async with (
            _scheduler(folder, chosen.database) as scheduler,
            httpx.AsyncClient(timeout=60.0, trust_env=False) as http,
        ):
            for name, wanted in filters.items():
                times, counts = [], []
                cursor: str | None = None
                for _ in range(chosen.pages + 1):
                    query = {**wanted, "limit": str(_ASKED), **({} if cursor is None else {"cursor": cursor})}
                    asked = time.perf_counter()
                    answer = await http.get(f"{scheduler.url}/v1/observations", params=query)
                    times.append(1000 * (time.perf_counter() - asked))
                    page = answer.raise_for_status().json()
                    counts.append(len(page["observations"]))
                    cursor = page["next_cursor"]
                # The first page of a filter compiles its statement.
                run.add(
                    what="pages",
                    filter=name,
                    rows=chosen.rows,
                    n=chosen.pages,
                    found=median(counts[1:]),
                    **_spread("page", times[1:]),
                )

    async def _retention(self, run: Run, chosen: ObservationLoad, fleet: DeviceFleet, folder: Path) -> None:
        # The doomed rows become too old after the plain window, and the scheduler looks for them some seconds later.
        stored = StoredRows(rows=chosen.rows, doomed=chosen.doomed, doomed_age_s=_HOUR_S)
        stored_at = await _filled(folder, chosen.database, stored)
        window_s = chosen.window_s
        began = time.monotonic()
        retention_s = _HOUR_S + began - stored_at + window_s + _START_S
        purge_s = 2 * window_s + _START_S
        async with _scheduler(folder, chosen.database, retention_s=retention_s, purge_s=purge_s) as scheduler:
            await fleet.join(scheduler.plan(chosen))
            calm = await fleet.send(scheduler.plan(chosen, seconds=window_s, probe_s=_PROBE_S))
            left_s = max(window_s, began + purge_s + 2 * window_s - time.monotonic())
            deleting = asyncio.create_task(_deleted(scheduler.url, chosen.doomed))
            storm = await fleet.send(scheduler.plan(chosen, seconds=left_s, probe_s=_PROBE_S))
            if not deleting.done():
                run.note("the scheduler deleted rows for longer than the devices sent: choose a longer --window-s")
            async with asyncio.timeout(_LIMIT_S):
                await deleting
        for name, sent in (("plain", calm), ("deleting", storm)):
            _check(sent)
            spreads = {**_spread("post", sent.post_ms), **_spread("beat", sent.beat_ms)}
            run.add(what="retention", window=name, rows=chosen.rows, deleted=chosen.doomed, **spreads)

    async def _readers(self, run: Run, chosen: ObservationLoad, fleet: DeviceFleet, folder: Path) -> None:
        async with _scheduler(folder, chosen.database) as scheduler:
            few = {"count": _READ_SOURCES, "rate": _READ_RATE, "interval_s": _READ_INTERVAL_S}
            plan = scheduler.plan(chosen, **few, seconds=chosen.window_s)
            await fleet.join(plan)
            for turn in range(chosen.repeats + 1):
                for readers in (0, chosen.readers):
                    async with _reading(scheduler.url, readers) as read:
                        cpu_before, began = cpu_s(scheduler.pid), time.perf_counter()
                        sent = await fleet.send(plan)
                        seconds, used_s = time.perf_counter() - began, cpu_s(scheduler.pid) - cpu_before
                    _check(sent)
                    if turn:  # the first turn warms up
                        rate = read.total() / max(1, readers) / seconds
                        run.add(what="readers", readers=readers, cores=used_s / seconds, events_per_reader_per_s=rate)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """The points; of the readers, the median of each kind."""
        points = [point for point in record["points"] if point["what"] != "readers"]
        for readers in sorted({point["readers"] for point in record["points"] if point["what"] == "readers"}):
            own = [p for p in record["points"] if p["what"] == "readers" and p["readers"] == readers]
            points.append(
                {
                    "what": "readers",
                    "readers": readers,
                    "n": len(own),
                    "cores": median(point["cores"] for point in own),
                    "events_per_reader_per_s": median(point["events_per_reader_per_s"] for point in own),
                }
            )
        return points

    def table(self, record: Record) -> Table:
        return Table(
            headings="what | case | p50, p99 and longest, ms | figures", rows=[_row(row) for row in self.rows(record)]
        )


def _row(row: Mapping[str, Any]) -> list[str]:
    def times(name: str) -> str:
        return " / ".join(f"{row[f'{name}_{kind}_ms']:.1f}" for kind in ("p50", "p99", "max"))

    match row["what"]:
        case "devices":
            figures = (
                f"{row['observations']:,} stored once, {row['cores']:.2f} cores, "
                f"{row['body_bytes_per_s'] / 1000:,.0f} kB/s of bodies, "
                f"{row['wire_bytes_per_s'] / 1000:,.0f} kB/s on the wire"
            )
            return ["devices", f"{row['devices']:,} for {row['seconds']:.0f} s", times("post"), figures]
        case "pages":
            return ["pages", f"{row['filter']} ({row['rows']:,} rows)", times("page"), f"{row['found']:g} found"]
        case "retention":
            case = f"{row['window']} ({row['deleted']:,} of {row['rows']:,} rows)"
            return ["retention", case, f"POST {times('post')}, heartbeat {times('beat')}", ""]
        case _:
            figures = f"{row['cores']:.3f} cores, {row['events_per_reader_per_s']:.2f} events/s for each"
            return ["readers", f"{row['readers']}", "", figures]


async def _filled(folder: Path, database: str | None, wanted: StoredRows) -> float:
    """Fill the database of a scheduler that is not started yet; returns the monotonic time at which the rows count as
    stored."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    settings = SchedulerSettings(state=folder, database=database)
    return await fill(settings.database_url, wanted)


async def _deleted(url: str, count: int) -> None:
    """Wait until the scheduler has deleted the oldest rows, by the first row of the source that was filled last."""
    last = stored_name(STORED_SOURCES - 1)
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
        while True:
            async with http.stream("GET", f"{url}/v1/observations/export?format=jsonl&node={last}") as answer:
                answer.raise_for_status()
                first = json.loads(await anext(answer.aiter_lines()))
            if first["sequence"] > count // STORED_SOURCES:
                return
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def _reading(url: str, readers: int) -> AsyncIterator[Counter[int]]:
    """Readers of the list of sources, and how many events each of them got."""
    counts: Counter[int] = Counter()

    async def read(number: int, http: httpx.AsyncClient) -> None:
        async with http.stream("GET", f"{url}/v1/sources/events") as answer:
            answer.raise_for_status()
            async for part in answer.aiter_bytes():
                counts[number] += part.count(b"event: snapshot")

    async with AsyncExitStack() as stack:
        limits = httpx.Limits(max_connections=None)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60.0, trust_env=False, limits=limits))
        tasks = [asyncio.create_task(read(number, http)) for number in range(readers)]
        try:
            yield counts
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise ServiceFailed(f"a reader gave up: {outcome!r}")


OBSERVATIONS = ObservationsBenchmark()
