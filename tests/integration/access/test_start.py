"""What a service does with its address, its token and its file of tokens at its start; a node without a scheduler."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edge_node.settings import EdgeSettings
from models.manifest import MANIFEST_NAME, load_manifest, weights_folder
from models.serving import load_models
from scheduler.settings import SchedulerSettings
from tierkit.access import TokenEntry, TokenFile, digest_of, new_token, write_book
from tierkit.errors import SetupError, Unavailable
from tierkit.http.client import open_client
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import running
from tierkit.inference.heartbeat import HeartbeatSender
from tierkit.settings import NodeSettings, ServiceSettings, load_settings
from tierkit.testing import serve_app, service_process, wait_for
from tierkit.types import Tier
from tierkit.wire.messages import Heartbeat, ModelOffer, Registration


async def hello(_request: Request) -> Response:
    return JSONResponse({})


APP = Starlette(routes=[Route("/hello", hello)])


def private(path: Path, content: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(content)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[Path, str]:
    """A file, and the token of a user in it."""
    token = new_token()
    entry = TokenEntry(name="alice", role="user", sha256=digest_of(token.encode()).hex())
    return private(tmp_path / "tokens.toml", write_book([entry])), token


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("kind", [SchedulerSettings, EdgeSettings])
async def test_nothing_is_served_to_a_network_without_tokens(host: str, kind: type[ServiceSettings]) -> None:
    with pytest.raises(SetupError, match=f"^the address {host} .*--tokens FILE"):
        async with serve_app(APP, kind.model_validate({"host": host, "port": 0})):
            pass


@pytest.mark.parametrize(("entries", "warned"), [(0, True), (1, False)])
async def test_a_file_without_tokens_lets_nobody_in_and_that_is_said(
    entries: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = TokenEntry(name="alice", role="user", sha256=digest_of(new_token().encode()).hex())
    file = private(tmp_path / "tokens.toml", write_book([entry][:entries]))
    with caplog.at_level(logging.WARNING):
        async with serve_app(APP, ServiceSettings.model_validate({"host": "127.0.0.1", "tokens": file})):
            pass
    said = f"the file of tokens {file} has no valid token, so nobody is let in: 'terrace token create' makes one"
    assert any(record.getMessage() == said for record in caplog.records) == warned


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "localhost", "::1", "::ffff:127.0.0.1"])
async def test_loopback_needs_none(host: str) -> None:
    async with serve_app(APP, ServiceSettings(host=host)) as service, httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{service.url}/hello")).status_code == 200


async def test_a_network_is_served_with_tokens_or_when_it_is_said(
    tokens: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    file, token = tokens
    for settings, said, status in (
        ({"insecure": True}, "INSECURE: everyone who reaches this address may use the service", 200),
        ({"tokens": file}, "tokens and images cross the network unencrypted; give --tls-cert", 401),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            everywhere = ServiceSettings.model_validate({"host": "0.0.0.0", **settings})
            async with serve_app(APP, everywhere) as service, httpx.AsyncClient(trust_env=False) as http:
                url = service.url.replace("0.0.0.0", "127.0.0.1")
                assert (await http.get(f"{url}/hello")).status_code == status
                headers = {"Authorization": f"Bearer {token}"}
                assert (await http.get(f"{url}/hello", headers=headers)).status_code == 200
        assert said in caplog.messages


async def test_a_service_that_asks_for_a_secret_of_its_own_is_not_called_open(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with running(lambda _: APP, ServiceSettings(host="0.0.0.0"), lifecycle=Lifecycle(), asks=True):
            pass
    assert not [said for said in caplog.messages if "INSECURE" in said]
    assert "tokens and images cross the network unencrypted; give --tls-cert" in caplog.messages


async def test_the_refusal_is_exit_code_2_and_one_sentence(tmp_path: Path) -> None:
    command = ["-m", "scheduler", "--host", "0.0.0.0", "--port", "0", "--state", str(tmp_path / "state")]
    async with service_process(command, ready_file=tmp_path / "ready", wait_ready=False) as scheduler:
        assert await scheduler.exit_code() == 2
        assert scheduler.log.count("\n") == 1
        assert (
            "give --tokens FILE (see 'terrace token create'), listen on 127.0.0.1, or say --insecure" in scheduler.log
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [("tokens", "cannot read the file of tokens .*nothing"), ("token_file", "cannot read the token file .*nothing")],
)
async def test_files_that_are_not_there_are_told_before_anything_is_served(
    name: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match=words):
        async with serve_app(APP, NodeSettings.model_validate({name: tmp_path / "nothing"})):
            pass


async def test_a_node_alone_serves_the_users_of_its_file(tokens: tuple[Path, str]) -> None:
    file, token = tokens
    async with (
        serve_app(APP, NodeSettings(tokens=file)) as service,
        httpx.AsyncClient(base_url=service.url, trust_env=False) as http,
    ):
        assert service.key == ""
        assert (await http.get("/hello")).status_code == 401
        assert (await http.get("/hello", headers={"Authorization": f"Bearer {token}"})).status_code == 200


async def test_a_node_with_a_token_has_a_fresh_key_at_each_start(tmp_path: Path) -> None:
    token = new_token()
    settings = NodeSettings(token_file=private(tmp_path / "token", token))
    keys: list[str] = []
    for _ in range(2):
        async with (
            serve_app(APP, settings) as service,
            httpx.AsyncClient(base_url=service.url, trust_env=False) as http,
        ):
            for shown, status in ((token, 401), *((key, 401) for key in keys), (service.key, 200)):
                answer = await http.get("/hello", headers={"Authorization": f"Bearer {shown}"})
                assert answer.status_code == status
            keys.append(service.key)
    assert len(set(keys)) == 2
    assert all(len(key) == 43 for key in keys)


def test_a_token_from_environment_and_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = new_token()
    monkeypatch.setenv("TERRACE_EDGE_TOKEN", token)
    settings = load_settings(EdgeSettings, flags={})
    assert settings.own_token()() == token
    assert token not in repr(settings) + str(settings) + settings.model_dump_json()
    monkeypatch.delenv("TERRACE_EDGE_TOKEN")
    config = private(tmp_path / "terrace.toml", f'[edge]\ntoken = "{token}"\n')
    assert load_settings(EdgeSettings, flags={}, config=config).own_token()() == token
    os.chmod(config, 0o644)
    with pytest.raises(SetupError, match=r"others may use the settings file with a token, .*chmod 06[04]0"):
        load_settings(EdgeSettings, flags={}, config=config)
    os.chmod(config, 0o644)
    config.write_text("[edge]\nthreads = 2\n")
    assert load_settings(EdgeSettings, flags={}, config=config).threads == 2


@pytest.mark.parametrize("text", ["token = 1234567890123456789", 'token = ["secret-in-a-list"]'])
def test_a_wrong_token_in_a_settings_file_is_not_repeated(text: str, tmp_path: Path) -> None:
    config = private(tmp_path / "terrace.toml", f"[edge]\n{text}\n")
    with pytest.raises(SetupError, match=r"the key token is no token$") as caught:
        load_settings(EdgeSettings, flags={}, config=config)
    assert "1234" not in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_node_that_gets_no_weights_for_its_token_stops_with_a_sentence(tmp_path: Path) -> None:
    async def refuse(_request: Request) -> Response:
        return JSONResponse({"error": "the token is unknown here"}, 401)

    app = Starlette(routes=[Route("/v1/models/{name}/file", refuse)])
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / MANIFEST_NAME).write_bytes((weights_folder() / MANIFEST_NAME).read_bytes())
    async with serve_app(app) as scheduler:
        settings = EdgeSettings(
            scheduler=(scheduler.url,),
            models=weights,
            cache=tmp_path / "cache",
            token_file=private(tmp_path / "token", new_token()),
        )
        with pytest.raises(SetupError, match=r"gives this node no weights: .*unknown here.*; see --token-file"):
            await load_models(settings, Tier.EDGE, load_manifest())


async def test_a_node_whose_token_is_revoked_goes_on_asking_and_comes_back_with_another(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = private(tmp_path / "token", "secret-token-of-a")
    shown: list[str | None] = []
    valid = True
    beats = 0

    async def lease(request: Request) -> Response:
        shown.append(request.headers.get("authorization"))
        return JSONResponse({"lease_s": 1.0, "heartbeat_s": 0.02}) if valid else JSONResponse({"error": "revoked"}, 401)

    async def beat(request: Request) -> Response:
        nonlocal beats
        beats += valid
        shown.append(request.headers.get("authorization"))
        return Response(status_code=204) if valid else JSONResponse({"error": "revoked"}, 401)

    app = Starlette(
        routes=[
            Route("/v1/devices", lease, methods=["POST"]),
            Route("/v1/devices/{id}/heartbeat", beat, methods=["POST"]),
            Route("/v1/devices/{id}", beat, methods=["DELETE"]),
        ]
    )
    offer = ModelOffer(name="m", sha256="0" * 64, ms_per_image=1.0)
    place = Registration(
        node_id="a", incarnation="12345678", tier=Tier.END, url="http://a:1", models=(offer,), version="0"
    )
    figures = Heartbeat(incarnation="12345678", in_flight=0, queued_images=0, images_done=0)
    lifecycle = Lifecycle()
    lifecycle.set_ready()
    async with (
        serve_app(app) as scheduler,
        open_client() as http,
        HeartbeatSender(
            [scheduler.url], lambda _: place, lambda: figures, http, lifecycle=lifecycle, token=TokenFile(file)
        ) as sender,
    ):
        await wait_for(lambda: beats > 1, what="heartbeats")
        await sender.check_refusal()
        valid = False
        refusal = "the scheduler refuses this node's token (token_file): revoked"
        await wait_for(lambda: any(refusal in message for message in caplog.messages), what="the refusal")
        with pytest.raises(Unavailable, match="refuses this node's token"):
            await sender.check_refusal()
        assert not sender.registered, "it asks for a place again, ever more rarely, in place of beating"
        asked = len(shown)
        valid, beats = True, 0
        file.write_text("another-token-of-a")
        await wait_for(lambda: beats > 1, what="heartbeats again")
        await sender.check_refusal()
    assert set(shown[:asked]) == {"Bearer secret-token-of-a"}
    assert shown[-1] == "Bearer another-token-of-a"
    assert "token-of-a" not in caplog.text.replace(str(file), "")
    assert sum(refusal in message for message in caplog.messages) == 1
