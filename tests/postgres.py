"""A PostgreSQL server of the tests' own, with a database for each that asks."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["PostgresServer", "running_server"]

_START_S = 30.0


class PostgresServer:
    """One that listens on a port of this machine, and can be killed and started again."""

    def __init__(self, folder: Path, binaries: Path, port: int, user: str | None) -> None:
        self.port = port
        self._folder = folder
        self._binaries = binaries
        self._as: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        self._process: subprocess.Popen[bytes] | None = None

    def initialise(self) -> None:
        words = ["--no-sync", "--auth=trust", "--username=terrace", "--encoding=UTF8", "--locale=C"]
        self._run("initdb", *words, str(self._folder / "data"))

    def start(self) -> None:
        """Returns when it takes connections."""
        settings = [
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            f"unix_socket_directories={self._folder}",
            "max_connections=200",
            "fsync=off",  # tests kill processes, never the machine
        ]
        words = [word for setting in settings for word in ("-c", setting)]
        deadline = time.monotonic() + _START_S
        while self._call("pg_isready", "-q", *self._where, "-d", "postgres").returncode:
            assert time.monotonic() < deadline, (self._folder / "log").read_text()
            # It does not start while a process of one that was killed is still there.
            if self._process is None or self._process.poll() is not None:
                with (self._folder / "log").open("ab") as log:
                    self._process = subprocess.Popen(
                        [self._binaries / "postgres", "-D", self._folder / "data", *words],
                        stdout=log,
                        stderr=log,
                        cwd=self._folder,
                        **self._as,
                    )

    def kill(self) -> None:
        """SIGKILL; the processes of its connections end themselves when they notice."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def cut(self) -> None:
        """End all connections of schedulers."""
        self.query("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'terrace'")

    def query(self, statement: str, database: str = "postgres") -> str:
        """What a statement gives, rows as lines."""
        done = self._call("psql", *self._where, "-d", database, "-At", "-v", "ON_ERROR_STOP=1", "-c", statement)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def database(self) -> str:
        """URL of a new, empty database."""
        name = f"t{uuid.uuid4().hex}"
        self.query(f"CREATE DATABASE {name}")
        return f"postgresql+asyncpg://terrace@127.0.0.1:{self.port}/{name}"

    @property
    def _where(self) -> list[str]:
        return ["-h", "127.0.0.1", "-p", str(self.port), "-U", "terrace"]

    def _call(self, program: str, *words: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [self._binaries / program, *words], cwd=self._folder, capture_output=True, check=False, **self._as
        )

    def _run(self, program: str, *words: str) -> None:
        done = self._call(program, *words)
        assert done.returncode == 0, done.stderr.decode()


def binaries() -> Path | None:
    """Where the server's programs are; None where it is not installed."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


@contextlib.contextmanager
def running_server() -> Iterator[PostgresServer | str]:
    """A server until the end of the block; a sentence where there can be none."""
    where, user = binaries(), None
    if where is None or not (where / "initdb").exists():
        yield "needs PostgreSQL (Debian: postgresql)"
        return
    if os.geteuid() == 0:  # as which it does not run
        user = next((name for name in ("postgres", "nobody") if _is_known(name)), None)
        if user is None:
            yield "needs a user other than root to run PostgreSQL as"
            return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="terrace-postgres-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresServer(folder, where, port, user)
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_known(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
