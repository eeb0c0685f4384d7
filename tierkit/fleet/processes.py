"""The services that launchers of this user run on this machine, as the kernel knows them (Linux)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierkit.errors import Conflict, NotFound
from tierkit.fleet.plan import SCHEDULER
from tierkit.orphan import PARENT_VARIABLE

__all__ = ["Process", "chosen", "kill_service", "launched_services", "service_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A service that a launcher has started."""

    name: str
    """The node's id, or `scheduler`."""
    pid: int
    launcher: int
    """Process id of the launcher."""


def launched_services() -> Iterator[Process]:
    """Yield the services that run now. Each is a child of the launcher that its environment names, so no other process
    counts, whatever its command line is."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            environment = (folder / "environ").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile, or may not be looked at
        name = service_of(words)
        if name is not None and f"{PARENT_VARIABLE}={parent}".encode() in environment:
            yield Process(name=name, pid=int(folder.name), launcher=parent)


def chosen(services: Sequence[Process], wanted: str) -> Process:
    """The service of a name or, as several fleets may have one of that name, of a process id.

    Raises:
        NotFound: there is none.
        Conflict: several fleets have one.
    """
    found = [one for one in services if one.name == wanted] or [one for one in services if str(one.pid) == wanted]
    if not found:
        known = ", ".join(sorted({one.name for one in services})) or "none"
        raise NotFound(f"no 'terrace up' of yours runs {wanted!r} here; what runs: {known}")
    if len(found) > 1:
        pids = ", ".join(str(one.pid) for one in found)
        raise Conflict(f"several fleets run {wanted!r} here: name the process id that 'terrace up' has shown ({pids})")
    return found[0]


def kill_service(process: Process) -> None:
    """End it at once.

    Raises:
        NotFound: it has ended by itself.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError as exc:
        raise NotFound(f"{process.name} has ended by itself") from exc
    try:
        # The number may belong to another process by now; the handle stays with the one that it was opened for.
        if process not in launched_services():
            raise NotFound(f"{process.name} has ended by itself")
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)


def service_of(words: list[str]) -> str | None:
    """Return the name of the service that a command line starts; None for another command.

    Args:
        words: the command line, Python and its flags included. `tierkit.fleet.launcher` makes it.
    """
    if "terrace" not in words:
        return None
    _, *words = words[words.index("terrace") :]
    if words[:1] == [SCHEDULER]:
        return SCHEDULER
    try:
        return words[words.index("--node-id") + 1]
    except (ValueError, IndexError):
        return None
