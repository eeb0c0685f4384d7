"""How a worker finds its host through a scheduler, and what it shows there: both are played by small servers."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tierkit.access import TICKET_HEADER
from tierkit.errors import DeadlineExceeded, InvalidAnswer, NotFound, SetupError, TerraceError, Unauthenticated
from tierkit.http.client import open_client
from tierkit.wire.runs import WorkerOffer
from training.worker.connection import HostConnection
from training.worker.finding import through
from training.worker.patience import HostRetry

RUN = "a" * 32
TOKEN = "terrace_the-token-of-a-worker"


@dataclass(slots=True)
class Played:
    """A server: answers are chosen by the test."""

    url: str = ""
    answer: Callable[[], tuple[int, Any]] = lambda: (404, {"error": "nothing"})
    asked: list[dict[str, str]] = field(default_factory=list)
    """Headers."""


@contextmanager
def playing(tls: ssl.SSLContext | None = None) -> Iterator[Played]:
    played = Played()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            played.asked.append(dict(self.headers))
            status, content = played.answer()
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        played.url = f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"
        yield played
        server.shutdown()


def match(*urls: str, **more: Any) -> dict[str, Any]:
    return {"run": RUN, "network": "net", "strategy": "sgd", "urls": urls, **more}


async def asked(scheduler: Played, times: int, *, ca: Path | None = None) -> list[TerraceError]:
    """A worker asks its host for the run; what it was told."""
    find = through(scheduler.url, WorkerOffer(name="pi"), lambda: TOKEN, ca)
    told: list[TerraceError] = []
    async with open_client(tls_ca=ca) as http:
        connection = HostConnection("pi", "1" * 16, http, lambda: TOKEN)
        patience = HostRetry(0.0, connection, find)
        for _ in range(times):
            with pytest.raises(TerraceError) as caught:
                await patience.have(connection.spec)
            told.append(caught.value)
    return told


async def test_a_ticket_is_renewed_in_time_and_kept_while_the_scheduler_is_away() -> None:
    with playing() as scheduler, playing() as host:
        left = iter([(200, match(host.url, ticket=f"ticket-{number}", ticket_s=0.0)) for number in range(3)])
        scheduler.answer = lambda: next(left, (503, {"error": "away"}))
        assert [type(each) for each in await asked(scheduler, 5)] == [NotFound] * 5
        assert [each[TICKET_HEADER] for each in host.asked] == ["ticket-0", "ticket-1", "ticket-2", *["ticket-2"] * 2]
        assert all(each["Authorization"] == f"Bearer {TOKEN}" for each in scheduler.asked)
        assert not any(TOKEN in str(each) for each in host.asked)


async def test_a_host_that_refuses_a_ticket_is_given_another_one_or_up() -> None:
    with playing() as scheduler, playing() as host:
        host.answer = lambda: (401, {"error": "a token is needed"})
        scheduler.answer = lambda: (200, match(host.url, ticket="ticket", ticket_s=60.0))
        (gave_up,) = await asked(scheduler, 1)
        assert isinstance(gave_up, DeadlineExceeded)
        scheduler.answer = lambda: (401, {"error": "the token was revoked"})
        assert isinstance((await asked(scheduler, 1))[0], Unauthenticated)
        # A scheduler that asks for no tokens gives no tickets; the host still gets no token.
        scheduler.answer = lambda: (200, match(host.url))
        (refused,) = await asked(scheduler, 1)
        assert isinstance(refused, Unauthenticated)
        assert "--token-file" in str(refused)
        assert not any("Authorization" in each for each in host.asked)


@pytest.mark.parametrize(
    "wrong", [{"urls": []}, {"ticket": "x\r\nX: y"}, {"urls": ["http://127.0.0.1:1/\n"]}, {"run": "x"}]
)
async def test_a_scheduler_that_names_no_place_is_told_apart(wrong: dict[str, Any]) -> None:
    with playing() as scheduler, playing() as host:
        scheduler.answer = lambda: (200, {**match(host.url), **wrong})
        (refused,) = await asked(scheduler, 1)
        assert isinstance(refused, InvalidAnswer)
        assert host.asked == []


async def test_a_scheduler_with_https_that_names_hosts_without_leads_nowhere(tmp_path: Path) -> None:
    """As one behind a proxy does that says nothing of its own https."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with playing(context) as scheduler, playing() as host, playing(context) as safe:
        scheduler.answer = lambda: (200, match(host.url, ticket="ticket", ticket_s=60.0))
        (refused,) = await asked(scheduler, 1, ca=tmp_path / "ca.pem")
        assert isinstance(refused, SetupError)
        assert "--tls-cert" in str(refused)
        scheduler.answer = lambda: (200, match(host.url, safe.url, ticket="ticket", ticket_s=60.0))
        assert isinstance((await asked(scheduler, 1, ca=tmp_path / "ca.pem"))[0], NotFound)
        assert (host.asked, len(safe.asked)) == ([], 1)
