"""Ranks on three hosts, and a firewall between two of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tests.integration.training.conftest import CONFIG
from tests.netns.network import Host, Network
from tests.shapes import write_shapes

pytestmark = [pytest.mark.netns, pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(120)]

RANKS = 3


@contextlib.asynccontextmanager
async def ranks(hosts: list[Host], folder: Path, *flags: str) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """One on each host."""
    place = [f"WORLD_SIZE={len(hosts)}", f"MASTER_ADDR={hosts[0].address}", "MASTER_PORT=29500"]
    network = folder / "net.toml"
    network.write_text(CONFIG.format(epochs=20))
    command = [sys.executable, "-P", "-m", "training.parallel", str(network), f"--dataset={folder / 'shapes'}", *flags]
    started = [
        await asyncio.create_subprocess_exec(
            *host.inside,
            "env",
            f"RANK={rank}",
            *place,
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        yield started
    finally:
        for each in started:
            if each.returncode is None:
                each.kill()
            await each.communicate()


async def test_ranks_on_three_hosts_and_a_firewall_between_two(network: Network, tmp_path: Path) -> None:
    write_shapes(tmp_path / "shapes")
    hosts = [network.add(f"rank-{rank}") for rank in range(RANKS)]
    async with ranks(hosts, tmp_path, "--strategy=gossip") as started:
        out, said = await started[0].communicate()
        assert started[0].returncode == 0, said.decode()
        assert json.loads(out)["workers"] == RANKS
    with network.lost(hosts[1], hosts[2]), network.lost(hosts[2], hosts[1]):
        async with ranks(hosts, tmp_path, "--patience-s=4") as started:
            ended = await asyncio.gather(*(each.communicate() for each in started))
    for rank, (_, error) in enumerate(ended):
        words = f"terrace rank {rank}: rank 1 cannot reach rank 2 at {hosts[2].address}: "
        assert error.decode().splitlines()[-1].startswith(words), error.decode()
    assert [each.returncode for each in started] == [75] * RANKS
