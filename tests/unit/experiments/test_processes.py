"""Processes are found again whatever they fork, and all of them end."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.processes import Cores, check_cores, on_core, running
from tierkit.errors import SetupError

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="pinning and /proc are Linux's")

# The child leaves the session and ignores what would end it politely; so does the parent.
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
print("running", sorted(os.sched_getaffinity(0)), flush=True)
while True:
    signal.pause()
"""

POLITE = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # so that none is missed that comes before it is waited for
print("up", flush=True)
signal.sigwait([signal.SIGINT])
raise SystemExit(7)
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline


def test_daemons_of_a_server_are_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.processes._GRACE_S", 0.1)
    core = min(os.sched_getaffinity(0))
    with running([sys.executable, "-c", STUBBORN], {}, core=core) as server:
        wait_for(lambda: server.log_tail().count(f"running [{core}]") == 2)
        # The process between the two ends at once, and nobody waits for it: it has no command line any more.
        wait_for(lambda: sum(bool(Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in server.pids()) == 2)
        assert server.peak_memory_bytes() > 2 * 2**20
    assert server.pids() == []
    assert not server.alive


def test_a_polite_server_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.processes._GRACE_S", 30.0)
    with running([sys.executable, "-c", POLITE], {}, core=min(os.sched_getaffinity(0))) as server:
        wait_for(lambda: "up" in server.log_tail())
    assert server.process.returncode == 7


def test_cores_must_be_there_and_differ() -> None:
    have = sorted(os.sched_getaffinity(0))
    for wrong in ((have[0], have[0]), (have[0], 4096)):
        with pytest.raises(SetupError, match="a core each"):
            check_cores(Cores(server_core=wrong[0], load_core=wrong[1]))


def test_on_core_is_undone() -> None:
    before = os.sched_getaffinity(0)
    with on_core(min(before)):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
