"""The bare ONNX Runtime loop as a process that waits on the server's core until it is asked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from experiments.peers.processes import on_core
from tierkit.errors import SetupError

__all__ = ["Bare", "BareLoop", "bare_loop"]

_SCRIPT = Path(__file__).parent / "servers" / "bare_loop.py"
_STOP_S = 10.0


class Bare(NamedTuple):
    """One measurement of the bare loop."""

    images_per_s: float
    batch_ms: float
    """Median time of one batch, request bytes to classes."""


class BareLoop:
    """Made by `bare_loop`; idle, it uses no time."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests = requests
        self._answers = answers

    def measure(self, batch: int, seconds: float) -> Bare:
        """Run the loop for about so long.

        Raises:
            SetupError: it has ended, for instance because the network cannot be loaded.
        """
        try:
            self._requests.write(f"{batch} {seconds}\n")
            self._requests.flush()
            answer = self._answers.readline().split()
        except OSError:
            answer = []
        if len(answer) != 2:
            raise SetupError("the bare ONNX Runtime loop has ended; what it wrote is above")
        return Bare(float(answer[0]), float(answer[1]))


@contextlib.contextmanager
def bare_loop(environment: Mapping[str, str], *, core: int) -> Iterator[BareLoop]:
    """The loop for the network that `environment` names (see `servers/common.py`)."""
    with on_core(core):
        process = subprocess.Popen(
            [sys.executable, str(_SCRIPT)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            yield BareLoop(process.stdin, process.stdout)
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()  # the end of its input is its sign to stop
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
