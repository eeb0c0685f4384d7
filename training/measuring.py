"""Measurements of a worker's machine for the scheduler: its speed in matrix products, and its free memory."""

from __future__ import annotations

import statistics
import time

import torch

from tierkit import memory

__all__ = ["NO_MEMORY", "free_bytes", "gflops", "lacks_memory"]

NO_MEMORY = (
    "not enough memory, and what was kept is whole: lower batch_size, raise the limit of this process (ulimit -d), or "
    "use another machine; a pipeline with more ranks needs less for each"
)

_SIDE = 512
_BUDGET_S = 0.2


def lacks_memory(error: BaseException) -> bool:
    """True if an error comes from too little memory: torch raises its own for the CPU as a plain RuntimeError."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "alloc_cpu" in str(error) or "not enough memory" in str(error)


def gflops(device: str) -> float:
    """Billions of fp32 operations a second in products of matrices of 512 x 512: the median of 0.2 s, with as many
    threads as torch uses now."""
    matrix = torch.ones(_SIDE, _SIDE, device=device)
    seconds: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < _BUDGET_S or len(seconds) < 2:
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return 2 * _SIDE**3 / statistics.median(seconds) / 1e9


def free_bytes(device: str) -> int | None:
    """Memory that this process may still take, of the device; None if this system does not report it."""
    return memory.free_bytes() if device == "cpu" else int(torch.cuda.mem_get_info(device)[0])
