"""Processes that get a share of a core, and no more: control groups of Linux (versions 1 and 2), made as root."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tierkit.errors import SetupError

__all__ = ["CoreShare", "Hierarchy", "core_shares", "hierarchies", "limits"]

_PERIOD_US = 20_000
"""In each of which a group may compute for its share. A shorter one is closer to a machine that is slower throughout;
the kernel takes shares of at least 1 ms."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where the system has its control groups."""

    folder: Path
    version: Literal[1, 2]


class CoreShare:
    """A group that exists; see `core_shares`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, pid: int) -> None:
        """Hold a process, with all its threads, and what it starts from now on, to this share.

        Raises:
            SetupError: there is no such process, or it may not be moved.
        """
        _write(self._folder / "cgroup.procs", str(pid))


def hierarchies(mounts: str) -> list[Hierarchy]:
    """Those that may limit processor time, from the text of /proc/mounts."""
    found = []
    for line in mounts.splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.append(Hierarchy(Path(folder), 2))
        elif kind == "cgroup" and "cpu" in options.split(","):
            found.append(Hierarchy(Path(folder), 1))
    return found


def limits(version: Literal[1, 2], share: float | None) -> dict[str, str]:
    """The files of a group, in the order in which they are written, that give it a share of a core before all else that
    this machine does, and no more; or, for None, as much as is left."""
    files = {"cpu.weight": "10000"} if version == 2 else {"cpu.shares": "102400"}  # a hundred times the usual
    if share is None:
        return files
    quota_us = round(share * _PERIOD_US)
    if version == 2:
        return {**files, "cpu.max": f"{quota_us} {_PERIOD_US}"}
    return {**files, "cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}


@contextmanager
def core_shares(*shares: float | None) -> Iterator[list[CoreShare]]:
    """Make groups with these shares of a core, as `limits`; they are removed on the way out, when their processes must
    have ended.

    Raises:
        SetupError: this system has no control groups of processor time, or this user may make none.
    """
    try:
        found = hierarchies(Path("/proc/mounts").read_text())
    except OSError:
        found = []
    root = next((each for each in found if _limits_time(each)), None)
    if root is None:
        raise SetupError(
            "this system has no control groups that limit processor time (Linux, the controller cpu): run it elsewhere"
        )
    with ExitStack() as stack:
        made = []
        for share in shares:
            folder = root.folder / f"terrace-{secrets.token_hex(8)}"
            try:
                folder.mkdir()
            except OSError as exc:
                raise SetupError(
                    f"cannot make a control group in {root.folder}: {exc.strerror}; run it as root"
                ) from exc
            stack.callback(folder.rmdir)
            for name, text in limits(root.version, share).items():
                _write(folder / name, text)
            made.append(CoreShare(folder))
        yield made


def _limits_time(hierarchy: Hierarchy) -> bool:
    if hierarchy.version == 1:
        return True
    try:
        return "cpu" in (hierarchy.folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _write(file: Path, text: str) -> None:
    try:
        # No O_CREAT: these files are the kernel's.
        descriptor = os.open(file, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise SetupError(f"cannot write {text!r} to {file}: {exc.strerror}; run it as root") from exc
