"""What a scheduler tells nodes of whom to copy a network from, and what it believes of them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from models.manifest import NamedFile, WeightsFile
from scheduler.core.fleet import Change, Ledger
from scheduler.releases import spreading
from scheduler.releases.spreading import Spreading, chunk_bytes_of
from scheduler.settings import SchedulerSettings
from tierkit.copies.files import CHUNK_BYTES, sha256_of
from tierkit.errors import Conflict, NotFound
from tierkit.testing import FakeClock
from tierkit.types import Health, Tier
from tierkit.wire.copies import MOST_CHUNKS, CopyAnswer, CopyReport
from tierkit.wire.messages import ModelOffer, Registration

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()
SECRET = b"s" * 32


class Fleet:
    """Nodes of a device list, and the service that is asked."""

    def __init__(self, folder: Path, secret: bytes = SECRET) -> None:
        self.clock, self.found = FakeClock(), 0
        self.devices = Ledger(SchedulerSettings().detector_times)
        self.path = folder / "net.onnx"
        self.path.write_bytes(CONTENT)
        self.service = Spreading(self.devices, self._file, self._find, secret, clock=self.clock)

    def _file(self, name: str, sha256: str) -> WeightsFile:
        if (name, sha256) != ("net", SHA256):
            raise NotFound("no release has it")
        return NamedFile(name=name, file="net.onnx", sha256=sha256, size_bytes=len(CONTENT))

    async def _find(self, file: WeightsFile) -> Path:
        self.found += 1
        return self.path

    def join(self, name: str, **more: Any) -> None:
        registration = Registration(
            node_id=name,
            incarnation=f"process of {name}",
            tier=Tier.END,
            url=f"http://{name}:8071",
            models=(ModelOffer(name="old", sha256="cd" * 32, ms_per_image=1.0),),
            follows=True,
            version="0",
            **more,
        )
        self.devices.register(registration, self.clock())

    async def tell(self, name: str, **news: Any) -> CopyAnswer:
        given = {"incarnation": f"process of {name}", "name": "net", "sha256": SHA256, "waits": False, **news}
        return await self.service.told(name, CopyReport(**given))


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


async def test_the_plan_has_the_hash_of_each_chunk_and_the_file_is_read_once(fleet: Fleet) -> None:
    names = [f"n{number}" for number in range(5)]
    for name in names:
        fleet.join(name)
    answers = await asyncio.gather(*(fleet.tell(name, plan=True) for name in names))
    assert {answer.chunks for answer in answers} == {
        tuple(sha256_of(CONTENT[at : at + CHUNK_BYTES]) for at in range(0, len(CONTENT), CHUNK_BYTES))
    }
    assert {(answer.bytes, answer.chunk_bytes) for answer in answers} == {(len(CONTENT), CHUNK_BYTES)}
    assert fleet.found == 1
    assert (await fleet.tell("n0")).chunks == ()


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES * MOST_CHUNKS, CHUNK_BYTES * MOST_CHUNKS + 1, 2**31])
def test_no_file_has_too_many_chunks_or_too_large_ones(size: int) -> None:
    chunk_bytes = chunk_bytes_of(size)
    assert -(-size // chunk_bytes) <= MOST_CHUNKS
    assert chunk_bytes <= 4 << 20


async def test_nodes_of_a_site_copy_from_each_other_and_from_no_others(fleet: Fleet) -> None:
    for name, more in (
        ("a1", {"site": "a"}),
        ("a2", {"site": "a"}),
        ("b1", {"site": "b"}),
        ("c1", {}),
        ("c2", {}),
        ("d1", {"allowed_upstreams": ("http://10.0.0.1",)}),
        ("e1", {"lease_s": 600.0}),
        ("e2", {}),
    ):
        fleet.join(name, **more)
        answer = await fleet.tell(name)
        fleet.clock.advance(0.01)
        sources = {"a2": "http://a1:8071", "c2": "http://c1:8071"}
        if name not in ("e1", "e2"):
            assert (answer.go, answer.source) == (True, sources.get(name)), name
    # What saves bytes gets a copy, and passes nothing on.
    await fleet.tell("e1", got=True)
    assert (await fleet.tell("e2")).source != "http://e1:8071"
    keys = {name: (await fleet.tell(name)).key for name in ("a1", "a2", "b1", "c1", "c2", "d1")}
    assert keys["a1"] == keys["a2"]
    assert keys["c1"] == keys["c2"]
    assert len(set(keys.values())) == 4


async def test_the_keys_outlast_the_scheduler_and_are_those_of_its_secret(tmp_path: Path) -> None:
    keys = []
    for secret in (SECRET, SECRET, b"other"):
        fleet = Fleet(tmp_path, secret)
        fleet.join("n")
        keys.append((await fleet.tell("n")).key)
    assert keys[0] == keys[1] != keys[2]


async def test_only_the_process_on_the_list_is_told(fleet: Fleet) -> None:
    with pytest.raises(NotFound):
        await fleet.tell("n")
    fleet.join("n")
    with pytest.raises(Conflict):
        await fleet.tell("n", incarnation="another process")
    with pytest.raises(NotFound):
        await fleet.tell("n", sha256="0" * 64)


async def holders(fleet: Fleet, *names: str) -> None:
    """Nodes that have the file."""
    for name in names:
        fleet.join(name)
        await fleet.tell(name)
        await fleet.tell(name, got=True)


async def test_who_sends_wrong_bytes_sends_no_more(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    await holders(fleet, "liar")
    fleet.join("a")
    assert (await fleet.tell("a")).source == "http://liar:8071"
    # A copy that it was not told of counts for nothing.
    await fleet.tell("a", failed="wrong", failed_source="http://elsewhere:1")
    assert (await fleet.tell("a")).source == "http://liar:8071"
    answer = await fleet.tell("a", failed="wrong", failed_source="http://liar:8071")
    assert (answer.go, answer.source) == (True, None)
    assert "liar sent wrong bytes" in caplog.text
    fleet.join("b")
    assert (await fleet.tell("b")).source == "http://a:8071"


async def test_a_source_that_two_in_a_row_cannot_reach_is_left_alone(fleet: Fleet) -> None:
    await holders(fleet, "hidden")
    for name in ("a", "b"):
        fleet.join(name)
        assert (await fleet.tell(name)).source == "http://hidden:8071"
        await fleet.tell(name, failed="gone" if name == "a" else "lacks", failed_source="http://hidden:8071")
        await fleet.tell(name, ended=True)
    fleet.join("c")
    assert (await fleet.tell("c")).source is None
    await fleet.tell("hidden", got=True)
    fleet.join("d")
    assert (await fleet.tell("d")).source == "http://c:8071"


async def test_a_source_that_is_gone_is_replaced_at_once(fleet: Fleet) -> None:
    await holders(fleet, "s")
    fleet.join("a")
    assert (await fleet.tell("a")).source == "http://s:8071"
    fleet.service.node_changed(Change("s", Health.SUSPECT, ""))
    assert (await fleet.tell("a")).source == "http://s:8071"
    fleet.service.node_changed(Change("s", Health.DEAD, ""))
    assert "s" not in fleet.service._tree
    answer = await fleet.tell("a")
    assert (answer.go, answer.source) == (True, None)


async def test_who_waits_hears_of_a_source_as_soon_as_there_is_one(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("busy", "a"):
        fleet.join(name, allowed_upstreams=())
    fleet.join("busy", lease_s=600.0)
    fleet.join("a", lease_s=600.0)
    assert (await fleet.tell("busy")).go
    waiting = asyncio.create_task(fleet.tell("a", waits=True))
    await asyncio.sleep(0)
    assert not waiting.done()
    await fleet.tell("busy", got=True)
    assert (await asyncio.wait_for(waiting, 5)).go
    # Not all can be kept waiting.
    monkeypatch.setattr(spreading, "_MOST_WAITING", 0)
    fleet.join("b", lease_s=600.0)
    assert not (await asyncio.wait_for(fleet.tell("b", waits=True), 5)).go
