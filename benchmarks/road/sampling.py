"""A service with a sampling profiler inside: `python -m benchmarks.road.sampling FILE MODULE [ARGUMENTS]`.

SIGUSR1 starts the samples. The next one ends them and writes them to FILE: stacks of the main thread, innermost frame
first, and how often each was seen. The timer runs on the wall clock, so a stack that ends in the event loop stands for
time that the service waited.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

__all__: list[str] = []

_PERIOD_S = 0.0005
_DEPTH = 40


class _Sampler:
    """Counts of stacks."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stacks: Counter[tuple[str, ...]] = Counter()
        self._began: tuple[float, float] | None = None

    def toggle(self, _number: int, _frame: FrameType | None) -> None:
        if self._began is None:
            self._stacks.clear()
            self._began = time.perf_counter(), time.process_time()
            signal.setitimer(signal.ITIMER_REAL, _PERIOD_S, _PERIOD_S)
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        wall_s, cpu_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self._began = None
        stacks = [{"frames": frames, "count": count} for frames, count in self._stacks.items()]
        written = self._file.with_suffix(".part")
        written.write_text(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "stacks": stacks}))
        written.rename(self._file)

    def sample(self, _number: int, frame: FrameType | None) -> None:
        frames: list[str] = []
        while frame is not None and len(frames) < _DEPTH:
            code = frame.f_code
            frames.append(f"{code.co_filename}:{code.co_qualname}")
            frame = frame.f_back
        self._stacks[tuple(frames)] += 1


if __name__ == "__main__":
    sampler = _Sampler(Path(sys.argv[1]))
    signal.signal(signal.SIGUSR1, sampler.toggle)
    signal.signal(signal.SIGALRM, sampler.sample)
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
