"""Signals end a command in good order: the first cancels it, the second its clean-up."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from terrace.stoppable import run_stoppable


async def forever() -> None:
    await asyncio.Event().wait()


def test_what_ends_by_itself_gives_its_result() -> None:
    async def main() -> int:
        return 7

    assert run_stoppable(main) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_and_lets_it_clean_up(number: signal.Signals) -> None:
    cleaned = []

    async def main() -> int:
        try:
            os.kill(os.getpid(), number)
            await forever()
        finally:
            await asyncio.sleep(0)
            cleaned.append(number)
        return 7

    assert run_stoppable(main) is None
    assert cleaned == [number]


def test_a_second_signal_cuts_the_clean_up_short() -> None:
    steps = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await forever()
        finally:
            steps.append("cleaning")
            os.kill(os.getpid(), signal.SIGINT)
            await forever()

    assert run_stoppable(main) is None
    assert steps == ["cleaning"]


def test_an_error_is_passed_on() -> None:
    async def main() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        run_stoppable(main)


def test_nobody_waits_for_a_thread_that_still_computes() -> None:
    go_on = threading.Event()

    async def main() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
        await asyncio.to_thread(go_on.wait)

    try:
        assert run_stoppable(main) is None  # it would hang here
    finally:
        go_on.set()


COMPUTES = """
import ctypes, os, sys
from pathlib import Path
from tierkit import atomic
from terrace.stoppable import interruptible

sync = os.fsync

def interrupt_and_sync(handle):
    os.fsync = sync
    os.kill(os.getpid(), 2)
    ctypes.CDLL(None).usleep(200_000)  # the main thread has seen it
    sync(handle)

def command(path):
    ctypes.CDLL(None).usleep(200_000)  # the main thread waits
    os.fsync = interrupt_and_sync
    atomic.write_atomically(Path(path), b"whole")
    ctypes.CDLL(None).sleep(3600)

try:
    interruptible(command)(path=sys.argv[1])
except KeyboardInterrupt:
    os._exit(130)  # as the command line does
"""


def test_a_computation_ends_at_once_and_a_file_is_finished_before(tmp_path: Path):
    """At once: before the library's hour is over."""
    done = subprocess.run(
        [sys.executable, "-c", COMPUTES, str(tmp_path / "file")], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 130
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
