"""A Ray cluster of one machine for the tests marked `ray`."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of a cluster with two cores."""
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    with (
        pytest.MonkeyPatch.context() as patch,
        # Its sockets lie in there, and their paths must be short.
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        socket.socket() as sock,
    ):
        for name, value in own.items():
            patch.setenv(name, value)
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        sock.close()
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
            *("--num-cpus=2", "--object-store-memory=200000000", "--include-dashboard=false", f"--temp-dir={folder}"),
            f"--port={port}",
        ]
        with Path(folder, "log").open("wb") as log:
            head = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        try:
            yield _address(head, Path(folder, "log"))
        finally:
            head.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(10)
            for pid in pids_of(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            head.wait(10)


def pids_of(word: str) -> list[int]:
    """Processes on whose command line it stands, but for this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def _address(head: "subprocess.Popen[bytes]", log: Path) -> str:
    """Where the cluster is, by its own word, as soon as it is there."""
    for _ in range(600):
        if found := re.search(r"ray start --address='([^']+)'", log.read_text()):
            return found[1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(0.1)
        assert head.poll() is None, log.read_text()
    raise AssertionError(log.read_text())
