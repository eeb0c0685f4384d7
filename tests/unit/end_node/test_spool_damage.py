"""A spool whose file is damaged or foreign, or whose disk is full."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from end_node.spool import Spool
from tests.unit.end_node.test_spool import MIB, Device, draft, numbers, unsure
from tierkit.errors import SetupError, SpoolUnavailable


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path / "spool")


def copy_of(device: Device) -> Path:
    """The files of a spool in use, as a kill would leave them."""
    copy = device.folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(device.folder, copy)
    return copy


def filled(device: Device, *, pictures: int = 40) -> Path:
    spool = device.open()
    for _ in range(pictures):
        spool.add(unsure(picture=b"u" * 20_000))
    copy = copy_of(device)
    spool.close()
    return copy


def usable(folder: Path) -> Spool:
    """A spool that takes answers, after at most one that it could not take."""
    spool = Device(folder).open()
    try:
        spool.add(draft())
    except SpoolUnavailable:
        spool.add(draft())
    return spool


def test_after_a_kill_everything_is_there(device: Device) -> None:
    spool = Device(filled(device)).open()
    assert spool.stats().set_aside == ()
    assert len(spool.undelivered(100)[0]) == 40
    assert spool.add(draft()).sequence == 41
    spool.close()


def test_a_journal_that_is_missing_is_noticed(device: Device) -> None:
    folder = filled(device)
    (folder / "spool.db-wal").unlink()
    before = (folder / "spool.db").read_bytes()
    spool = Device(folder).open()
    (aside,) = spool.stats().set_aside
    assert aside.read_bytes() == before
    assert spool.undelivered(10) == ([], [])
    spool.close()


@pytest.mark.parametrize("keep", [0, 40, 5000])
def test_a_journal_that_is_cut_is_noticed(device: Device, keep: int) -> None:
    folder = filled(device)
    os.truncate(folder / "spool.db-wal", keep)
    spool = Device(folder).open()
    assert [path.name for path in spool.stats().set_aside] == ["damaged-1.db"]
    spool.close()


def test_bytes_of_the_journal_that_are_flipped_are_noticed(device: Device) -> None:
    folder = filled(device)
    flip(folder / "spool.db-wal", at=[5000])
    spool = Device(folder).open()
    assert len(spool.stats().set_aside) == 1
    assert (folder / "damaged-1.db-wal").exists()
    spool.close()


def flip(path: Path, at: list[int]) -> None:
    with path.open("r+b") as file:
        for offset in at:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 0xFF]))


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_are_flipped_anywhere_end_in_a_spool_that_works(device: Device, seed: int) -> None:
    """The numbers continue, or the old file is set aside and a new one with another id begins."""
    chance = random.Random(seed)
    spool = device.open()
    for _ in range(40):
        spool.add(unsure(picture=b"u" * 2000))
    first = spool.id
    spool.close()
    path = device.folder / "spool.db"
    flip(path, [chance.randrange(path.stat().st_size) for _ in range(chance.choice([1, 20, 500]))])
    spool = device.open()
    for _ in range(3):
        try:
            for key in [held.key for held in spool.waiting(50)]:
                spool.picture(key)
                spool.amend(key, reason="none")
            spool.delivered(spool.undelivered(10)[0])
            added = spool.add(draft("another"))
            break
        except SpoolUnavailable:
            continue
    else:
        pytest.fail("the spool does not recover")
    assert added.sequence == 1
    assert (spool.id == first) == (spool.stats().set_aside == ())
    spool.close()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_file_that_is_cut(device: Device, share: float) -> None:
    spool = device.open()
    for _ in range(40):
        spool.add(unsure(picture=b"u" * 2000))
    first = spool.id
    spool.close()
    path = device.folder / "spool.db"
    os.truncate(path, int(path.stat().st_size * share))
    spool = usable(device.folder)
    assert spool.id != first
    assert len(spool.stats().set_aside) == (1 if share else 0)  # there was nothing in it
    spool.close()


@pytest.mark.parametrize("content", [b"not a database", b"x" * 10_000, b"SQLite format 3\0" + b"\0" * 5000])
def test_a_file_of_another_program(device: Device, content: bytes) -> None:
    device.folder.mkdir()
    for number in (1, 2):
        (device.folder / "spool.db").write_bytes(content)
        spool = usable(device.folder)
        assert spool.stats().set_aside[-1].read_bytes() == content
        assert len(spool.stats().set_aside) == number
        spool.close()


@pytest.mark.parametrize(
    "change", ["PRAGMA user_version = 2", "PRAGMA application_id = 7", "DROP TABLE state", "DELETE FROM state"]
)
def test_a_spool_of_another_terrace(device: Device, change: str) -> None:
    spool = device.open()
    spool.add(draft())
    spool.close()
    with closing(sqlite3.connect(device.folder / "spool.db")) as connection, connection:
        connection.execute(change)
    spool = device.open()
    assert numbers([spool.add(draft())]) == [("gate", 1, 0)]
    with closing(sqlite3.connect(spool.stats().set_aside[0])) as connection:
        assert connection.execute("SELECT count(*) FROM observations").fetchone() == (1,)
    spool.close()


def test_damage_while_it_is_in_use(device: Device) -> None:
    """One call fails; then a new file has begun, and the old one stays."""
    spool = device.open()
    for _ in range(200):
        spool.add(unsure(picture=b"u" * 2000, mark="m"))
    first = spool.id
    spool.close()
    spool = device.open()
    path = device.folder / "spool.db"
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    (held,) = spool.waiting(1)
    with pytest.raises(SpoolUnavailable, match="was set aside, and a new one has begun"):
        spool.picture(held.key)
    assert spool.id != first
    assert (spool.add(draft()).sequence, spool.known("gate", ["m"]), len(spool.stats().set_aside)) == (1, set(), 1)
    spool.close()
    spool = device.open()
    assert spool.add(draft()).sequence == 2
    spool.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_full_disk(small_disk: Path) -> None:
    """The answer in hand is refused, nothing is half done, and the spool works again when there is room."""
    device = Device(small_disk / "spool")
    spool = device.open(16 * MIB)
    stored = 0

    def add_until_full() -> None:
        nonlocal stored
        while True:
            spool.add(unsure(picture=b"u" * 20_000))
            stored += 1

    for _ in range(3):
        for _ in range(20):
            spool.add(unsure(picture=b"u" * 20_000))
            stored += 1
        fill(small_disk / "ballast")
        with pytest.raises(SpoolUnavailable, match="full"):
            add_until_full()
        with pytest.raises(SpoolUnavailable):
            spool.add(draft(keeps=True, picture=b"u" * 500_000))
        expected = [("gate", number, 0) for number in range(1, stored + 1)]
        assert numbers(spool.undelivered(1000)[0]) == expected
        spool.close()
        (small_disk / "ballast").unlink()
        spool = device.open(16 * MIB)
        assert numbers(spool.undelivered(1000)[0]) == expected
        for held in spool.waiting(1000):
            assert spool.picture(held.key) == b"u" * 20_000
    for held in spool.waiting(1000):
        spool.amend(held.key, reason="none")
    spool.close()
    with closing(sqlite3.connect(device.folder / "spool.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_damage_on_a_full_disk(small_disk: Path) -> None:
    """A new file begins as soon as there is room for it."""
    spool = Device(small_disk / "spool").open()
    for _ in range(20):
        spool.add(unsure(picture=b"u" * 20_000))
    (held,) = spool.waiting(1)
    spool.close()
    spool = Device(small_disk / "spool").open()
    path = small_disk / "spool" / "spool.db"
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    fill(small_disk / "ballast")
    for _ in range(2):
        with pytest.raises(SpoolUnavailable, match="damaged, and no new one can begin"):
            spool.picture(held.key)
    (small_disk / "ballast").unlink()
    assert spool.picture(held.key) is None
    assert spool.add(draft()).sequence == 1
    assert len(spool.stats().set_aside) == 1
    spool.close()


def test_a_disk_that_is_full_from_the_start(small_disk: Path) -> None:
    fill(small_disk / "ballast")
    with pytest.raises(SetupError, match="cannot use the"):
        Device(small_disk / "spool").open()
    (small_disk / "ballast").unlink()
    spool = Device(small_disk / "spool").open()
    assert spool.add(draft()).sequence == 1
    spool.close()
