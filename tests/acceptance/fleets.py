"""A `terrace up` of its own process, as a user runs it."""

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Up:
    """A running `terrace up`."""

    def __init__(self, *arguments: str, log: Path, until: str) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "terrace", "up", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "NO_COLOR": "1"},
            )
        self.wait_for(until)
        self.children = [os.pidfd_open(pid) for pid in children_of(self.process.pid)]

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str) -> None:
        """Until the output matches."""
        process = os.pidfd_open(self.process.pid)
        try:
            for _ in range(1800):
                if re.search(pattern, self.output):
                    return
                assert not select.select([process], [], [], 0.05)[0], f"terrace up has ended:\n{self.output}"
        finally:
            os.close(process)
        raise AssertionError(f"{pattern!r} does not come:\n{self.output}")

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


@contextmanager
def running(*arguments: str, log: Path, until: str = r"stop +Ctrl-C") -> Iterator[Up]:
    fleet = Up(*arguments, log=log, until=until)
    try:
        yield fleet
    finally:
        fleet.process.kill()
        fleet.process.wait()
        for child in fleet.children:
            os.close(child)
