"""A scheduler that asks for tokens, with an end node."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from anyio.from_thread import BlockingPortal

from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.testing import ServiceProcess, service_process

ALICE, PI, BOB = (new_token() for _ in range(3))
NODE, JOB = "pi-of-alice", "job-of-alice"


class Hub:
    """A scheduler process that can be killed and started again at the same address, and an end node.

    Args:
        folder: holds the state and the tokens.
    """

    def __init__(self, portal: BlockingPortal, folder: Path) -> None:
        self._portal, self._folder = portal, folder
        self._starts = 0
        self._stack = ExitStack()
        book = [
            TokenEntry(name="alice", role="operator", sha256=digest_of(ALICE.encode()).hex()),
            TokenEntry(name="bob", role="user", sha256=digest_of(BOB.encode()).hex()),
            TokenEntry(name="pi", role="node", sha256=digest_of(PI.encode()).hex()),
        ]
        self._write("tokens.toml", write_book(book))
        self._write("pi.token", PI)

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        path.touch(mode=0o600)
        path.write_text(text)

    def _started(self, service: str, *options: str) -> AbstractContextManager[ServiceProcess]:
        self._starts += 1
        ready = self._folder / f"ready-{self._starts}"
        return self._portal.wrap_async_context_manager(
            service_process(["-m", "terrace", service, *options], ready_file=ready)
        )

    def start(self, port: str = "0") -> None:
        options = [f"--state={self._folder / 'state'}", f"--port={port}", f"--tokens={self._folder / 'tokens.toml'}"]
        self._process = self._stack.enter_context(self._started("scheduler", *options))
        self.url = self._process.url

    def add_node(self) -> None:
        options = [
            f"--scheduler={self.url}",
            "--node-id",
            NODE,
            "--port=0",
            f"--token-file={self._folder / 'pi.token'}",
        ]
        self._stack.enter_context(self._started("end", *options))

    def kill(self) -> None:
        self._process.kill()
        self._portal.call(self._process.exit_code)

    def start_again(self) -> None:
        self.start(self.url.rpartition(":")[2])

    def close(self) -> None:
        self._stack.close()
