"""Standing back while a node of this machine serves.

Two things keep a worker out of the node's way. The system runs it only while no other process wants the processor, so a
request in the middle of a step costs the time of a context switch. And the worker checks between two steps whether the
node computes. During that time and shortly after, the worker does nothing, because two programs that take turns share
caches and memory.

The node is not asked, because an answer would be work for it: /proc shows the processor time of its process.

A worker can also have a share of a core, so that a device stays cool while it learns.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tierkit.errors import SetupError

__all__ = ["CpuShare", "NodeWatch", "Quiet", "give_way", "stand_back"]

_BUSY_SHARE = 0.1
"""Share of a core above which a node counts as busy. Heartbeats and checks of a node without work take about 0.01."""
_QUIET_S = 1.0
_LOOK_S = 0.05
"""Ticks of the clock in /proc are 10 ms: fewer would say nothing."""
_AHEAD_S = 2.0
"""Seconds of processor time that a worker may have used before its share allows them: a few steps."""
_PROC = Path("/proc")


@dataclass(slots=True)
class Quiet:
    """Decides from two looks at a node whether it serves. Pure: time is passed in."""

    _looked: tuple[int, float, float] | None = None
    """Process, its seconds of processor time, and when."""
    _busy_until: float = 0.0

    def judge(self, process: int, used_s: float | None, now: float) -> bool:
        """True if there is nothing that the worker would disturb.

        Args:
            process: its number; a node that was started again has another one.
            used_s: processor time that it has used; None where there is no such process.
        """
        before, self._looked = self._looked, None
        if used_s is not None:
            self._looked = process, used_s, now
            if before is None or before[0] != process:
                self._busy_until = now + _QUIET_S  # it is being started
            elif used_s - before[1] > _BUSY_SHARE * (now - before[2]):
                self._busy_until = now + _QUIET_S
        return now >= self._busy_until


class CpuShare:
    """Bounds the processor time of this process.

    Args:
        cores: the share of a core that it may use, over a minute or so. Idle time is not saved up.
        used_s: returns the seconds of processor time that this process has used.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        cores: float,
        *,
        used_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cores, self._read, self._clock = cores, used_s, clock
        self._used_s, self._at = used_s(), clock()
        self._debt_s = 0.0

    def may_work(self) -> bool:
        """True if the share allows a further step."""
        used_s, now = self._read(), self._clock()
        self._debt_s = max(0.0, self._debt_s + used_s - self._used_s - self._cores * (now - self._at))
        self._used_s, self._at = used_s, now
        return self._debt_s < _AHEAD_S


class NodeWatch:
    """Looks at a node of this machine.

    Args:
        ready_file: file that the node writes when it is ready (`--ready-file`), and removes at its end.

    Raises:
        SetupError: this system does not show the processor time of a process.
    """

    def __init__(self, ready_file: Path, proc: Path = _PROC) -> None:
        if not (proc / "self" / "stat").exists():
            raise SetupError("--while-idle needs /proc, which this system does not have: run it on Linux")
        self._ready_file, self._proc = ready_file, proc
        self._quiet = Quiet()
        self._looked_at, self._free = 0.0, False

    def may_work(self) -> bool:
        """True if the node does not serve now. Costs next to nothing between two looks."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            process = self._process()
            self._free = self._quiet.judge(process, self._used_s(process), now)
        return self._free

    def _process(self) -> int:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(self._ready_file.read_bytes())["pid"])
        return 0  # there is no node

    def _used_s(self, process: int) -> float | None:
        if not process:
            return None
        try:
            fields = (self._proc / str(process) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stand_back(may_work: Callable[[], bool]) -> None:
    """Return when there may be work. For threads that compute."""
    while not may_work():
        time.sleep(_LOOK_S)


def give_way() -> None:
    """Have the system run this process, and the threads that it starts from now on, only while no other process wants
    the processor.
    """
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if os.getsid(0) == os.getpid():
        # The system may weigh sessions against each other, and not processes. Others of this session would be slowed
        # down as well, so it has to be this process's own.
        with suppress(OSError):
            (_PROC / "self" / "autogroup").write_text("19")
