"""`terrace up` as a user runs it: one process to start, one Ctrl-C to stop, and no orphans ever."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


class Up:
    """A running `terrace up`."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "terrace", "up", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "NO_COLOR": "1"},
            )
        self.url = self._wait_for(r"scheduler  (http://\S+)")
        self.children = [os.pidfd_open(pid) for pid in children_of(self.process.pid)]

    @property
    def output(self) -> str:
        return self._log.read_text()

    def _wait_for(self, pattern: str) -> str:
        process = os.pidfd_open(self.process.pid)
        try:
            for _ in range(600):
                if found := re.search(pattern, self.output):
                    return found[1]
                assert not select.select([process], [], [], 0.05)[0], f"terrace up has ended:\n{self.output}"
        finally:
            os.close(process)
        raise AssertionError(f"terrace up did not come up:\n{self.output}")

    def running(self, *, within_s: float) -> int:
        """How many children still run after so long at most."""
        return sum(not select.select([child], [], [], within_s)[0] for child in self.children)


def children_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    arguments = ("--port", "0", "--end", "1", "--edge", "1", "--cloud", "0", "--state", str(tmp_path / "state"))
    fleet = Up(*arguments, log=tmp_path / "log")
    try:
        yield fleet
    finally:
        fleet.process.kill()
        fleet.process.wait()
        for child in fleet.children:
            os.close(child)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_all_in_good_order(up: Up, number: signal.Signals) -> None:
    assert len(up.children) == 3
    up.process.send_signal(number)
    assert up.process.wait(timeout=20) == 0
    assert up.running(within_s=0) == 0


def test_a_killed_launcher_leaves_no_orphans(up: Up) -> None:
    up.process.kill()
    up.process.wait()
    assert up.running(within_s=10) == 0


def test_a_taken_port_is_one_sentence(fleet_url: str) -> None:
    port = fleet_url.rpartition(":")[2]
    again = subprocess.run([sys.executable, "-m", "terrace", "up", "--port", port], capture_output=True, text=True)
    assert again.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in again.stderr.splitlines()[-1]
    assert "Traceback" not in again.stderr + again.stdout
