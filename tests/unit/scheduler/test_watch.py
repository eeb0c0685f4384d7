"""The watch over the nodes, with nodes that nothing listens for."""

from __future__ import annotations

import asyncio
import ssl

from scheduler.core import events
from scheduler.core.fleet import Ledger
from scheduler.devices.watch import Watch
from tests.unit.scheduler.test_devices import TIMES, Machine, registration
from tierkit.testing import listening, wait_for
from tierkit.types import Health
from tierkit.wire.messages import Registration


async def test_a_node_that_cannot_be_watched_is_given_up_and_the_others_are_watched():
    devices = Ledger(TIMES)
    machine = Machine(devices, lambda: 0.0)
    watch = Watch(devices, machine.handle, clock=lambda: 0.0, tls=ssl.create_default_context())
    machine.followers.append(watch.node_changed)
    watching = asyncio.create_task(watch.run())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()

    async with listening(answer) as url:
        # No message can name such an address: it stands for any error of ours in dealing with one node.
        machine.handle(events.Registered(Registration.model_construct(**{**dict(registration("end-0")), "url": 1})))
        machine.handle(events.Registered(registration("end-1", port=int(url.rpartition(":")[2]))))
        await wait_for(lambda: devices.get("end-1").reached, what="the other node to be reached")
    assert not watching.done()
    lost, other = devices.view(0.0)
    assert (lost.health, other.health) == (Health.DEAD, Health.ALIVE)
    assert lost.reason.startswith("cannot be judged")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
