"""The addresses that a sink may connect to: what was checked is what is connected to."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from scheduler.core.outbox import SinkEvent
from scheduler.sinks.addresses import check_host, refusal
from scheduler.sinks.protocol import SinkContext, payload
from scheduler.sinks.webhook import WEBHOOK, WebhookOptions, signers_of
from tests.receivers import Receiver, receiving
from tierkit.errors import CertificateError, Forbidden, InvalidInput
from tierkit.testing import listening

EVENT = SinkEvent(number=7, type="job.failed", key="job/1", at=1_700_000_000.25, data={"id": "1"})
PUBLIC = "93.184.216.34"


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        (PUBLIC, "always"),
        ("2606:2800:220:1::1", "always"),
        ("10.0.0.1", "private"),
        ("192.168.1.5", "private"),
        ("127.0.0.1", "private"),
        ("::1", "private"),
        ("fd12::1", "private"),
        ("100.64.3.4", "private"),
        ("::ffff:10.0.0.1", "private"),
        ("64:ff9b::a00:1", "private"),
        ("2002:a00:1::", "private"),
        ("fec0::1", "private"),
        ("64:ff9b:1::a00:1", "private"),
        ("64:ff9b:1::5db8:d822", "private"),
        ("::10.0.0.1", "private"),
        ("::93.184.216.34", "always"),
        ("::169.254.169.254", "never"),
        ("64:ff9b:1::a9fe:a9fe", "never"),
        ("169.254.169.254", "never"),
        ("169.254.0.1", "never"),
        ("fe80::1", "never"),
        ("fe80::1%eth0", "never"),
        ("::ffff:169.254.169.254", "never"),
        ("64:ff9b::a9fe:a9fe", "never"),
        ("fd00:ec2::254", "never"),
        ("100.100.100.200", "never"),
        ("168.63.129.16", "never"),
        ("0.0.0.0", "never"),
        ("::", "never"),
        ("224.0.0.1", "never"),
        ("ff02::1", "never"),
    ],
)
def test_an_address_is_allowed_always_with_a_setting_or_never(address: str, allowed: str) -> None:
    passes = [refusal(address, allow_private=allow) is None for allow in (False, True)]
    assert passes == {"always": [True, True], "private": [False, True], "never": [False, False]}[allowed]


async def test_one_address_that_is_not_allowed_refuses_the_name() -> None:
    async def mixed(host: str, port: int) -> list[str]:
        return [PUBLIC, "10.0.0.1"]

    with pytest.raises(Forbidden, match=r"hook\.example cannot be a receiver: 10\.0\.0\.1 is a private address"):
        await check_host("hook.example", 80, allow_private=False, resolve=mixed)
    assert await check_host("hook.example", 80, allow_private=True, resolve=mixed) == [PUBLIC, "10.0.0.1"]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


def named(url: str, host: str) -> WebhookOptions:
    """Options with another name in place of the address."""
    return WebhookOptions(url=url.replace("127.0.0.1", host))


async def test_a_name_that_changes_after_its_check_is_not_connected_to(receiver: Receiver) -> None:
    answers = iter([PUBLIC, "127.0.0.1"])

    async def rebinding(host: str, port: int) -> list[str]:
        return [next(answers)]

    context = SinkContext(name="hook", resolve=rebinding)
    async with WEBHOOK.open(named(receiver.url, "hook.example"), context) as delivery:
        with pytest.raises(Forbidden, match=r"127\.0\.0\.1 is a private address"):
            await delivery.deliver(EVENT)
    assert receiver.tries == 0


async def test_the_connection_goes_to_the_address_that_was_resolved() -> None:
    heads, asked = list[bytes](), list[str]()

    async def here(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()

    async with listening(answer) as url:
        context = SinkContext(name="hook", allow_private=True, resolve=here)
        async with WEBHOOK.open(named(url, "hook.example"), context) as delivery:
            await delivery.deliver(EVENT)
    assert b"\r\nHost: hook.example:" in heads[0]
    assert set(asked) == {"hook.example"}


def test_an_event_is_sent_with_its_id_and_time() -> None:
    assert json.loads(payload(EVENT)) == {
        "id": "evt_7",
        "type": "job.failed",
        "timestamp": "2023-11-14T22:13:20.250000Z",
        "data": {"id": "1"},
    }


@pytest.mark.parametrize("name", ["hook.example", "other.example"])
async def test_the_certificate_must_be_for_the_name_in_the_url(name: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    certificate = authority.issue_cert("hook.example")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()
        writer.close()

    async def here(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        sink = SinkContext(name="hook", allow_private=True, resolve=here, tls_ca=tmp_path / "ca.pem")
        async with WEBHOOK.open(WebhookOptions(url=f"https://{name}:{port}/"), sink) as delivery:
            if name == "hook.example":
                await delivery.deliver(EVENT)
            else:
                with pytest.raises(CertificateError):
                    await delivery.deliver(EVENT)


@pytest.mark.parametrize(
    "line", ["whsec_not base64!", "whsec_c2hvcnQ=", "", "whsec_" + "A" * 200, "whsec_" + "A" * 5000]
)
async def test_a_bad_secret_is_named_and_not_shown(line: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(line)
    options = WebhookOptions(url=f"http://{PUBLIC}/", secret_file=path)
    with pytest.raises(InvalidInput, match="secret") as error:
        async with WEBHOOK.open(options, SinkContext(name="hook")):
            pass
    assert "AAAA" not in str(error.value)
    assert "base64!" not in str(error.value)


async def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    options = WebhookOptions(url=f"http://{PUBLIC}/", secret_file=tmp_path / "pipe")
    with pytest.raises(InvalidInput, match="is not a file"):
        async with asyncio.timeout(10), WEBHOOK.open(options, SinkContext(name="hook")):
            pass


async def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    options = WebhookOptions(url=f"http://{PUBLIC}/", secret_file=tmp_path / "none")
    with pytest.raises(InvalidInput, match=r"cannot read the secret file .*none: No such file"):
        async with WEBHOOK.open(options, SinkContext(name="hook")):
            pass


def test_secrets_with_and_without_prefix_and_padding_are_the_same() -> None:
    key = "MDEyMzQ1Njc4OWFiY2RlZjAx"
    assert len(signers_of(f"whsec_{key}\n{key}\n\n{key}==\n")) == 3
