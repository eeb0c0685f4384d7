"""Memory that was needed once, memory that stays, and memory that is free."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_bytes", "give_back", "importing"]

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files with the limit and the use of a control group, and the line of `memory.stat` with what the system gives back
when it is needed."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; others give memory back by themselves


def give_back() -> None:
    """Return to the system what has been freed: the allocator keeps some hundred megabytes after a large picture or
    body. Takes milliseconds, and lets other threads run."""
    if _trim is not None:
        _trim(0)


@contextlib.contextmanager
def importing(*, freeze: bool = False) -> Iterator[None]:
    """Import modules without garbage collection, which takes a fifth of the time that a service needs to start.

    Args:
        freeze: keep what exists now from all later collections. This saves another fifth, and suits services, which
            never unload a module.
    """
    gc.disable()
    try:
        yield
        if freeze:
            gc.freeze()
    finally:
        gc.enable()


def free_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Memory that this process may still take; None if this system does not report it.

    Limits of the process (`ulimit -d`, `ulimit -v`) and of its control groups (containers, systemd) count.
    """
    try:
        return min([_kilobytes(proc / "meminfo", "MemAvailable"), *_to_limits(proc), *_to_group_limits(proc, cgroups)])
    except (OSError, KeyError, ValueError):
        return None


def _to_limits(proc: Path) -> list[int]:
    """Memory until each limit of this process."""
    import resource  # not everywhere; /proc is where it is

    limits = {"VmData": resource.RLIMIT_DATA, "VmSize": resource.RLIMIT_AS}
    most = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    return [
        max(0, bound - _kilobytes(proc / "self" / "status", name))
        for name, bound in most.items()
        if bound != resource.RLIM_INFINITY
    ]


def _to_group_limits(proc: Path, cgroups: Path) -> list[int]:
    """Memory until the limit of each control group that this process is in, and of those around them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # a system without them
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, names = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
            # Inside a container the path may be of the machine outside; then only the root is there.
            group = Path(os.path.normpath(root / path.lstrip("/")))
            for folder in (group, *group.parents):
                if folder != root and root not in folder.parents:
                    break
                with contextlib.suppress(OSError, KeyError, ValueError):  # no limit, or none that is told
                    found.append(_in_group(folder, *names))
    return found


def _in_group(folder: Path, limit: str, use: str, reclaimable: str) -> int:
    """Memory until the limit of a group. Raises ValueError without a limit."""
    most, used = (int((folder / name).read_text()) for name in (limit, use))
    lines = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    return max(0, most - used + int(lines[reclaimable]))


def _kilobytes(path: Path, name: str) -> int:
    """A line of a file in /proc, in bytes."""
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return 1024 * int(lines[name].split()[0])
