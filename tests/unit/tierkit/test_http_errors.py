"""Every error comes out of an application as {"error": sentence} with the status of the table."""

import logging
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tierkit import errors
from tierkit.http import errors as http_errors
from tierkit.http.answering import install

TABLE = {
    errors.InvalidInput: 400,
    errors.MalformedMessage: 400,
    errors.UnsupportedMedia: 415,
    errors.TooLarge: 413,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.EncoderMismatch: 409,
    errors.OtherNetworks: 409,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.Unavailable: 503,
    errors.Overloaded: 503,
    errors.LimitReached: 429,
    errors.Standby: 421,
    errors.Draining: 503,
    errors.UpstreamUnavailable: 503,
    errors.NoNodeAvailable: 503,
    errors.ConnectionEnded: 503,
    errors.SourceUnavailable: 503,
    errors.SpoolUnavailable: 503,
    errors.DeadlineExceeded: 504,
    errors.UpstreamTimeout: 504,
    errors.UpstreamError: 502,
    errors.Rejected: 502,
    errors.ReceiverGone: 502,
    errors.InvalidAnswer: 502,
    errors.NotTerrace: 502,
    errors.CertificateError: 502,
    errors.SetupError: 500,
    errors.BrokenExtension: 500,
    errors.ProviderUnavailable: 500,
    errors.WeightsError: 500,
    errors.WeightsMissing: 500,
    errors.NoRoom: 500,
    errors.NeedsRestart: 500,
    errors.DataError: 500,
    errors.AddressUnavailable: 500,
    errors.PortInUse: 500,
    errors.DatabaseUnavailable: 500,
    errors.ClusterUnavailable: 500,
    errors.ServiceFailed: 500,
    errors.TerraceError: 500,
}


def client_of(app: Starlette) -> httpx.AsyncClient:
    install(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node")


def raising(exc: Exception) -> Starlette:
    async def endpoint(_request: Request) -> None:
        raise exc

    return Starlette(routes=[Route("/", endpoint)])


@pytest.mark.parametrize(("cls", "status"), TABLE.items())
async def test_each_class_has_its_status(cls: type[errors.TerraceError], status: int) -> None:
    async with client_of(raising(cls("what is wrong"))) as http:
        answer = await http.get("/")
    assert (answer.status_code, answer.json()) == (status, {"error": "what is wrong"})
    assert ("retry-after" in answer.headers) is (status in (421, 429, 503))
    assert answer.headers.get("www-authenticate") == ('Bearer realm="terrace"' if status == 401 else None)


def test_every_class_is_covered_above() -> None:
    named = {getattr(errors, name) for name in errors.__all__} - {errors.MissingExtra}
    assert named == set(TABLE)
    assert http_errors.status_of(errors.MissingExtra("gpu", "this")) == 500


async def test_retry_after_is_whole_seconds_and_at_least_one() -> None:
    for wait_s, header in ((0.01, "1"), (1.2, "2"), (7, "7")):
        async with client_of(raising(errors.Overloaded("full", retry_after_s=wait_s))) as http:
            assert (await http.get("/")).headers["retry-after"] == header


async def test_the_unexpected_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(raising(ZeroDivisionError("secret"))) as http:
        answer = await http.get("/")
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("internal error; request id")
    assert "secret" not in answer.text
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.ERROR] == [True]


async def test_an_error_in_mid_answer_breaks_the_answer_off() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"begun"
        raise errors.UpstreamError("lost")

    async def endpoint(_request: Request) -> StreamingResponse:
        return StreamingResponse(chunks())

    async with client_of(Starlette(routes=[Route("/", endpoint)])) as http:
        with pytest.raises(errors.UpstreamError):
            await http.get("/")


async def test_the_frameworks_own_errors_have_the_same_form() -> None:
    app = FastAPI()

    @app.get("/items/{number}")
    async def item(number: int) -> int:
        return number

    @app.put("/items/{number}")
    async def put_item(number: int) -> int:
        return number

    async with client_of(app) as http:
        missing = await http.get("/nowhere")
        method = await http.delete("/items/1")
        value = await http.get("/items/x")
        slash = await http.put("/items/1/")
    assert (missing.status_code, missing.json()) == (404, {"error": "no such route: /nowhere"})
    assert (slash.status_code, slash.json()) == (404, {"error": "no such route: /items/1/"})
    assert (method.status_code, method.json()) == (405, {"error": "DELETE is not allowed on /items/1"})
    assert method.headers["allow"] == "GET, HEAD, PUT"
    assert value.status_code == 400
    assert value.json()["error"].startswith("path.number: ")


@pytest.mark.parametrize(("cls", "status"), [(cls, status) for cls, status in TABLE.items() if status != 500])
def test_a_client_reads_the_error_that_the_server_meant(cls: type[errors.TerraceError], status: int) -> None:
    read = http_errors.error_of("the scheduler", status, b'{"error": "what is wrong"}', "7")
    assert issubclass(cls, type(read))
    assert str(read) == "what is wrong"
    assert http_errors.status_of(read) == status
    if isinstance(read, errors.Unavailable):
        assert read.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("status", "body", "cls", "says"),
    [
        (422, b'{"error": "x"}', errors.InvalidInput, "^x$"),
        (500, b'{"error": "x"}', errors.UpstreamError, "^x$"),
        (418, b'{"error": "x"}', errors.UpstreamError, "^x$"),
        (404, b"<html>", errors.NotTerrace, "answered 404, and not as"),
        (503, b"[" * 100_000, errors.NotTerrace, "answered 503, and not as"),
        (400, b'{"error": "\\ud800"}', errors.InvalidInput, "ud800"),
    ],
)
def test_answers_beside_the_table(status: int, body: bytes, cls: type[errors.TerraceError], says: str) -> None:
    read = http_errors.error_of("the scheduler", status, body)
    assert type(read) is cls
    with pytest.raises(cls, match=says):
        raise read


@pytest.mark.parametrize("retry_after", [None, "", "soon", "-1", "nan", "inf", "1e999", "3"])
def test_a_wait_that_is_asked_for_is_a_number(retry_after: str | None) -> None:
    for read in (
        http_errors.error_of("it", 503, b'{"error": "x"}', retry_after),
        http_errors.refusal_of("it", 503, b"", retry_after),
    ):
        assert isinstance(read, errors.Unavailable)
        assert 0.0 <= read.retry_after_s <= 1e9


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (503, errors.UpstreamUnavailable),
        (504, errors.UpstreamTimeout),
        (404, errors.UpstreamError),
        (429, errors.UpstreamError),
    ],
)
def test_what_a_refusal_of_another_node_means_for_a_task(status: int, cls: type[errors.TerraceError]) -> None:
    assert type(http_errors.refusal_of("edge-1", status, b'{"error": "no"}')) is cls
