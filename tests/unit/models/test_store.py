"""Where a node finds weights, and how it fetches those that it lacks."""

import hashlib
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from models.manifest import ModelEntry, load_manifest
from models.store import ModelStore
from tierkit.errors import SetupError, WeightsError

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def entry() -> ModelEntry:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return (
        load_manifest().models[0].model_copy(update={"file": "net.onnx", "sha256": digest, "size_bytes": len(CONTENT)})
    )


def left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


class Source:
    """Yields given blocks, and counts how often it was asked."""

    def __init__(self, *blocks: bytes) -> None:
        self.blocks = blocks
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, name: str, sha256: str) -> AsyncIterator[bytes]:
        self.asked.append((name, sha256))
        for block in self.blocks:
            yield block


async def test_a_missing_file_is_fetched_once_and_kept(tmp_path: Path, entry: ModelEntry):
    store, source = ModelStore([tmp_path / "given"], tmp_path / "cache"), Source(CONTENT[:99], CONTENT[99:])
    assert store.find(entry) is None
    path = await store.obtain(entry, source)
    assert path.read_bytes() == CONTENT
    assert await store.obtain(entry, source) == path == store.find(entry)
    assert source.asked == [(entry.name, entry.sha256)]


async def test_a_large_file_is_not_held_in_memory_and_an_endless_one_ends(tmp_path: Path, entry: ModelEntry):
    block, blocks = bytes(1 << 20), 200
    digest = hashlib.sha256(block * blocks).hexdigest()
    large = entry.model_copy(update={"sha256": digest, "size_bytes": blocks << 20})
    store = ModelStore([], tmp_path)
    tracemalloc.start()
    try:
        path = await store.obtain(large, Source(*[block] * blocks))
        with pytest.raises(WeightsError, match="longer"):
            await store.obtain(large.model_copy(update={"sha256": "0" * 64}), Source(*[block] * (blocks + 1)))
        assert tracemalloc.get_traced_memory()[1] < 160 << 20
    finally:
        tracemalloc.stop()
    assert path.stat().st_size == blocks << 20
    assert left(tmp_path) == [path]


@pytest.mark.parametrize("size_bytes", [0, 2**31 + 1, 10**15])
def test_a_file_that_no_onnx_file_can_be_is_refused(entry: ModelEntry, size_bytes: int):
    with pytest.raises(ValueError, match="size_bytes"):
        ModelEntry.model_validate({**entry.model_dump(), "size_bytes": size_bytes})


async def test_a_given_folder_comes_first(tmp_path: Path, entry: ModelEntry):
    (tmp_path / "net.onnx").write_bytes(CONTENT)
    source = Source()
    assert await ModelStore([tmp_path], tmp_path / "cache").obtain(entry, source) == tmp_path / "net.onnx"
    assert source.asked == []


async def test_a_damaged_file_in_a_given_folder_is_an_error_and_is_named(tmp_path: Path, entry: ModelEntry):
    (tmp_path / "net.onnx").write_bytes(CONTENT[:-1])
    found = hashlib.sha256(CONTENT[:-1]).hexdigest()
    source = Source(CONTENT)
    with pytest.raises(WeightsError, match=rf"net\.onnx is damaged.*{found}.*{entry.sha256}"):
        await ModelStore([tmp_path], tmp_path / "cache").obtain(entry, source)
    assert source.asked == []


async def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, entry: ModelEntry):
    (tmp_path / "net.onnx").mkdir()
    with pytest.raises(WeightsError, match=r"cannot read the weights file .*net\.onnx"):
        ModelStore([tmp_path], tmp_path / "cache").find(entry)


async def test_a_damaged_copy_in_the_cache_is_thrown_away_aloud_and_fetched_again(
    tmp_path: Path, entry: ModelEntry, caplog: pytest.LogCaptureFixture
):
    store = ModelStore([], tmp_path / "cache")
    path = await store.obtain(entry, Source(CONTENT))
    assert caplog.records == []
    path.write_bytes(CONTENT[:-1])
    assert store.find(entry) is None
    assert (await store.obtain(entry, Source(CONTENT))).read_bytes() == CONTENT
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("WARNING", "a damaged copy in the cache was thrown away")
    assert vars(record)["file"] == str(path)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([CONTENT[:-1]], "differ from the manifest"),
        ([CONTENT[:-1], b"x"], "differ from the manifest"),
        ([], "differ from the manifest"),
        ([CONTENT, b"x"], "longer than"),
    ],
)
async def test_wrong_bytes_are_never_kept(tmp_path: Path, entry: ModelEntry, blocks, message: str):
    store = ModelStore([], tmp_path / "cache")
    with pytest.raises(WeightsError, match=message):
        await store.obtain(entry, Source(*blocks))
    assert store.find(entry) is None
    assert left(tmp_path) == []


async def test_a_transfer_that_breaks_leaves_nothing(tmp_path: Path, entry: ModelEntry):
    async def breaks(name: str, sha256: str) -> AsyncIterator[bytes]:
        yield CONTENT[:10]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await ModelStore([], tmp_path / "cache").obtain(entry, breaks)
    assert left(tmp_path) == []


async def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, entry: ModelEntry, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SetupError, match="No space left"):
        await ModelStore([], tmp_path / "cache").obtain(entry, Source(CONTENT))
    assert left(tmp_path) == []
