"""Clients that reset their connections amid what the scheduler reads for them cost it nothing that lasts."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from tierkit.testing import wait_for

CLIENTS = 200
MOST_OPEN = 60
"""Files of the database, its log and its index, of all connections that may be open at a time."""


def open_files(path: Path) -> int:
    """How often this process has the database open, with the files beside it."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(entry).startswith(str(path))
        except OSError:
            continue
    return found


async def reset_after(url: str, path: str, rounds: int) -> None:
    """Send a request, and reset the connection some rounds of the event loop later."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.connect((parts.hostname, parts.port))  # at once: the kernel accepts it
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        for _ in range(rounds):
            await asyncio.sleep(0)


@pytest.mark.parametrize("what", ["", "/results", "/events", "/attempts"])
async def test_many_connections_that_are_reset_leave_nothing_open(scheduler, what, caplog):
    job = (await scheduler.submit(np.zeros((1, 32, 32, 3), np.uint8), scheme="end"))["id"]
    for first in range(0, CLIENTS, 50):
        resets = (reset_after(scheduler.url, f"/v1/jobs/{job}{what}", number) for number in range(first, first + 50))
        await asyncio.gather(*resets)
    await scheduler.submit(np.zeros((1, 32, 32, 3), np.uint8), scheme="end")
    database = scheduler.settings.state / "scheduler.db"
    await wait_for(lambda: open_files(database) < MOST_OPEN, what="the connections to be closed")
    assert "destroyed" not in caplog.text
