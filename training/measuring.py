"""Measurements of a worker's machine for the scheduler: its speed in matrix products, and its free memory."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

__all__ = ["free_bytes", "gflops"]

_SIDE = 512
_BUDGET_S = 0.2
_MEMORY = Path("/proc/meminfo")


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
    """Memory that a process may still take, of the device; None where this system does not tell."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
