"""What a worker that the scheduler has sent shows to the host of a run: never its token, and nothing without https."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tests.training_runs import report, start
from tierkit.access import TICKET_HEADER, TokenEntry, digest_of, new_token, write_book
from tierkit.client import AsyncClient
from tierkit.errors import TerraceError
from tierkit.testing import ServiceProcess, service_process, wait_for
from tierkit.wire.runs import WorkerOffer
from training.worker.finding import through
from training.worker.node import WorkerOptions, work

pytestmark = pytest.mark.train

ALICE, VIC, VOL = (new_token() for _ in range(3))


def book(*names: str) -> str:
    tokens = {"alice": ("user", ALICE), "vic": ("worker", VIC), "vol": ("worker", VOL)}
    return write_book(
        TokenEntry.model_validate({"name": name, "role": role, "sha256": digest_of(token.encode()).hex()})
        for name, (role, token) in tokens.items()
        if name in names
    )


def private(path: Path, content: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(content)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Thief:
    """A server of a user's, who wants to see tokens."""

    url: str
    got: list[dict[str, str]] = field(default_factory=list)


@pytest.fixture
def thief() -> Iterator[Thief]:
    with stealing() as found:
        yield found


@contextmanager
def stealing(location: str = "") -> Iterator[Thief]:
    """Answers that it is busy, or sends callers elsewhere."""
    got: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(dict(self.headers))
            self.send_response(307 if location else 401)
            if location:
                self.send_header("Location", f"{location}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_DELETE = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Thief(url=f"http://127.0.0.1:{server.server_port}", got=got)
        server.shutdown()


@asynccontextmanager
async def scheduler(folder: Path, *flags: str, ready: str = "s.ready") -> AsyncIterator[ServiceProcess]:
    tokens = folder / "tokens.toml"
    if not tokens.exists():
        private(tokens, book("alice", "vic", "vol"))
    command = ["-m", "terrace", "scheduler", f"--state={folder / 'state'}", f"--tokens={tokens}", *flags]
    async with service_process(command, ready_file=folder / ready) as process:
        yield process


async def steal(url: str, thief: Thief, **client: Any) -> None:
    """A worker goes to the run that a user has made up."""
    async with AsyncClient(url, token=ALICE, **client) as alice:
        run = start(url=thief.url)
        async with httpx.AsyncClient(verify=False, headers={"Authorization": f"Bearer {ALICE}"}) as http:
            assert (await http.post(f"{url}/v1/runs", json=run)).status_code == 201
            await http.put(f"{url}/v1/runs/{run['id']}/report", json=report(workers=[]))
        assert (await alice.run(run["id"])).url == thief.url
        find = through(url, WorkerOffer(name="vic", run=run["id"]), lambda: VIC, client.get("tls_ca"))
        options = WorkerOptions(find_host=find, name="vic", token=lambda: VIC, patience_s=1.0, **client)
        with pytest.raises(TerraceError) as caught:
            await work(options)
        assert VIC not in str(caught.value)


async def test_a_made_up_host_gets_a_ticket_for_itself_alone(tmp_path: Path, thief: Thief) -> None:
    async with scheduler(tmp_path, "--port=0") as process:
        with stealing(location=thief.url) as leads_on:
            await steal(process.url, leads_on)
            assert leads_on.got
            assert thief.got == []
        await steal(process.url, thief)
        assert all("Authorization" not in headers and VIC not in str(headers) for headers in thief.got)
        tickets = {headers[TICKET_HEADER] for headers in thief.got}
        async with httpx.AsyncClient(base_url=process.url) as http:
            for ticket in tickets:
                for shown in ({TICKET_HEADER: ticket}, {"Authorization": f"Bearer {ticket}"}):
                    assert (await http.get("/v1/whoami", headers=shown)).status_code == 401


async def test_nothing_is_sent_in_the_clear_where_the_scheduler_has_https(tmp_path: Path, thief: Thief) -> None:
    authority = trustme.CA()
    cert = authority.issue_cert("127.0.0.1")
    ca, pem, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(ca))
    cert.cert_chain_pems[0].write_to_path(str(pem))
    private(key, cert.private_key_pem.bytes().decode())
    async with scheduler(tmp_path, "--port=0", f"--tls-cert={pem}", f"--tls-key={key}") as process:
        assert process.url.startswith("https://")
        await steal(process.url, thief, tls_ca=ca)
    assert thief.got == []


async def test_hosts_take_tickets_of_their_run_beside_their_own_tokens(
    tmp_path: Path, shapes: Path, network: Callable[[int], Path]
) -> None:
    """Its own tokens are others than the scheduler's; it is started again, and so is the scheduler."""
    alice = private(tmp_path / "alice.token", ALICE)
    vic = private(tmp_path / "vic.token", VIC)
    own = private(tmp_path / "host.toml", book("vol"))
    command = ["-m", "terrace", "train", "host", f"--network={network(4_000)}", f"--dataset={shapes}", "--port=0"]
    command += ["--strategy=sgd", f"--folder={tmp_path / 'run'}", f"--tokens={own}", f"--token-file={alice}"]
    worker = ["-m", "terrace", "train", "work", f"--token-file={vic}", "--name=vic", f"--dataset={shapes}"]
    async with AsyncExitStack() as stack, httpx.AsyncClient(timeout=30) as http:
        first = await stack.enter_async_context(scheduler(tmp_path, "--port=0"))
        url = first.url
        command.append(f"--scheduler={url}")
        client = await stack.enter_async_context(AsyncClient(url, token=ALICE))

        async def matched(name: str = "vic", token: str = VIC) -> tuple[str, str]:
            async with AsyncClient(url, token=token) as asking:
                found = await asking.match(WorkerOffer(name=name))
                return found.urls[0], found.ticket

        async def join(name: str, shown: dict[str, str]) -> int:
            at, _ = await matched("vol", VOL)
            body = {"name": name, "incarnation": "1" * 16, "data_sha256": "0"}
            return (await http.post(f"{at}/v1/workers", json=body, headers=shown)).status_code

        async def goes_on() -> None:
            run = (await client.runs()).runs[0]

            async def done() -> bool:
                return (await client.run(run)).done > run.done + 20

            await wait_for(done, timeout_s=60, what="updates")

        async with service_process(command, ready_file=tmp_path / "h1") as host:

            async def begun() -> bool:
                return bool((await client.runs()).runs)

            await wait_for(begun, timeout_s=30, what="the run")
            _, ticket = await matched()
            # 409: it has come in, and its images are others.
            assert await join("vic", {TICKET_HEADER: ticket}) == 409
            assert await join("vol", {TICKET_HEADER: ticket}) == 403
            assert await join("vol", {TICKET_HEADER: (await matched("vol", VOL))[1]}) == 409
            assert await join("vol", {"Authorization": f"Bearer {VOL}"}) == 409
            assert await join("vic", {"Authorization": f"Bearer {VIC}"}) == 401
            assert await join("vic", {}) == 401
            working = await asyncio.create_subprocess_exec(sys.executable, "-P", *worker, f"--scheduler={url}")
            stack.callback(_end, working)
            await goes_on()
            host.kill()
            await host.exit_code()
        async with service_process(command, ready_file=tmp_path / "h2"):
            await goes_on()
            assert await join("vic", {TICKET_HEADER: ticket}) == 409
            first.terminate()
            await first.exit_code()
            await stack.enter_async_context(
                scheduler(tmp_path, f"--port={url.rpartition(':')[2]}", ready="another.ready")
            )
            await goes_on()
            assert await join("vic", {TICKET_HEADER: (await matched())[1]}) == 409
            private(tmp_path / "tokens.toml", book("alice", "vol"))  # vic's is revoked
            assert await asyncio.wait_for(working.wait(), 60) != 0

            async def refused() -> bool:
                return await join("vic", {TICKET_HEADER: ticket}) == 401

            await wait_for(refused, timeout_s=30, what="the host's refusal")


def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
