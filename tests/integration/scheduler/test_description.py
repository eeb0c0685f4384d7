"""/openapi.json says what the scheduler does: schemathesis finds no answer that it does not name, and no 5xx."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest

from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.client import AsyncClient
from tierkit.client.lines import iter_lines, iter_server_sent_events
from tierkit.testing import service_process, wait_for

USER, NODE, ADMIN = (new_token() for _ in range(3))
EXAMPLES = 2
NOWHERE = "http://127.0.0.1:1"
"""Address of the node that the example of a registration makes; the scheduler sends requests there."""
CONFIG = """
request-timeout = 30
continue-on-failure = true
generation.deterministic = true
headers = { Authorization = "Bearer ${TERRACE_USER}" }

[[operations]]
include-name = ["POST /v1/devices", "POST /v1/devices/{node_id}/heartbeat"]
headers = { Authorization = "Bearer ${TERRACE_NODE}" }
# A schema cannot say which URLs are good, or which nodes there are.
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "409", "422"]

[[operations]]
include-name = ["GET /v1/tokens", "POST /v1/tokens", "PUT /v1/devices/{node_id}/trust"]
headers = { Authorization = "Bearer ${TERRACE_ADMIN}" }
# Nor which names have tokens, or which rights go together. Exchanging and revoking would end the tokens of this test.
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "422"]

[[operations]]
include-name = ["POST /v1/runs", "PUT /v1/runs/{run_id}/report"]
# Nor that an object is small and plain, that workers are named once, or which runs there are.
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "413", "422", "503"]

[[operations]]
include-name = ["PUT /v1/offers/{offer_id}", "POST /v1/offers/{offer_id}/runs"]
# Nor which of three numbers is the largest, or what a host offers.
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "422", "503"]

[[operations]]
include-name = ["POST /v1/matches"]
# Nor whether a run wants workers at present: 503 with Retry-After while none does.
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "422", "503"]
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]

[[operations]]
include-name = ["POST /v1/releases", "PUT /v1/networks/{sha256}"]
# Nor what a manifest holds, or the digest of a file.
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "409", "422"]

[[operations]]
include-name = ["GET /v1/observations", "GET /v1/learning/pictures"]
# Nor which cursors a page has given.
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "404"]

[[operations]]
include-name = ["PUT /v1/observations/{node_id}/{source}/{sequence}/label"]
# Nor which classes there are.
checks.positive_data_acceptance.expected-statuses = ["2xx", "404", "409", "422"]

[[operations]]
include-name = ["POST /v1/jobs", "POST /v1/classify"]
# Nor what is a picture, or which fields go together. No node of the example's site takes work.
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "403", "409", "415", "503"]
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]

[[operations]]
include-path-regex = "/v1/devices/{node_id}/sources"
# The example of a registration names a node that is not there.
checks.positive_data_acceptance.expected-statuses = ["2xx", "403", "404", "502"]
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "502"]
"""


@pytest.fixture(scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Of a scheduler that asks for tokens, with an end node and an edge node."""
    folder = tmp_path_factory.mktemp("described")
    book = [
        TokenEntry(name="alice", role="operator", sha256=digest_of(USER.encode()).hex()),
        TokenEntry(name="root", role="admin", sha256=digest_of(ADMIN.encode()).hex()),
        TokenEntry(name="nodes", role="node", sha256=digest_of(NODE.encode()).hex(), nodes=("*",)),
    ]
    for name, content in (("tokens.toml", write_book(book)), ("node.token", NODE)):
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(content)
    async with AsyncExitStack() as stack:

        async def start(service: str, *flags: str) -> str:
            command = ["-m", "terrace", service, "--port", "0", *flags]
            process = service_process(command, ready_file=folder / f"{service}.ready")
            return (await stack.enter_async_context(process)).url

        url = await start("scheduler", "--state", str(folder / "state"), "--tokens", str(folder / "tokens.toml"))
        for service in ("end", "edge"):
            await start(
                service, "--scheduler", url, "--token-file", str(folder / "node.token"), "--node-id", f"{service}-1"
            )

        async def joined() -> bool:
            return len((await get(url, "/v1/devices"))["devices"]) == 2

        await wait_for(joined, what="both nodes")
        yield url


async def get(url: str, path: str) -> Any:
    async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {USER}"}) as http:
        return (await http.get(f"{url}{path}")).raise_for_status().json()


@pytest.mark.timeout(300)
async def test_schemathesis_finds_nothing_that_is_not_described(url: str, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    described = await get(url, "/openapi.json")
    described["components"]["schemas"]["Registration"]["properties"]["url"]["examples"] = [NOWHERE]
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    command = ["run", "openapi.json", "--url", url, "--checks", "all", "--max-examples", str(EXAMPLES)]
    # A stream of the fleet has no end, and that of a job none while its nodes are drained.
    excluded = ["--exclude-path-regex", "events$"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "schemathesis.cli", *command, *excluded),
        cwd=tmp_path,
        env={**os.environ, "TERRACE_USER": USER, "TERRACE_NODE": NODE, "TERRACE_ADMIN": ADMIN, "NO_COLOR": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output
    tested = re.search(r"Tested: (\d+)", output)
    assert tested is not None, output
    paths = described["paths"]
    assert int(tested[1]) == sum(len(item) for path, item in paths.items() if not path.endswith("events"))


async def test_streams_are_described_as_well(url: str) -> None:
    paths = (await get(url, "/openapi.json"))["paths"]
    for path, status in (("/v1/fleet/events", 400), ("/v1/jobs/{job_id}/events", 404)):
        described = paths[path]["get"]["responses"]
        assert {"200", "400", "401", "403", "429", "503"} <= set(described)
        with pytest.raises(httpx.HTTPStatusError) as caught:
            await get(url, path.format(job_id="0" * 20) + ("?unknown=1" if status == 400 else ""))
        assert caught.value.response.status_code == status
        assert str(status) in described


async def test_events_and_lines_are_as_described(url: str) -> None:
    described = await get(url, "/openapi.json")

    def check(path: str, method: str, kind: str, content: bytes) -> None:
        schema = described["paths"][path][method]["responses"]["200"]["content"][kind]["schema"]
        whole = {**schema, "components": described["components"]}
        jsonschema_rs.Draft202012Validator(whole).validate(json.loads(content))

    pictures = np.zeros((3, 32, 32, 3), np.uint8)
    async with AsyncClient(url, token=USER) as client, AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, trust_env=False, headers={"Authorization": f"Bearer {USER}"})
        )
        np.savez(upload := io.BytesIO(), images=pictures)
        headers = {"Content-Type": "application/x-npz"}
        answer = await http.post("/v1/classify", content=upload.getvalue(), headers=headers)
        lines = answer.raise_for_status().content.splitlines()
        assert [json.loads(line)["event"] for line in lines] == ["coarse", "fine", "done"]
        for line in lines:
            check("/v1/classify", "post", "application/x-ndjson", line)
        job = await client.wait(await client.submit(pictures))
        streams = {
            "/v1/jobs/{job_id}/events": (job.id, {"coarse", "fine", "state"}),
            "/v1/fleet/events": ("", {"happened", "snapshot"}),
            "/v1/sources/events": ("", {"snapshot"}),
            "/v1/observations/events": ("", {"begin"}),
        }
        for path, (name, kinds) in streams.items():
            seen: set[str] = set()
            async with http.stream("GET", path.format(job_id=name), headers={"Last-Event-ID": "0"}) as stream:
                async for event in iter_server_sent_events(iter_lines(stream.raise_for_status().aiter_bytes())):
                    check(path, "get", "text/event-stream", event.data)
                    seen.add(event.kind)
                    if seen >= kinds:
                        break
            assert seen >= kinds


async def test_the_description_says_who_may_call(url: str) -> None:
    made = await get(url, "/openapi.json")
    schemes = made["components"]["securitySchemes"]
    assert (schemes["token"]["type"], schemes["token"]["scheme"]) == ("http", "bearer")
    assert (schemes["session"]["in"], schemes["session"]["name"]) == ("cookie", "terrace_session")
    assert made["security"] == [{"token": []}, {"session": []}]
    open_routes = [
        f"{method} {path}"
        for path, item in made["paths"].items()
        for method, operation in item.items()
        if operation.get("security") == []
    ]
    assert sorted(open_routes) == ["delete /v1/session", "post /v1/session"]


async def test_every_refusal_has_the_form_of_errors(url: str) -> None:
    made = await get(url, "/openapi.json")
    shared = made["components"]["responses"]
    for item in made["paths"].values():
        for operation in item.values():
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    answer = shared[answer["$ref"].rpartition("/")[2]] if "$ref" in answer else answer
                    assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
                    assert answer["description"]


async def test_a_scheduler_without_tokens_does_not_ask_for_them(scheduler: Any) -> None:
    made = (await scheduler.http.get("/openapi.json")).json()
    assert {} in made["security"]
