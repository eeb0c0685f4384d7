"""Personal heads on a fleet of real processes: trained by the command, used for own sources, gone with the release."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import torch

from models.hierarchy import Hierarchy
from models.kept.sample import KeptPicture
from models.kept.store import KeptStore
from models.manifest import load_manifest
from terrace.commands.personal import train_head
from tests.integration.fleet.test_improving import png
from tests.integration.fleet.test_releases import BLIND, PICTURES, end_of, fleet, in_force, make_set, networks_of
from tests.model_sets import COLOURS
from tierkit.settings import NodeSettings
from tierkit.testing import wait_for
from tierkit.types import Tier

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(180)]

SETTINGS = """
[[source]]
name = "gate"
kind = "push"

[learn]
size = "8MB"
personal = true

[spool]
folder = "{spool}"
"""
# The network of these tests has small features, so its steps must be large.
WORK = "import training.improve.personal as personal; personal.RATE = 20.0; from terrace.__main__ import main; main()"
RED, BLUE = 0, 2


def keep(folder: Path, hierarchy: Hierarchy) -> None:
    """Keep red and blue pictures, which the edge node has answered."""
    store = KeptStore(folder, 8_000_000)
    for sequence in range(1, 361):
        label = (RED, BLUE)[sequence % 2]
        content = png(COLOURS[label], 60 + sequence // 2)
        picture = KeptPicture(
            source="gate",
            sequence=sequence,
            sha256=hashlib.sha256(content).hexdigest(),
            release=1,
            local_sha256="0" * 64,
            local=1,
            local_confidence=0.6,
            margin=0.2,
            tier=Tier.EDGE,
            node_id="edge-1",
            upper_sha256="1" * 64,
            label=label,
            confidence=0.9,
            coarse_label=label,
            coarse_confidence=0.9,
            kind="differs",
            form="pixels",
            classes=hierarchy.digest,
        )
        assert store.keep(picture, content)
    store.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps as small as these cost more to share than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


async def train(url: str, kept: Path, cache: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and result of the command."""
    words = ["train", "work", "--scheduler", url, "--kept", str(kept), "--personal", "--json", "--threads", "1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", WORK, *words, "--cache", str(cache), stdout=asyncio.subprocess.PIPE
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, json.loads(said)


async def test_a_device_trains_a_head_and_uses_it_until_its_release_goes(tmp_path: Path) -> None:
    first, second = make_set(tmp_path / "first", end=BLIND), make_set(tmp_path / "second", factor=11.0)
    kept = tmp_path / "spool" / "kept"
    keep(kept, load_manifest(first).hierarchy)
    settings = tmp_path / "end.toml"
    settings.write_text(SETTINGS.format(spool=tmp_path / "spool"))
    async with fleet(tmp_path) as (running, client), httpx.AsyncClient(trust_env=False, timeout=20) as http:
        await running.lead(first)
        await asyncio.gather(running.join("edge-1"), running.join_with("end-1", "--config", str(settings)))
        gate = f"{running.nodes['end-1'].url}/v1/sources/gate/pictures"

        async def seen() -> tuple[str, int, int | None]:
            """Network, class and release of the local answer to a red picture."""
            answer = (await http.post(gate, content=png("red", 201))).json()
            return answer["coarse"]["sha256"], answer["coarse"]["index"], answer["release"]

        async def answered_by(sha256: str) -> None:
            async def do() -> bool:
                return (await seen())[0] == sha256

            await wait_for(do, what="answers of another network")

        assert await seen() == (end_of(first), 1, 1)
        code, made = await train(running.url, kept, tmp_path / "cache")
        assert (code, made["passes"], made["base"], made["release"]) == (0, True, end_of(first), 1)
        assert made["figures"]["held_out_gained"] > 40
        await answered_by(made["sha256"])
        assert await seen() == (made["sha256"], RED, None)

        async def shown() -> bool:
            return any(each.kept is not None and each.kept.personal for each in (await client.learning()).nodes)

        await wait_for(shown, what="the head at the scheduler")
        job = await client.wait(await client.submit(PICTURES))
        assert networks_of([each async for each in client.results(job)])[0] == {end_of(first)}
        await client.create_release("next", second)
        await client.promote_release("next@2")
        await in_force(client, "next@2")
        await answered_by(end_of(second))
        assert await seen() == (end_of(second), RED, 2)
        # A head for a network that answers all of the pictures rightly cannot be better.
        device = NodeSettings(scheduler=(running.url,), cache=tmp_path / "cache")
        with pytest.raises(typer.Exit) as refused:
            await asyncio.to_thread(train_head, device, kept, lambda: None, json=False)
        assert refused.value.exit_code == 1
        assert not (kept / "personal" / f"{end_of(second)}.onnx").exists()
        assert await seen() == (end_of(second), RED, 2)
