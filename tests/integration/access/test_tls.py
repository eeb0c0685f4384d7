"""TLS on real sockets: who is believed, what is said when it fails, and what hostile clients get."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import trustme
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from experiments.bench.http import Connection, ConnectionBroken, Origin, encode_http
from experiments.emulation.links import read_links
from experiments.emulation.middleware import LinkMiddleware
from scheduler.core import events
from scheduler.core.fleet import Ledger
from scheduler.core.health import DetectorTimes
from scheduler.devices.watch import Watch
from terrace.checks import _check_certificate
from terrace.findings import CheckVerdict
from tests.unit.scheduler.test_devices import Machine
from tierkit.access import client_context
from tierkit.client import AsyncClient, Backoff
from tierkit.errors import CertificateError, SetupError, UpstreamUnavailable
from tierkit.http import protocol
from tierkit.http.client import ask, calling, open_client
from tierkit.settings import ServiceSettings
from tierkit.testing import connected, serve_app, wait_for
from tierkit.types import Tier
from tierkit.wire.messages import ModelOffer, Registration


async def echo(request: Request) -> Response:
    return JSONResponse({"scheme": request.url.scheme, "bytes": len(await request.body())})


APP = Starlette(routes=[Route("/echo", echo, methods=["GET", "POST"])])


def settings(certificate: dict[str, Path], **values: Any) -> ServiceSettings:
    return ServiceSettings.model_validate({"drain_s": 2.0, **certificate, **values})


@pytest.fixture
def good(certificates: Any) -> dict[str, Path]:
    made: dict[str, Path] = certificates.issue("good")
    return made


async def test_requests_pass_and_the_application_knows_the_scheme(good: dict[str, Path], certificates: Any) -> None:
    async with serve_app(APP, settings(good)) as service, open_client(tls_ca=certificates.ca) as http:
        assert service.url.startswith("https://127.0.0.1:")
        for size in (0, 1, 100_000, 5_000_000):
            async with ask(http, "POST", f"{service.url}/echo", [bytes(size)]) as answer:
                assert await answer.json() == {"scheme": "https", "bytes": size}


async def test_emulated_links_carry_tls(good: dict[str, Path], certificates: Any, tmp_path: Path) -> None:
    links = tmp_path / "links.toml"
    links.write_text('[[link]]\nname = "slow"\nto = ["127.0.0.1"]\ndelay_s = 0.05\n')
    slow = LinkMiddleware(read_links(links))
    client = open_client(tls_ca=certificates.ca, middlewares=[slow])
    async with serve_app(APP, settings(good)) as service, client as http:
        began = time.perf_counter()
        async with ask(http, "POST", f"{service.url}/echo", [bytes(1000)]) as answer:
            assert await answer.json() == {"scheme": "https", "bytes": 1000}
        assert time.perf_counter() - began >= 0.09  # an event loop counts in milliseconds


async def test_answers_before_the_body_and_closed_connections(
    good: dict[str, Path], certificates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server does by half-closing a plain connection must work where TLS cannot."""
    monkeypatch.setattr(protocol, "_LINGER_S", 0.05)
    async with serve_app(APP, settings(good, max_body_bytes=1000, header_timeout_s=0.3)) as service:
        for sent, status in (
            (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", b"413"),
            (b"GARBAGE\r\n\r\n", b"400"),
            (b"GET /echo HTTP/1.1\r\nHost", b"408"),
        ):
            async with connected(service.url, tls=client_context(certificates.ca)) as (reader, writer):
                writer.write(sent)
                async with asyncio.timeout(5):
                    answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 " + status), answer


@pytest.mark.parametrize(
    ("hosts", "valid_for", "trusted", "words"),
    [
        (("127.0.0.1",), timedelta(days=-1), True, "has expired: renew it there"),
        (("other.example",), timedelta(days=1), True, "is for another host"),
        (("10.1.2.3",), timedelta(days=1), True, "is for another host"),
        (("127.0.0.1",), timedelta(days=1), False, "is signed by no authority that is trusted here"),
    ],
    ids=["expired", "other name", "other address", "foreign authority"],
)
async def test_a_certificate_that_proves_nothing(
    hosts: tuple[str, ...], valid_for: timedelta, trusted: bool, words: str, certificates: Any
) -> None:
    bad = certificates.issue("bad", *hosts, valid_for=valid_for)
    ca = certificates.ca if trusted else None
    async with serve_app(APP, settings(bad)) as service, open_client(tls_ca=ca) as http:
        with pytest.raises(CertificateError, match=f"^the certificate of the peer {words}"):
            async with calling("the peer", budget_s=5):
                await http.get(f"{service.url}/echo")
        async with AsyncClient(service.url, tls_ca=ca) as client:
            with pytest.raises(CertificateError, match=f"the certificate of the scheduler at {service.url} {words}"):
                await client.info()
        async with Connection(Origin.parse(service.url, tls_ca=ca)) as connection:
            with pytest.raises(ConnectionBroken, match=words):
                await connection.connect()


async def test_a_self_signed_certificate_is_believed_where_it_is_named(tmp_path: Path) -> None:
    cert, key = tmp_path / "self.pem", tmp_path / "self.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=hub "
        f"-keyout {key} -out {cert} -addext subjectAltName=IP:127.0.0.1"
    )
    made = await asyncio.create_subprocess_exec(*command.split(), stderr=asyncio.subprocess.DEVNULL)
    assert await made.wait() == 0
    async with serve_app(APP, settings({"tls_cert": cert, "tls_key": key})) as service:
        async with open_client(tls_ca=cert) as http:
            assert (await http.get(f"{service.url}/echo")).status == 200
        async with open_client() as http:
            with pytest.raises(CertificateError, match=r"self-signed or comes from an authority of your own.*--tls-ca"):
                async with calling("the peer", budget_s=5):
                    await http.get(f"{service.url}/echo")


async def test_plain_and_tls_do_not_meet_and_say_so(good: dict[str, Path], certificates: Any) -> None:
    backoff = Backoff(attempts=1)
    async with serve_app(APP, settings(good)) as closed, serve_app(APP) as plain:
        async with AsyncClient(plain.url.replace("http:", "https:"), tls_ca=certificates.ca, backoff=backoff) as client:
            with pytest.raises(CertificateError, match="does not speak TLS: write http:// in its URL"):
                await client.info()
        async with AsyncClient(closed.url.replace("https:", "http:"), backoff=backoff) as client:
            with pytest.raises(UpstreamUnavailable, match="if it serves TLS, its URL begins with https://"):
                await client.info()


async def test_the_load_generator_speaks_tls(good: dict[str, Path], certificates: Any) -> None:
    async with serve_app(APP, settings(good)) as service:
        origin = Origin.parse(service.url, tls_ca=certificates.ca)
        async with Connection(origin) as connection:
            for _ in range(3):
                reply = await connection.request(encode_http("GET", origin, "/echo"), timeout_s=5)
                assert reply.status == 200


async def test_silent_handshakes_end_in_time_and_do_not_keep_others_out(
    good: dict[str, Path], certificates: Any
) -> None:
    async with (
        serve_app(APP, settings(good, header_timeout_s=0.5, max_connections=20)) as service,
        open_client(tls_ca=certificates.ca) as http,
        AsyncExitStack() as stack,
    ):
        silent = [await stack.enter_async_context(connected(service.url)) for _ in range(60)]
        for _, writer in silent[:20]:
            writer.write(b"\x16\x03\x01\x02\x00")  # the beginning of a ClientHello
        for _, writer in silent[20:30]:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await http.get(f"{service.url}/echo")).status == 200
        async with asyncio.timeout(5):
            for reader, _ in silent:
                try:
                    while await reader.read(1000):
                        pass  # an alert
                except ConnectionError:
                    pass
        assert (await http.get(f"{service.url}/echo")).status == 200


async def test_connections_in_their_handshake_are_bounded(good: dict[str, Path]) -> None:
    async with serve_app(APP, settings(good, max_connections=1)) as service, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connected(service.url)) for _ in range(80)]  # 65 have room
        closed = 0
        for reader, _ in silent:
            try:
                async with asyncio.timeout(0.02):
                    closed += not await reader.read(1)
            except (TimeoutError, ConnectionError) as exc:
                closed += isinstance(exc, ConnectionError)
        assert closed == 15


async def test_a_renewed_certificate_is_used_without_a_restart(certificates: Any) -> None:
    old = certificates.issue("renewed", valid_for=timedelta(days=-1))
    async with serve_app(APP, settings(old)) as service:

        async def is_valid() -> bool:
            async with open_client(tls_ca=certificates.ca) as http:
                try:
                    return (await http.get(f"{service.url}/livez")).status == 200
                except aiohttp.ClientConnectorError:
                    return False

        assert not await is_valid()
        certificates.issue("renewed")
        await wait_for(is_valid, what="the new certificate")


async def test_an_authority_that_is_added_is_trusted_without_a_restart(
    certificates: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trusted, other = tmp_path / "trusted.pem", trustme.CA()
    trusted.write_bytes(certificates.ca.read_bytes())
    foreign = tmp_path / "foreign.pem"
    foreign.touch(0o600)
    foreign.write_bytes(other.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes())

    async with (
        serve_app(APP, settings({}, tls_ca=trusted)),
        serve_app(APP, settings({"tls_cert": foreign})) as callee,
        open_client(tls_ca=trusted) as http,  # as the application of a service has it
    ):

        async def is_trusted() -> bool:
            try:
                return (await http.get(f"{callee.url}/livez")).status == 200
            except aiohttp.ClientConnectorError:
                return False

        assert not await is_trusted()
        trusted.write_text("nothing")
        await wait_for(lambda: "holds no certificate (PEM) to trust" in caplog.text, what="the refusal of the file")
        trusted.write_bytes(certificates.ca.read_bytes() + other.cert_pem.bytes())
        await wait_for(is_trusted, what="the new authority")


async def test_the_doctor_tells_when_a_certificate_expires(certificates: Any) -> None:
    soon = certificates.issue("soon", valid_for=timedelta(days=3, hours=1))
    async with serve_app(APP, settings(soon)) as service:
        (check,) = await to_thread.run_sync(lambda: list(_check_certificate("scheduler", service.url, certificates.ca)))
    assert (check.verdict, check.detail) == (CheckVerdict.NOTE, "certificate expires in 3 days")


async def test_the_service_stops_with_connections_open(good: dict[str, Path], certificates: Any) -> None:
    async with AsyncExitStack() as clients:
        async with serve_app(APP, settings(good, drain_s=0.5)) as service:
            await clients.enter_async_context(connected(service.url, tls=client_context(certificates.ca)))
            await clients.enter_async_context(connected(service.url))
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", httpx.URL(service.url).port or 0)) != 0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda cert, key: cert.write_text("nothing"), "is not a usable PEM file"),
        (lambda cert, key: key.write_text(""), "is not a usable PEM file"),
        (lambda cert, key: key.unlink(), "cannot read the TLS certificate .* No such file"),
        (lambda cert, key: key.chmod(0o644), r"others may use the TLS key .* \(mode 0644\): chmod 0640"),
    ],
)
async def test_unusable_files_are_refused_at_start(damage: Any, words: str, certificates: Any) -> None:
    made = certificates.issue("damaged")
    damage(*made.values())
    with pytest.raises(SetupError, match=words):
        async with serve_app(APP, settings(made)):
            pass


async def test_a_key_of_another_certificate_is_refused_at_start(certificates: Any) -> None:
    mixed = {**certificates.issue("one"), "tls_key": certificates.issue("two")["tls_key"]}
    with pytest.raises(SetupError, match="does not belong to the certificate"):
        async with serve_app(APP, settings(mixed)):
            pass


async def test_an_encrypted_key_is_refused_without_asking_the_terminal(certificates: Any, tmp_path: Path) -> None:
    made = certificates.issue("encrypted")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", str(made["tls_key"]), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    assert await (await asyncio.create_subprocess_exec(*command)).wait() == 0
    os.chmod(locked, 0o600)
    with pytest.raises(SetupError, match="the TLS key is encrypted"):
        async with serve_app(APP, settings({**made, "tls_key": locked})):
            pass


def test_what_is_to_be_trusted_must_be_certificates(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    with pytest.raises(SetupError, match="cannot read the certificates to trust"):
        client_context(nothing)
    nothing.write_text("nothing")
    with pytest.raises(SetupError, match="holds no certificate"):
        client_context(nothing)


def test_old_versions_of_tls_are_not_spoken(certificates: Any) -> None:
    assert client_context(certificates.ca).minimum_version == ssl.TLSVersion.TLSv1_2
    assert client_context(certificates.ca).check_hostname
    assert client_context(certificates.ca).verify_mode is ssl.CERT_REQUIRED


async def test_the_scheduler_says_once_whose_certificate_it_does_not_trust(
    certificates: Any, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = trustme.CA().issue_cert("127.0.0.1")
    cert = certificates.folder / "foreign.pem"
    cert.touch(0o600)
    cert.write_bytes(foreign.private_key_and_cert_chain_pem.bytes())
    devices = Ledger(
        DetectorTimes(heartbeat_s=0.05, suspect_s=0.2, probe_s=0.2, lease_s=5.0, stall_s=5.0, set_aside_s=1.0)
    )
    offer = ModelOffer(name="m", sha256="0" * 64, ms_per_image=1.0)
    machine = Machine(devices, time.monotonic)
    watch = Watch(devices, machine.handle, clock=time.monotonic, tls=client_context(certificates.ca))
    machine.followers.append(watch.node_changed)
    async with serve_app(APP, settings({"tls_cert": cert})) as node:
        registration = Registration(
            node_id="a", incarnation="12345678", tier=Tier.END, url=node.url, models=(offer,), version="0"
        )
        watching = asyncio.create_task(watch.run())
        try:
            machine.handle(events.Registered(registration))
            said = "a cannot be reached: the certificate of a is signed by no authority that is trusted here"
            await wait_for(lambda: any(message.startswith(said) for message in caplog.messages), what="the warning")
            # It is suspect by now, so it is probed again and again.
            probes = [record for record in caplog.records if record.name == "scheduler.devices.watch"]
            assert len(probes) == 1
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
