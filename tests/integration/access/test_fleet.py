"""A whole fleet behind tokens and TLS, as processes: everything works for those who may, nothing for others, and no
secret shows anywhere."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.data import read_sample
from terrace.cli import run
from tests.zygote import fresh_processes
from tierkit.access import TokenEntry, client_context, digest_of, new_token, write_book
from tierkit.client import AsyncClient, FineResults
from tierkit.errors import Forbidden, Unauthenticated
from tierkit.testing import ServiceProcess, service_process, wait_for

SERVICES = {"scheduler": "scheduler", "end-1": "end", "edge-1": "edge"}
USER, NODE, FOREIGN = new_token(), new_token(), new_token()


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The fleet, and what opens it."""

    services: dict[str, ServiceProcess]
    ca: Path
    folder: Path

    @property
    def url(self) -> str:
        return self.services["scheduler"].url

    def http(self, token: str | None = USER) -> httpx.AsyncClient:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.AsyncClient(verify=client_context(self.ca), headers=headers, trust_env=False, timeout=20)


def private(path: Path, content: str) -> str:
    path.touch(mode=0o600)
    path.write_text(content)
    return str(path)


@pytest.fixture(scope="module")
async def fleet(certificates: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Closed]:
    folder = tmp_path_factory.mktemp("closed")
    book = [
        TokenEntry(name="alice", role="user", sha256=digest_of(USER.encode()).hex()),
        TokenEntry(name="nodes", role="node", sha256=digest_of(NODE.encode()).hex(), nodes=("*-1",)),
    ]
    tokens = private(folder / "tokens.toml", write_book(book))
    node_token = private(folder / "node.token", NODE + "\n")
    tls = [
        f"--{k.replace('_', '-')}={v}" for k, v in {**certificates.issue("fleet"), "tls_ca": certificates.ca}.items()
    ]
    common = ["--port", "0", "--log-level", "debug", *tls]
    own = {"scheduler": ["--tokens", tokens, "--state", str(folder / "state"), "--trusted", "end,edge"]}
    services: dict[str, ServiceProcess] = {}
    async with AsyncExitStack() as stack:
        stack.enter_context(fresh_processes())
        for name, service in SERVICES.items():
            flags = own.get(name)
            if flags is None:
                flags = ["--scheduler", services["scheduler"].url, "--token-file", node_token, "--node-id", name]
            services[name] = await stack.enter_async_context(
                service_process(["-m", "terrace", service, *common, *flags], ready_file=folder / f"{name}.ready")
            )
        closed = Closed(services=services, ca=certificates.ca, folder=folder)
        async with closed.http() as http:

            async def joined() -> bool:
                return len((await http.get(f"{closed.url}/v1/devices")).json()["devices"]) == 2

            await wait_for(joined, timeout_s=20, what="both nodes")
        yield closed


async def test_a_job_runs_over_both_tiers(fleet: Closed) -> None:
    sample = read_sample()
    async with AsyncClient(fleet.url, token=USER, tls_ca=fleet.ca) as client:
        job = await client.wait(await client.submit(sample.images[:60], scheme="end-edge"), budget_s=30)
        assert (job.answered_coarse, job.answered_fine, job.fallback) == (60, 60, 0)
        events = [event async for event in client.classify(sample.images[:2], scheme="end-edge")]
        assert any(isinstance(event, FineResults) for event in events)
        # The scheduler's own probes reach the nodes.
        assert all(device.reached for device in await client.devices())


async def test_strangers_get_nothing(fleet: Closed) -> None:
    for token, error in ((None, Unauthenticated), (FOREIGN, Unauthenticated), (NODE, Forbidden)):
        async with AsyncClient(fleet.url, token=token, tls_ca=fleet.ca) as client:
            with pytest.raises(error):
                await client.jobs()
    for name in ("end-1", "edge-1"):
        url = fleet.services[name].url
        # The tokens of the scheduler are no tokens of the nodes, and a node's own token opens no other node.
        for token in (None, FOREIGN, USER, NODE):
            async with fleet.http(token) as http:
                for path in ("/v2", "/v2/models/x/infer", "/v1/tasks/1", "/metrics"):
                    assert (await http.post(f"{url}{path}", content=b"x")).status_code == 401
                assert (await http.get(f"{url}/livez")).status_code == 200
                assert (await http.get(f"{url}/readyz")).json() == {"status": "ready"}


async def test_the_commands_work_and_say_what_is_missing(
    fleet: Closed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERRACE_TLS_CA", str(fleet.ca))
    monkeypatch.setenv("TERRACE_SCHEDULER", fleet.url)

    async def terrace(*arguments: str, token: str = USER) -> tuple[int, str, str]:
        monkeypatch.setenv("TERRACE_TOKEN", token)
        code = await asyncio.to_thread(run, arguments)
        return code, *capsys.readouterr()

    code, out, err = await terrace("devices", "list", "--json")
    assert code == 0, err
    assert {device["node_id"] for device in json.loads(out)["devices"]} == {"end-1", "edge-1"}
    _, out, _ = await terrace("doctor", "--json")
    verdicts = {check["name"]: check["verdict"] for check in json.loads(out)["checks"] if check["group"] == "fleet"}
    assert {verdicts.get(name) for name in ("token", "scheduler", "scheduler, TLS")} == {"ok"}
    assert {"end-1", "edge-1"} <= verdicts.keys()
    code, _, err = await terrace("devices", "list", token=FOREIGN)
    assert code == 1
    assert "the token is unknown here" in err
    assert "show your token with --token-file FILE or in TERRACE_TOKEN" in err
    bench = ["bench", "--service-kind", "classify", "-u", fleet.url, "--measurement-interval", "200", "--json"]
    code, out, err = await terrace(*bench, "--token-file", private(fleet.folder / "user.token", USER), token=FOREIGN)
    assert code == 0, err
    assert USER not in out + err


async def test_a_node_with_the_id_of_another_is_refused_and_says_so(fleet: Closed) -> None:
    command = ["-m", "terrace", "edge", "--port", "0", "--node-id", "edge-2", "--scheduler", fleet.url]
    command += ["--tls-ca", str(fleet.ca), "--token-file", str(fleet.folder / "node.token")]
    async with service_process(command, ready_file=fleet.folder / "edge-2.ready") as node:
        await wait_for(lambda: "refuses this node" in node.log, what="the refusal")
        line = next(line for line in node.log.splitlines() if "refuses this node" in line)
        assert "is not for the node id 'edge-2'" in line
        assert "the token of 'nodes' is not for the node id 'edge-2'; it is for *-1" in line.replace('\\"', '"')
        async with fleet.http() as http:
            ready = await http.get(f"{node.url}/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "failing")


async def test_no_secret_shows_anywhere(fleet: Closed) -> None:
    """Last in this module: after all that the others have done, under the log level debug."""
    texts: dict[str, str] = {}
    async with fleet.http() as http:
        for path in ("devices", "mapping", "info", "jobs", "whoami", "models"):
            texts[path] = (await http.get(f"{fleet.url}/v1/{path}")).text
        texts["metrics"] = (await http.get(f"{fleet.url}/metrics")).text
        texts["docs"] = (await http.get(f"{fleet.url}/openapi.json")).text
    for name, service in fleet.services.items():
        texts[f"log of {name}"] = service.log
        process = Path(f"/proc/{service.process.pid}")
        texts[f"command line of {name}"] = (process / "cmdline").read_text() + (process / "environ").read_text()
        texts[f"ready file of {name}"] = (fleet.folder / f"{name}.ready").read_text()
    texts["tokens"] = (fleet.folder / "tokens.toml").read_text()
    for file in (fleet.folder / "state").rglob("*"):
        if file.is_file():
            texts[file.name] = file.read_bytes().decode("latin-1")
    keys = {USER, NODE, FOREIGN}
    assert len(texts) > 15
    assert [(name, key) for name, text in texts.items() for key in keys if key in text] == []
    assert [name for name, text in texts.items() if "Bearer " in text and name != "docs"] == []
    # Keys of nodes are known to nobody here, but they have 43 characters, and nothing else in a log has.
    logs = [text for name, text in texts.items() if name.startswith("log of")]
    assert all("debug" in log.lower() for log in logs)
    assert [found for log in logs for found in re.findall(r"(?<![\w-])[\w-]{43}(?![\w-])", log)] == []
