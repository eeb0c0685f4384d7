"""Files of a worker on its disk: partial ones, whole ones, damaged ones, and those that are dropped."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierkit.copies.files import FileParts, sha256_of
from tierkit.copies.store import Store
from tierkit.errors import InvalidAnswer, NotFound, SetupError

CHUNK = 500
CONTENTS = [random.Random(number).randbytes(1_700 + number) for number in range(4)]


def parts_of(content: bytes, size: int = CHUNK) -> FileParts:
    chunks = tuple(sha256_of(content[at : at + size]) for at in range(0, len(content), size))
    return FileParts(sha256=sha256_of(content), bytes=len(content), chunk_bytes=size, chunks=chunks)


FILES = [parts_of(content) for content in CONTENTS]
WHOLE = [parts_of(content, 2_000) for content in CONTENTS]
"""In one chunk each."""


async def test_a_file_has_its_name_when_all_of_it_is_there(tmp_path: Path) -> None:
    content = CONTENTS[0]
    store = Store(tmp_path / "w", FILES)
    store.begin(0)
    chunks = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
    for number, chunk in enumerate(chunks[:-1]):
        await store.put(0, number, chunk)
    assert store.holds == ()
    assert not (tmp_path / "w" / FILES[0].sha256).exists()
    with pytest.raises(NotFound):
        store.content(0)
    # What is there is passed on; what comes meanwhile is waited for.
    first, size = await store.read(FILES[0].sha256, range(500))
    assert (first, size) == (chunks[0], len(content))
    waiting = asyncio.create_task(store.read(FILES[0].sha256, None))
    await asyncio.sleep(0)
    await store.put(0, len(chunks) - 1, chunks[-1])
    assert (await waiting)[0] == content
    assert 0 in store.holds
    assert store.lacks(0) == []


async def test_an_interrupted_copy_goes_on_with_the_chunks_that_are_right(tmp_path: Path) -> None:
    content = CONTENTS[0]
    store = Store(tmp_path / "w", FILES)
    for number in (0, 2):
        await store.put(0, number, content[number * 500 : number * 500 + 500])
    half = next((tmp_path / "w").glob("*.part"))
    damaged = bytearray(half.read_bytes())
    damaged[3] ^= 1
    half.write_bytes(damaged)
    again = Store(tmp_path / "w", FILES)
    assert 2 not in again.lacks(0)
    assert {0, 1} < set(again.lacks(0))


async def test_wrong_chunks_are_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "w", FILES)
    with pytest.raises(InvalidAnswer):
        await store.put(0, 0, bytes(500))
    assert 0 in store.lacks(0)
    assert list((tmp_path / "w").iterdir()) == []


async def test_a_full_disk_leaves_nothing_of_the_file(tmp_path: Path) -> None:
    content, writes = CONTENTS[0], [0]

    def write(file: int, piece: bytes, at: int) -> int:
        writes[0] += 1
        if writes[0] > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(file, piece[:300], at)  # a write may be cut short

    store = Store(tmp_path / "w", FILES, write=write)
    await store.put(0, 0, content[:500])
    with pytest.raises(SetupError, match=r"No space left.*--cache"):
        await store.put(0, 1, content[500:1000])
    assert list((tmp_path / "w").iterdir()) == []
    assert 0 in store.lacks(0)


async def test_what_is_damaged_on_disk_is_copied_again(tmp_path: Path) -> None:
    content = CONTENTS[0]
    await Store(tmp_path / "w", WHOLE).put(0, 0, content)
    path = tmp_path / "w" / WHOLE[0].sha256
    assert Store(tmp_path / "w", WHOLE).holds == (0,)
    path.write_bytes(content[:-1] + b"?")
    assert Store(tmp_path / "w", WHOLE).holds == ()


async def test_a_file_that_is_not_needed_is_passed_on_for_some_seconds_more(tmp_path: Path) -> None:
    store = Store(tmp_path / "w", WHOLE)
    for number in (0, 1, 2):
        await store.put(number, 0, CONTENTS[number])
    store.keep_only({1, 2}, now=100.0)
    assert store.holds == (1, 2)
    assert (await store.read(WHOLE[0].sha256, None))[0] == CONTENTS[0]
    store.keep_only({0, 1}, now=109.0)  # it is needed again
    assert store.holds == (0, 1)
    store.keep_only({0, 1}, now=119.0)
    with pytest.raises(NotFound):
        await store.read(WHOLE[2].sha256, None)
    assert len(list((tmp_path / "w").iterdir())) == 2


async def test_room_is_what_is_left_beside_files_that_are_about_to_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "w", WHOLE)
    capacity = 3 * max(map(len, CONTENTS)) + 10

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=capacity - sum(path.stat().st_size for path in folder.iterdir()))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert store.room() == 3
    for number in (0, 1, 2):
        await store.put(number, 0, CONTENTS[number])
    assert store.room() == 3
    store.keep_only({1, 2}, now=100.0)
    assert store.room() == 2
    store.keep_only({1, 2}, now=111.0)
    assert store.room() == 3
    store.begin(3)
    assert store.room() >= 3
