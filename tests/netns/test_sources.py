"""A camera and its end node, while the scheduler and the upstream node cannot be reached and the camera is cut off.

The outage takes a quarter of a minute. `TERRACE_OUTAGE_S=600` makes it longer, to measure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.netns.conftest import PORT, url_of
from tests.netns.network import Host, Network
from tierkit.testing import service_process, wait_for

pytest.importorskip("av", reason="needs the extra 'video'")

pytestmark = [pytest.mark.netns, pytest.mark.timeout(180 + 3 * float(os.environ.get("TERRACE_OUTAGE_S", "15")))]

OUTAGE_S = float(os.environ.get("TERRACE_OUTAGE_S", "15"))
CUT_S = OUTAGE_S / 15
CUTS = 3
RATE = 5
CAMERA = 8080
ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def camera_on(host: Host) -> AsyncIterator[None]:
    command = [*host.inside, sys.executable, str(Path(__file__).with_name("camera.py")), str(CAMERA), str(2 * RATE)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdout=pipe, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        await process.wait()


def share_within(metrics: str, bound: str) -> float:
    """Share of the pictures whose answer was stored within `bound` seconds."""
    counts = dict(re.findall(r'^terrace_observation_seconds_bucket{le="([^"]+)",source="gate"} (\S+)$', metrics, re.M))
    return float(counts[bound]) / float(counts["+Inf"])


async def test_an_outage_loses_nothing(network: Network, tmp_path: Path) -> None:
    user, hub, cloud, pi, camera = (network.add(name) for name in ("user-2", "hub-2", "cloud-2", "pi", "camera"))
    common = ["--host", "0.0.0.0", "--port", str(PORT), "--insecure"]
    cache = ["--cache", str(tmp_path / "cache")]
    (tmp_path / "pi.toml").write_text(
        f"""
[[source]]
name = "gate"
url = "http://{camera.address}:{CAMERA}/"
rate = {RATE}
[spool]
folder = "{tmp_path / "spool"}"
"""
    )
    node = [*common, *cache, "--scheduler", url_of(hub), "--node-id"]
    services = [
        (hub, ["scheduler", *common, "--state", str(tmp_path / "state"), "--trusted", "end,edge,cloud"]),
        (cloud, ["cloud", *node, "cloud-1"]),
        (pi, ["end", "--config", str(tmp_path / "pi.toml"), *node, "pi-1"]),
    ]
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(network.here(user))
        await stack.enter_async_context(camera_on(camera))
        for host, command in services:
            ready = tmp_path / f"{host.name}.ready"
            service = service_process(["-m", "terrace", *command], ready_file=ready, inside=host.inside)
            await stack.enter_async_context(service)
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=10))

        async def report() -> Any:
            return (await http.get(f"{url_of(pi)}/v1/sources")).json()

        async def observations() -> list[Any]:
            answer = await http.get(f"{url_of(hub)}/v1/observations/export", params={"source": "gate"}, timeout=60)
            return [httpx.Response(200, content=line).json() for line in answer.text.splitlines()]

        async def amended() -> bool:
            return any(each["fine"] for each in await observations())

        await wait_for(amended, timeout_s=60, what="the first better answer")
        async with asyncio.timeout(OUTAGE_S + 60):
            with network.cut(hub), network.cut(cloud):
                before = (await report())["sources"][0]["taken"]
                for _ in range(CUTS):
                    await asyncio.sleep((OUTAGE_S - CUTS * CUT_S) / (CUTS + 1))
                    with network.cut(camera):
                        await asyncio.sleep(CUT_S)
                await asyncio.sleep((OUTAGE_S - CUTS * CUT_S) / (CUTS + 1))
                during = await report()
                taken = during["sources"][0]["taken"] - before
                assert not during["uplink"]["online"]
                assert during["spool"]["waiting_answers"] > taken / 2

        async def delivered() -> bool:
            now = await report()
            waiting = now["spool"]["waiting_answers"] + now["spool"]["waiting_pictures"]
            return bool(now["uplink"]["online"] and waiting < 2 * RATE)

        await wait_for(delivered, timeout_s=60 + OUTAGE_S, what="everything to arrive")
        metrics = (await http.get(f"{url_of(pi)}/metrics")).text
        last = (await report())["sources"][0]["taken"]

        async def complete() -> bool:
            found = [each for each in await observations() if each["sequence"] <= last]
            return len(found) >= last and not any(each["waits"] for each in found)

        await wait_for(complete, timeout_s=60, what="the last answers")
        found = await observations()
    assert [each["sequence"] for each in found] == list(range(1, len(found) + 1))
    settled = [each for each in found if each["sequence"] <= last]
    assert all(each["unsure"] == (each["fine"] is not None) for each in settled)
    unsure = sum(each["unsure"] for each in settled)
    assert unsure > 0
    # The stream is back within 5 s of each cut.
    lost_s = CUTS * (CUT_S + 5)
    figures = f"{OUTAGE_S:g} s, {CUTS} cuts of {CUT_S:g} s: {taken} pictures, {len(settled)} in all, {unsure} unsure"
    within = {bound: share_within(metrics, bound) for bound in ("0.02", "0.05", "0.1")}
    sys.stdout.write(f"outage of {figures}; share answered within {within} s\n")
    assert taken >= 0.8 * RATE * (OUTAGE_S - lost_s)
