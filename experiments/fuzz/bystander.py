"""`python -m experiments.fuzz.bystander`: an honest client beside the fuzzer, in a process of its own.

It asks every service for its health all the time, hands in job after job, and holds every answer against that of the
bare networks. Standard input has one line of JSON, the URLs of the services by name; at its end the process says on
standard output, in one line of JSON, what it has seen. It says `ready` before that, once it has its own answers.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

from experiments.chaos.verdict import Truth, tally
from experiments.fuzz.corpus import SCHEDULER
from models.data import read_sample
from tierkit.client import AsyncClient
from tierkit.errors import TerraceError
from tierkit.inference.model import Array
from tierkit.types import Scheme, UpstreamLoss

__all__ = ["Seen"]

_IMAGES = 20
_PAUSE_S = 0.05
_HEALTH_S = 10.0
"""When a health check is given up; it then counts as having taken this long."""
_JOB_S = 120.0


@dataclass(slots=True, kw_only=True)
class Seen:
    """What an honest client has seen."""

    health_checks: int = 0
    slowest_health_check_s: float = 0.0
    failed_health_checks: int = 0
    """Without an answer 200 in time."""
    jobs: int = 0
    answers: int = 0
    wrong_answers: int = 0
    """That differ from the bare network's."""
    missing_answers: int = 0
    """Images without a fine answer, though the job was to wait for it."""
    slowest_job_s: float = 0.0
    refusals: dict[str, int] = field(default_factory=Counter)
    """Jobs that the scheduler did not take or finish, by the name of the error."""


def _watch(url: str, seen: Seen, lock: threading.Lock, ended: threading.Event) -> None:
    """Health checks of one service, one after the other; a thread, so that nothing of ours delays them."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_HEALTH_S)
    while not ended.wait(_PAUSE_S):
        began = time.perf_counter()
        try:
            connection.request("GET", "/livez")
            answer = connection.getresponse()
            answer.read()
            failed = answer.status != 200
        except (OSError, http.client.HTTPException):
            connection.close()
            failed = True
        took_s = time.perf_counter() - began
        with lock:
            seen.health_checks += 1
            seen.failed_health_checks += failed
            seen.slowest_health_check_s = max(seen.slowest_health_check_s, took_s)
    connection.close()


async def _ask(url: str, images: Array, seen: Seen, ended: threading.Event) -> None:
    """Jobs one after the other, at least one, each held against the bare networks."""
    truth = Truth.of(images)
    print("ready", flush=True)  # noqa: T201  # for the process that started this one
    async with AsyncClient(url) as client:
        while not (ended.is_set() and (seen.jobs or seen.refusals)):
            began = time.perf_counter()
            try:
                job = await client.submit(images, scheme=Scheme.END_EDGE, on_upstream_loss=UpstreamLoss.WAIT)
                await client.wait(job, budget_s=_JOB_S)
                found = tally(len(images), [result async for result in client.results(job)], {}, truth)
            except TerraceError as exc:
                seen.refusals[type(exc).__name__] += 1
                await asyncio.sleep(_PAUSE_S)
                continue
            seen.jobs += 1
            seen.answers += 2 * len(images)
            seen.wrong_answers += found.wrong
            seen.missing_answers += len(images) - found.fine
            seen.slowest_job_s = max(seen.slowest_job_s, time.perf_counter() - began)


def main() -> None:
    urls: dict[str, str] = json.loads(sys.stdin.readline())
    seen, lock, ended = Seen(), threading.Lock(), threading.Event()
    asking = threading.Thread(
        target=lambda: asyncio.run(_ask(urls[SCHEDULER], read_sample().images[:_IMAGES], seen, ended))
    )
    threads = [asking, *(threading.Thread(target=_watch, args=(url, seen, lock, ended)) for url in urls.values())]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    print(json.dumps(asdict(seen)))  # noqa: T201


if __name__ == "__main__":
    main()
