"""`terrace top` beside a running fleet: once into a pipe, live in a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.acceptance.fleets import running
from tierkit.http.address import free_port

COMMAND = [sys.executable, "-m", "terrace", "top", "--scheduler"]


def test_into_a_pipe_it_tells_once(fleet_url: str) -> None:
    shown = subprocess.run([*COMMAND, fleet_url], capture_output=True, text=True, check=True).stdout
    assert fleet_url in shown
    assert all(node in shown for node in ("end-1", "edge-1", "cloud-1"))
    fleet = json.loads(subprocess.run([*COMMAND, fleet_url, "--json"], capture_output=True, check=True).stdout)
    assert {node["health"] for node in fleet["nodes"]} == {"alive"}


def test_without_a_scheduler_it_says_so() -> None:
    ended = subprocess.run([*COMMAND, f"http://127.0.0.1:{free_port()}"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no scheduler answers" in ended.stderr


class Terminal:
    """A command in a terminal of 100 x 30, and what it has written."""

    def __init__(self, command: list[str]) -> None:
        self.output = ""
        pid, self._fd = pty.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background of a script
            os.execve(command[0], command, {**os.environ, "TERM": "xterm-256color"})
        self.pid = pid
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))

    def read_until(self, text: str) -> None:
        while text not in self.output:
            assert select.select([self._fd], [], [], 60)[0], f"{text!r} does not come: {self.output[-2000:]}"
            try:
                self.output += os.read(self._fd, 65536).decode(errors="replace")
            except OSError as exc:
                raise AssertionError(f"it has ended: {self.output}") from exc

    def stop(self) -> int:
        """Ctrl-C; the exit code."""
        os.write(self._fd, b"\x03")
        try:
            while os.read(self._fd, 65536):
                pass
        except OSError:  # the other end is closed
            pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.timeout(120)
def test_in_a_terminal_it_goes_on_when_the_scheduler_has_gone(tmp_path: Path) -> None:
    arguments = ("--port", "0", "--end", "1", "--edge", "0", "--cloud", "0", "--state", str(tmp_path / "state"))
    with running(*arguments, log=tmp_path / "log") as up:
        url = re.findall(r"http://[0-9.]+:[0-9]+", up.output)[0]
        terminal = Terminal([*COMMAND, url])
        terminal.read_until("end-1")
        up.process.terminate()
        up.process.wait(timeout=30)
        terminal.read_until("no scheduler answers")
        assert terminal.stop() == 130
