"""The bare ONNX Runtime loop as a process that waits on the server's core until it is asked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from experiments.processes import on_core
from tierkit.errors import SetupError

__all__ = ["Bare", "BareLoop", "bare_loop"]

_SCRIPT = Path(__file__).parent / "servers" / "bare_loop.py"
_STOP_S = 10.0


class Bare(NamedTuple):
    """One measurement of the bare loop."""

    images_per_s: float
    batch_ms: float
    """Median time of one batch, request bytes to classes."""


BareLoop = Callable[[int, float], Bare]
"""Runs the loop: batch size, and approximate seconds."""


@contextlib.contextmanager
def bare_loop(environment: Mapping[str, str], *, core: int) -> Iterator[BareLoop]:
    """The loop for the network that `environment` names (see `servers/common.py`); idle, it uses no time.

    What it yields raises `SetupError` when the loop has ended, for instance because the network cannot be loaded.
    """
    with on_core(core):
        process = subprocess.Popen(
            [sys.executable, str(_SCRIPT)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None

    def measure(batch: int, seconds: float) -> Bare:
        try:
            requests.write(f"{batch} {seconds}\n")
            requests.flush()
            images_per_s, batch_ms = map(float, answers.readline().split())
        except (OSError, ValueError):
            raise SetupError("the bare ONNX Runtime loop has ended; what it wrote is above") from None
        return Bare(images_per_s, batch_ms)

    with process:
        try:
            yield measure
        finally:
            with contextlib.suppress(OSError):
                requests.close()  # the end of its input is its sign to stop
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
