"""Pictures that come as files, to the rows that a model takes, in a bounded pool of threads."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tierkit.errors import InvalidInput
from tierkit.inference.runner import RunResult
from tierkit.tensors import Array, TensorSpec
from tierkit.wire.oip.datatypes import dtype_of

__all__ = ["Decoded", "FileDecoder", "are_files"]

_AT_ONCE = 4
"""Files that a thread decodes before it is another request's turn."""


def are_files(spec: TensorSpec, array: Array) -> bool:
    """True if this is a tensor of files, and the input takes them."""
    return spec.decode is not None and array.dtype.kind == "O" and array.ndim == 1


class Decoded(Struct, frozen=True):
    """Result of decoding a tensor of files."""

    rows: Array
    """Pixels of the files that could be read."""
    damaged: dict[int, str]
    """Faults of the other files, by position."""
    cost_s: float = 0.0
    """Seconds to decode all of them, with every core of this process."""

    def charged(self, result: RunResult) -> RunResult:
        """Return the answer about the rows, with the decoding time added to the compute time of its batch. A node's
        speed is measured by that sum."""
        if not self.cost_s:
            return result
        return replace(result, compute_s=result.compute_s + self.cost_s / len(self.rows) * result.batch_images)


class FileDecoder:
    """Decodes files with one thread per core of this process. Requests take turns, so a short one does not wait for a
    long one."""

    def __init__(self) -> None:
        self._threads = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="decode")

    def close(self) -> None:
        """End the threads; what they decode is given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def decode(self, spec: TensorSpec, files: Array) -> Decoded:
        """Decode the files of a request. Cancelling it ends what is under way.

        Args:
            spec: the input; `are_files` says that it takes them.
        """
        assert spec.decode is not None
        decode, stopped = spec.decode, threading.Event()
        rows = np.empty((len(files), *spec.shape[1:]), dtype_of(spec.datatype))
        damaged: dict[int, str] = {}
        seconds: list[float] = []
        left = iter(range(len(files)))

        def some(positions: list[int]) -> None:
            began = time.thread_time()
            for position in positions:
                try:
                    rows[position] = decode(files[position], stopped)
                except InvalidInput as exc:
                    damaged[position] = str(exc)
            seconds.append(time.thread_time() - began)

        async def take_turns() -> None:
            loop = asyncio.get_running_loop()
            while positions := list(itertools.islice(left, _AT_ONCE)):
                await loop.run_in_executor(self._pool, some, positions)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._threads, len(files))):
                    group.create_task(take_turns())
        finally:
            stopped.set()
        if damaged:
            rows = rows[[position for position in range(len(files)) if position not in damaged]]
        return Decoded(rows, dict(sorted(damaged.items())), sum(seconds) / self._threads)
