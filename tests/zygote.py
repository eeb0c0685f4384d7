"""Services of tests start from a process that has imported everything already: a service takes up to a second of a
core to import what it needs, and the suite starts hundreds.

After `install`, `subprocess` forks them and does not start Python again. They are processes like all others: children
of the test's process, with their own arguments, environment, folder and streams. Only in /proc they differ: their
command line is another one, and their memory has the modules of all services. Tests that look there take the fixture
`fresh_processes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["close", "fresh_processes", "install"]

_ROOT = Path(__file__).parent.parent
_PRELOADED = (
    "terrace.cli",
    "scheduler.api.app",
    "scheduler.__main__",
    "end_node.__main__",
    "edge_node.__main__",
    "cloud_node.__main__",
    "experiments.emulation.__main__",
    "models.session",
    "torch",
    "torch._dynamo",
    "terrace.commands.train",
    "training.host.__main__",
    "training.worker.node",
    "training.parallel.running",
)
_PR_SET_CHILD_SUBREAPER = 36
_BUDGET_S = 60.0
_FRESH = ("OMP_", "MKL_", "PYTHON", "ORT_", "LD_")
"""Beginnings of variables that count when Python or a library starts: if their values differ, the process is new."""

_libc = ctypes.CDLL(None, use_errno=True)
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_lock = threading.Lock()
_zygotes: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []
_off = 0


def install() -> None:
    """From now on, `python -P -m module` of this process is forked."""
    subprocess.Popen._execute_child = _forked_child  # type: ignore[attr-defined]


def close() -> None:
    """End the process that forks, and wait for it."""
    while _zygotes:
        connection, process = _zygotes.pop()
        connection.close()
        process.wait(_BUDGET_S)


@contextlib.contextmanager
def fresh_processes() -> Iterator[None]:
    """Meanwhile, services start as they do outside tests."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1


def _forked_child(self: subprocess.Popen[bytes], *given: Any) -> None:
    (args, executable, preexec, close_fds, pass_fds, cwd, env, _info, _flags, shell) = given[:10]
    pipes, (_signals, gid, gids, uid, umask, session, group) = given[10:16], given[16:]
    words = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else []
    special = preexec or pass_fds or shell or gid or gids or uid or not close_fds or (umask, group) != (-1, -1)
    if _off or special or words[:3] != [sys.executable, "-P", "-m"] or executable not in (None, sys.executable):
        _execute(self, *given)
        return
    environment = {
        os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()
    }
    names = (name for name in {*environment, *os.environ} if name.startswith(_FRESH))
    if any(environment.get(name) != os.environ.get(name) for name in names):
        _execute(self, *given)
        return
    child_read, _, _, child_write, _, child_error = pipes
    streams = [0 if child_read == -1 else child_read, 1 if child_write == -1 else child_write]
    streams.append(2 if child_error == -1 else child_error)
    asked = {"words": words[3:], "cwd": os.fspath(cwd or os.getcwd()), "environment": environment, "session": session}
    with _lock:
        zygote = _running()
        # Only meanwhile: processes that others leave behind are not for this one.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        content = json.dumps(asked).encode()
        socket.send_fds(zygote, [len(content).to_bytes(4, "big")], streams)
        zygote.sendall(content)
        answer = zygote.recv(4)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    self.pid = int.from_bytes(answer, "big")
    self._child_created = True  # type: ignore[attr-defined]
    self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _running() -> socket.socket:
    """The connection to the process that forks; it is started at the first call."""
    if not _zygotes:
        here, there = socket.socketpair()
        program = (
            f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from tests.zygote import serve; serve({there.fileno()})"
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program], stdin=subprocess.DEVNULL, pass_fds=[there.fileno()]
        )
        there.close()
        here.settimeout(_BUDGET_S)
        _zygotes.append((here, process))
    return _zygotes[0][0]


def serve(number: int) -> None:
    """Import, then fork a process for each request, until the other side is gone."""
    parent = os.getppid()
    for module in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    connection = socket.socket(fileno=number)
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 4, 3)
        if not head:
            return
        content = b""
        while len(content) < int.from_bytes(head, "big"):
            content += connection.recv(1 << 20)
        says, hears = os.pipe()
        if not (first := os.fork()):
            if os.fork():
                os._exit(0)  # the child is then adopted by the process that asked
            while os.getppid() != parent:
                os.sched_yield()
            os.close(says)
            os.write(hears, os.getpid().to_bytes(4, "big"))
            os.close(hears)
            connection.close()
            _become(json.loads(content), fds)
            return
        os.close(hears)
        for fd in fds:
            os.close(fd)
        os.waitpid(first, 0)
        pid = os.read(says, 4)
        os.close(says)
        connection.sendall(pid)


def _become(asked: dict[str, Any], fds: list[int]) -> None:
    """The program that was asked for, in this process."""
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
    for fd in fds:
        if fd > 2:
            os.close(fd)
    if asked["session"]:
        os.setsid()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    for module in [*sys.modules.values()]:
        for value in [*vars(module).values()]:
            if type(value) is random.Random:
                value.seed()  # or all would draw the same
    sys.path.remove(str(_ROOT))
    sys.orig_argv = [sys.executable, "-P", "-m", *asked["words"]]
    sys.argv = [*asked["words"]]
    for name in (asked["words"][0], asked["words"][0] + ".__main__"):
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # or runpy warns of it
    runpy.run_module(asked["words"][0], run_name="__main__", alter_sys=True)
