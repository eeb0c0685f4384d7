"""A service as a process: how it starts, drains, fails and exits."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest

from tierkit.http.address import free_port
from tierkit.testing import ServiceProcess, service_process, wait_for

SERVICE = str(Path(__file__).with_name("service_under_test.py"))


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        yield client


def start(tmp_path: Path, *flags: str, wait_ready: bool = True) -> AbstractAsyncContextManager[ServiceProcess]:
    return service_process([SERVICE, *flags], ready_file=tmp_path / "ready.json", wait_ready=wait_ready)


def left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def work_under_way(http: httpx.AsyncClient, service: ServiceProcess) -> "asyncio.Task[httpx.Response]":
    """A request that the service is answering, and goes on answering until /release."""
    request = asyncio.create_task(http.post(f"{service.url}/work"))

    async def begun() -> bool:
        return bool((await http.get(f"{service.url}/healthz")).json()["in_flight"])

    await wait_for(begun, what="the request to begin")
    return request


async def test_the_ready_file_says_where_the_service_is(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with start(tmp_path) as service:
        assert service.ready == {"url": service.url, "pid": service.process.pid, "node_id": "sample-1"}
        assert (await http.get(f"{service.url}/readyz")).json()["status"] == "ready"
        service.terminate()
        assert await service.exit_code() == 0
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_refuses_and_exits_with_0(
    tmp_path: Path, http: httpx.AsyncClient, number: signal.Signals
) -> None:
    async with start(tmp_path) as service:
        request = await work_under_way(http, service)
        service.process.send_signal(number)

        async def draining() -> bool:
            return (await http.get(f"{service.url}/readyz")).status_code == 503

        await wait_for(draining, what="readyz to turn 503")
        assert (await http.get(f"{service.url}/livez")).status_code == 200
        refused = await http.post(f"{service.url}/work")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "shutting down" in refused.json()["error"]
        assert not request.done()

        await http.get(f"{service.url}/release")
        assert (await request).json() == {"done": True}
        assert await service.exit_code() == 0


async def test_drain_time_is_a_bound(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with start(tmp_path, "--drain-s", "0.2") as service:
        request = await work_under_way(http, service)
        service.terminate()
        assert await service.exit_code() == 0
        with pytest.raises(httpx.HTTPError):
            (await request).raise_for_status()
        assert "drain time is over" in service.log


async def test_a_second_signal_stops_at_once(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with start(tmp_path, "--drain-s", "60") as service:
        request = await work_under_way(http, service)
        service.terminate()
        await wait_for(lambda: "draining" in service.log, what="the drain to begin")
        service.terminate()
        assert await service.exit_code(timeout_s=5) == 128 + signal.SIGTERM
        assert not (tmp_path / "ready.json").exists()
        with pytest.raises(httpx.TransportError):
            await request


async def test_a_crashed_loop_stops_the_service_loudly(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with start(tmp_path) as service:
        await http.post(f"{service.url}/crash")
        assert await service.exit_code() == 1
        assert "the background loop 'sample loop' crashed" in service.log
        assert "ZeroDivisionError: the loop divides by nothing" in service.log


async def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with start(tmp_path, "--port", port, wait_ready=False) as service:
            assert await service.exit_code() == 75
        assert service.log == (
            f"terrace sample: port {port} on 127.0.0.1 is in use by another process; stop it, "
            "or choose another port with --port (0 takes a free one)\n"
        )


async def test_the_ready_file_of_the_one_that_has_the_port_stays(tmp_path: Path) -> None:
    async with start(tmp_path) as service:
        port = service.url.rpartition(":")[2]
        async with start(tmp_path, "--port", port, wait_ready=False) as second:
            assert await second.exit_code() == 75
        assert json.loads((tmp_path / "ready.json").read_text())["pid"] == service.process.pid


@pytest.mark.parametrize(
    ("flags", "sentence", "code"),
    [
        (["--start", "fails"], "the weights are gone; run 'terrace doctor'", 2),
        (["--host", "no.such.host.invalid"], "the host 'no.such.host.invalid' is unknown", 75),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1", 75),
    ],
)
async def test_what_is_missing_at_the_start_is_one_sentence(
    tmp_path: Path, flags: list[str], sentence: str, code: int
) -> None:
    async with start(tmp_path, *flags, wait_ready=False) as service:
        assert await service.exit_code() == code
    assert service.log.startswith(f"terrace sample: {sentence}")
    assert service.log.count("\n") == 1


async def test_a_ready_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with service_process([SERVICE], ready_file=tmp_path / "file" / "ready.json", wait_ready=False) as service:
        assert await service.exit_code() == 2
    assert "cannot write the ready file" in service.log
    assert service.log.count("\n") == 1


async def test_while_it_loads_it_is_alive_but_not_ready_and_stops_at_once(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with start(tmp_path, "--start", "hangs", "--port", str(port), wait_ready=False) as service:

        async def alive() -> bool:
            try:
                return (await http.get(f"{url}/livez")).status_code == 200
            except httpx.TransportError:
                return False

        await wait_for(alive, what="livez")
        assert (await http.get(f"{url}/readyz")).json()["status"] == "starting"
        refused = await http.post(f"{url}/work")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        service.terminate()
        assert await service.exit_code(timeout_s=5) == 0


async def test_while_it_starts_nobody_is_told_that_their_token_is_wrong(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    """A page whose session this service will know again would take it for the end of the session."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    tokens = tmp_path / "tokens.toml"
    tokens.touch(mode=0o600)
    tokens.write_text("# nobody yet\n")
    options = ("--start", "hangs", "--port", str(port), "--tokens", str(tokens))
    async with start(tmp_path, *options, wait_ready=False):

        async def answers() -> bool:
            try:
                return (await http.get(f"{url}/livez")).status_code == 200
            except httpx.TransportError:
                return False

        await wait_for(answers, what="livez")
        for method, path, status in (("GET", "/", 503), ("POST", "/work", 503), ("GET", "/metrics", 401)):
            assert (await http.request(method, url + path)).status_code == status


async def test_a_stale_ready_file_is_removed_first(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid(), "node_id": "old"}))
    async with start(tmp_path, "--start", "hangs", wait_ready=False):
        await wait_for(lambda: not ready.exists(), what="the stale file to go")
