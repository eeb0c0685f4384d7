"""The dispatcher's loop, with a wire that is none."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np

from models.manifest import load_manifest
from scheduler.core import events
from scheduler.core.fleet import Ledger
from scheduler.core.policy import JobPolicy
from scheduler.core.work import JobFacts, TaskFacts
from scheduler.dispatch.active_job import ActiveJob
from scheduler.dispatch.loop import Dispatcher
from scheduler.dispatch.transport import TaskRequest
from scheduler.history.record import Record
from scheduler.placement.adaptive.pilot import Pilot
from scheduler.placement.routes import Placement
from scheduler.settings import SchedulerSettings
from tests.unit.scheduler.test_devices import registration
from tierkit.types import Scheme, Tier
from tierkit.wire.events import TaskEvent


class Silent:
    """Devices that take every task and never answer."""

    sent = 0

    async def send(self, order: TaskRequest, *, budget_s: float) -> AsyncGenerator[tuple[TaskEvent, str], None]:
        self.sent += 1
        await asyncio.Event().wait()
        yield  # type: ignore[misc]  # never

    async def acknowledged(self, node_id: str, url: str, *, budget_s: float) -> None: ...


class Recipient:
    def __init__(self) -> None:
        self.reports: list[str] = []
        self.state: str | None = ""

    def started(self) -> None: ...

    def answer(self, answer: Any) -> None: ...

    def withdrawn(self, answer: Any) -> None: ...

    def attempted(self, report: Any) -> None:
        self.reports.append(report.outcome)

    async def ended(self, state: str | None, reason: str) -> None:
        self.state = state


async def turns_until(condition: Callable[[], bool]) -> None:
    """Let the event loop come around until something has happened, at most a hundred times."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it has not happened")


async def test_an_attempt_that_is_cancelled_before_it_begins_keeps_nothing_of_its_job():
    settings, manifest = SchedulerSettings(), load_manifest()
    devices = Ledger(settings.detector_times)
    wire, recipient = Silent(), Recipient()
    dispatcher = Dispatcher(
        settings=settings,
        ledger=devices,
        placement=Placement(devices, settings, manifest, b"secret"),
        pilot=Pilot(devices, link_s=dict.fromkeys(Tier, 0.0), hop_s=0.0, accuracy={}),
        transport=wire,
        record=Record(devices, wall=lambda now: now),
        classes=(20, 100),
        congested=lambda: False,
        clock=time.monotonic,
    )
    job = ActiveJob(
        JobFacts(
            job_id="j",
            policy=JobPolicy(scheme=Scheme.END, deadline_s=100, task_deadline_s=10),
            deadline=time.monotonic() + 100,
        ),
        tasks=[TaskFacts(index=0, first_image=0, images=1)],
        images=np.zeros((1, 32, 32, 3), np.uint8),
        recipient=recipient,
    )
    dispatcher.handle(events.Registered(registration()))
    kept = weakref.ref(job)
    dispatcher.add(job)
    del job
    running = asyncio.create_task(dispatcher.run())
    await turns_until(lambda: bool(dispatcher.attempts("j")))
    assert dispatcher.cancel("j", "by the user")  # the attempt has been made, and has not begun
    assert wire.sent == 0
    await turns_until(lambda: dispatcher.job("j") is None)
    for _ in range(10):  # in which what was cancelled ends
        await asyncio.sleep(0)
    gc.collect()
    assert (recipient.reports, recipient.state, devices.assigned.outstanding("end-0")) == (
        ["cancelled"],
        "cancelled",
        0,
    )
    assert kept() is None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
