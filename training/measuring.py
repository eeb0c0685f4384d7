"""Measurements of a worker's machine for the scheduler: its speed in matrix products, and its free memory."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

__all__ = ["NO_MEMORY", "free_bytes", "gflops", "lacks_memory"]

NO_MEMORY = (
    "not enough memory, and what was kept is whole: lower batch_size, raise the limit of this process (ulimit -d), or "
    "use another machine; a pipeline with more ranks needs less for each"
)

_SIDE = 512
_BUDGET_S = 0.2
_MEMORY, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")


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


def free_bytes(device: str, meminfo: Path = _MEMORY) -> int | None:
    """Memory that this process may still take, of the device; None where this system does not tell. Limits of the
    process (`ulimit -d`, `ulimit -v`) count."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return min([_kilobytes(meminfo, "MemAvailable"), *_within_limits()])
    except (OSError, KeyError, ValueError):
        return None


def _within_limits() -> list[int]:
    """Memory until each limit of this process."""
    import resource  # not everywhere; /proc is where it is

    limits = {"VmData": resource.RLIMIT_DATA, "VmSize": resource.RLIMIT_AS}
    most = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    return [
        max(0, bound - _kilobytes(_STATUS, name)) for name, bound in most.items() if bound != resource.RLIM_INFINITY
    ]


def _kilobytes(path: Path, name: str) -> int:
    """A line of a file in /proc, in bytes."""
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return 1024 * int(lines[name].split()[0])
