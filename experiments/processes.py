"""Processes of a contender: started on one core, found again even if they fork, measured, and all of them ended.

Some servers start their workers through daemons, outside of any process group. All of them inherit the environment, so
a variable with an unguessable value marks the processes of a server. Linux only (/proc).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.harness import Options, option
from tierkit.errors import SetupError

__all__ = [
    "Cores",
    "ServerProcesses",
    "check_cores",
    "cpu_s",
    "on_core",
    "peak_bytes",
    "resident_bytes",
    "running",
    "serving",
]

_MARK = "TERRACE_PEER_MARK"
_GRACE_S = 5.0
_KILL_S = 10.0
_POLL_S = 0.05
_START_S = 60.0
_LOG_LINES = 5


class Cores(Options):
    """Core of the server, and core of the load."""

    server_core: int = option(0, "Core of what is measured.", min=0)
    load_core: int = option(1, "Core of the load.", min=0)


def check_cores(cores: Cores) -> None:
    """See that this process may use these cores, and that they are different ones.

    Raises:
        SetupError: it may not, or this system cannot pin processes to cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise SetupError("this comparison pins processes to cores, which this system cannot do; run it on Linux")
    available, chosen = os.sched_getaffinity(0), (cores.server_core, cores.load_core)
    if len(set(chosen)) < len(chosen) or not available.issuperset(chosen):
        raise SetupError(
            f"the server and the load need a core each of {sorted(available)}, not {' and '.join(map(str, chosen))}"
        )


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """This process, and what it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class ServerProcesses:
    """A running server, made by `running`."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, log: Path) -> None:
        self.process = process
        self._mark = f"{_MARK}={mark}".encode()
        self._log = log

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def pids(self) -> list[int]:
        """Return all its processes that are alive."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._mark in _environment(path)]

    def peak_memory_bytes(self) -> int:
        """Sum of the largest resident sizes (VmHWM) that its living processes have had. Memory that several of them
        share counts for each."""
        return sum(peak_bytes(pid) for pid in self.pids())

    def cpu_s(self) -> float:
        """CPU time, user and system, that its living processes have used so far."""
        return sum(map(cpu_s, self.pids()))

    def output(self) -> list[str]:
        """The lines that it has written, but for empty ones."""
        return [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]

    def log_tail(self) -> str:
        """The last lines of what it wrote, as one line."""
        lines = self.output()
        return " | ".join(lines[-_LOG_LINES:])[-600:] or "it wrote nothing"

    def stop(self) -> None:
        """Ask it to end, then end all of its processes."""
        # Every server tidies up after SIGINT, some only then (pytriton leaves shared memory after SIGTERM); started
        # from a shell's background, it may be ignored.
        for number in (signal.SIGINT, signal.SIGTERM):
            if self.alive:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(_GRACE_S)
        deadline = time.monotonic() + _KILL_S
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()  # a dead child stays in /proc until it is waited for
            if time.monotonic() > deadline:
                raise SetupError(f"the processes {pids} do not end")
            time.sleep(_POLL_S)
        self.process.wait(_KILL_S)


@contextlib.contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], *, core: int | None) -> Iterator[ServerProcesses]:
    """Start a server on `core`, or on ours for None, in a new folder, which is also its home; on exit all of it is
    gone."""
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
        log = Path(folder, "log")
        own = {"HOME": folder, "PEER_FOLDER": folder, "OMP_NUM_THREADS": "1", _MARK: mark}
        with log.open("wb") as output, contextlib.nullcontext() if core is None else on_core(core):
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        server = ServerProcesses(process, mark, log)
        try:
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def serving(command: Sequence[str], *, core: int | None) -> Iterator[tuple[str, ServerProcesses]]:
    """One of our services on `core`, or on ours for None, from when it is ready, and its URL.

    Args:
        command: module and flags; where it listens is chosen here.

    Raises:
        SetupError: it ends before, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="terrace-service-") as folder:
        ready = Path(folder, "ready.json")
        flags = ["--port", "0", "--ready-file", str(ready), "--log-level", "warning"]
        with running([sys.executable, "-m", *command, *flags], {}, core=core) as server:
            deadline = time.monotonic() + _START_S
            while not ready.exists():
                if not server.alive or time.monotonic() > deadline:
                    raise SetupError(f"{command[0]} did not become ready: {server.log_tail()}")
                time.sleep(_POLL_S)
            yield json.loads(ready.read_text())["url"], server


def cpu_s(pid: int) -> float:
    """CPU time that a process has used so far, user and system, all its threads; 0 when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it has ended, or is not ours
        return b""


def peak_bytes(pid: int) -> int:
    """Largest resident size (VmHWM) that a process has had; 0 when it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
