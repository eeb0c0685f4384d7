"""Snapshots: a URL that answers with the present picture, and servers that answer with something else."""

import asyncio
import hashlib
import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from PIL import Image
from pydantic import ValidationError

from end_node.settings import SourceSettings
from end_node.sources import keeper as keepers, snapshot as snapshots
from tests.integration.end_node.intakes import KeepingIntake, kept
from tierkit.testing import listening, wait_for

Respond = Callable[[str, dict[str, str]], bytes | Awaitable[bytes]]


def picture(value: int = 0, side: int = 64) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (value, value, value)).save(file, "JPEG")
    return file.getvalue()


def answer(body: bytes, status: str = "200 OK", kind: str = "image/jpeg", **fields: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def camera(respond: Respond) -> AsyncIterator[str]:
    """A server that answers each request with the bytes of `respond(path, headers)`, then keeps the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            said = respond(first.split(" ")[1], headers)
            writer.write(said if isinstance(said, bytes) else await said)
            await writer.drain()

    async with listening(handle) as url:
        yield url


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "_LONGEST_POLITE_S", 0.2)


@pytest.fixture
def intake() -> KeepingIntake:
    return KeepingIntake()


async def test_a_url_is_found_to_be_a_snapshot_and_polled(intake: KeepingIntake) -> None:
    number = iter(range(10**6))
    async with (
        camera(lambda path, headers: answer(picture(next(number) % 200))) as url,
        kept(intake, f"{url}/now.jpg", rate=50) as keeper,
    ):
        await wait_for(lambda: len(intake.pictures) >= 5, what="the pictures")
        assert (keeper.status.kind, keeper.status.state) == ("snapshot", "running")
    assert intake.pictures[0].content.startswith(b"\xff\xd8")


@pytest.mark.parametrize("fields", [{"ETag": '"7"'}, {"Last_Modified": "Sat, 28 Nov 2026 00:00:00 GMT"}])
async def test_an_unchanged_picture_is_taken_once(fields: dict[str, str], intake: KeepingIntake) -> None:
    conditions = {"if-none-match", "if-modified-since"}
    unchanged = 0

    def respond(path: str, headers: dict[str, str]) -> bytes:
        nonlocal unchanged
        if conditions & headers.keys():
            unchanged += 1
            return b"HTTP/1.1 304 Not Modified\r\n\r\n"
        return answer(picture(), **fields)

    async with camera(respond) as url, kept(intake, url, kind="snapshot", rate=100):
        await wait_for(lambda: unchanged >= 5, what="some polls")
    assert len(intake.pictures) == 1


async def test_pictures_that_hardly_change_are_skipped(intake: KeepingIntake) -> None:
    values = iter([0, 2, 3, 60, 61, 0, *[0] * 10**4])
    async with (
        camera(lambda path, headers: answer(picture(next(values)))) as url,
        kept(intake, url, kind="snapshot", rate=100, changed=0.1) as keeper,
    ):
        await wait_for(lambda: keeper.status.skipped > 10, what="some polls")
    assert [each.content for each in intake.pictures] == [picture(0), picture(60), picture(0)]


async def test_basic_credentials_of_the_url(intake: KeepingIntake) -> None:
    def respond(path: str, headers: dict[str, str]) -> bytes:
        if headers.get("authorization") == "Basic bWU6c2VjcmV0":
            return answer(picture())
        return answer(b"", "401 Unauthorized", WWW_Authenticate='Basic realm="camera"')

    async with camera(respond) as url:
        async with kept(intake, url.replace("//", "//me:secret@"), rate=50):
            await wait_for(lambda: len(intake.pictures) > 2, what="the pictures")
        async with kept(intake, url.replace("//", "//me:wrong@"), rate=50) as keeper:
            await wait_for(lambda: keeper.status.state == "waiting", what="the refusal")
            assert "401" in keeper.status.reason
            assert "wrong" not in keeper.status.reason


async def test_digest_credentials_of_the_url(intake: KeepingIntake) -> None:
    def md5(text: str) -> str:
        return hashlib.md5(text.encode()).hexdigest()

    def respond(path: str, headers: dict[str, str]) -> bytes:
        said = headers.get("authorization", "")
        assert not said.startswith("Basic"), "the password must not travel in clear text"
        found = dict(re.findall(r'(\w+)="?([^",]*)"?', said))
        if found:
            first, second = md5("me:camera:secret"), md5(f"GET:{found['uri']}")
            expected = md5(f"{first}:{found['nonce']}:{found['nc']}:{found['cnonce']}:auth:{second}")
            if found["response"] == expected:
                return answer(picture())
        challenge = 'Digest realm="camera", nonce="abc", qop="auth", algorithm=MD5'
        return answer(b"", "401 Unauthorized", WWW_Authenticate=challenge)

    async with camera(respond) as url, kept(intake, url.replace("//", "//me:secret@"), rate=50):
        await wait_for(lambda: len(intake.pictures) > 2, what="the pictures")


PAGE = answer(b"<html>", kind="text/html")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (PAGE, "answers with text/html, which is not a picture"),
        (answer(b"", "404 Not Found"), "status 404"),
        (answer(b"", "302 Found", Location="http://other/"), "redirects to another address"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n", "answers with more than 67,108,864 bytes"),
        (b"nonsense\r\n\r\n", "it is no HTTP"),
        (answer(b""), "answers with nothing"),
        (answer(picture())[:-100], "did not answer within its budget"),
        (b"HTTP/1.1 200 OK\r\nX: ", "did not answer within its budget"),
    ],
)
async def test_an_answer_that_is_no_picture_has_a_name(
    said: bytes, reason: str, intake: KeepingIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_BUDGET_S", 0.5)
    good = False
    async with (
        camera(lambda path, headers: answer(picture()) if good else said) as url,
        kept(intake, f"{url}/a?token=secret", kind="snapshot", rate=50) as keeper,
    ):
        await wait_for(lambda: reason in keeper.status.reason, what="the reason")
        assert "secret" not in keeper.status.reason
        good = True
        await wait_for(lambda: bool(intake.pictures), what="the picture afterwards")
        await wait_for(lambda: keeper.status.state == "running", what="the source")


async def test_a_body_that_never_ends_is_given_up(intake: KeepingIntake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_MAX_BYTES", 10**6)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\n\r\n")
        while True:
            writer.write(picture(side=512))
            await writer.drain()

    async with listening(handle) as url, kept(intake, url, kind="snapshot") as keeper:
        await wait_for(lambda: "more than 1,000,000 bytes" in keeper.status.reason, what="the reason")


async def test_an_http_address_that_is_neither_says_so(intake: KeepingIntake) -> None:
    async with camera(lambda path, headers: PAGE) as url, kept(intake, url) as keeper:
        await wait_for(lambda: "neither a picture nor a stream" in keeper.status.reason, what="the reason")


def test_other_schemes_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="not ftp://"):
        SourceSettings.model_validate({"name": "gate", "url": "ftp://host/a.jpg"})
