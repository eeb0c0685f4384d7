"""Folders as sources: each file once, when it is whole."""

import asyncio
import io
import logging
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from end_node.sources import folder as folders
from tests.integration.end_node.intakes import KeepingIntake, kept
from tierkit.errors import SpoolUnavailable
from tierkit.testing import wait_for


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_TICK_S": 0.02, "_STILL_S": 0.1, "_INCOMPLETE_S": 0.5, "_REPORT_MS": 20}.items():
        monkeypatch.setattr(folders, name, value)


@pytest.fixture
def intake() -> KeepingIntake:
    return KeepingIntake()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "pictures"
    path.mkdir()
    return path


def picture(kind: str = "JPEG", value: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (value, 100, 200)).save(file, kind)
    return file.getvalue()


def put(path: Path, age_s: float, content: bytes | None = None) -> Path:
    """A file that was written `age_s` before a fixed moment."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(picture() if content is None else content)
    os.utime(path, (1.7e9 - age_s, 1.7e9 - age_s))
    return path


async def test_files_are_taken_by_time_then_name_and_only_pictures(
    folder: Path, intake: KeepingIntake, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    outside = put(folder.parent / "outside.jpg", 5)
    put(folder / "b.jpg", 20)
    put(folder / "a.png", 10, picture("PNG"))
    put(folder / "deep" / "er" / "c.webp", 30, picture("WEBP"))
    put(folder / "aa.jpg", 20)
    put(folder / "nosuffix", 5)
    put(folder / "README", 5, b"no picture")
    put(folder / "notes.txt", 5)
    put(folder / ".hidden.jpg", 5)
    put(folder / ".d" / "hidden.jpg", 5)
    (folder / "link.jpg").symlink_to(outside)
    (folder / "inner.jpg").symlink_to(folder / "b.jpg")
    (folder / "away").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe.jpg")

    async with kept(intake, folder) as keeper:
        await wait_for(lambda: len(intake.names) >= 5, what="the pictures")
        put(folder / "last.jpg", 0)
        await wait_for(lambda: "last.jpg" in intake.names, what="the picture that came later")
        assert (keeper.status.state, keeper.status.kind, keeper.status.taken) == ("running", "folder", 6)

    assert intake.names == ["deep/er/c.webp", "aa.jpg", "b.jpg", "a.png", "nosuffix", "last.jpg"]
    assert len({each.mark for each in intake.pictures}) == 6
    assert caplog.text.count("2 link that leads outside the folder") == 1
    assert caplog.text.count("1 .txt") == 1


async def test_a_file_is_taken_once_across_restarts_and_again_when_its_content_is_new(
    folder: Path, intake: KeepingIntake
) -> None:
    put(folder / "a.jpg", 10)
    async with kept(intake, folder):
        await wait_for(lambda: intake.names == ["a.jpg"], what="the picture")
    put(folder / "b.jpg", 20)
    async with kept(intake, folder):
        await wait_for(lambda: intake.names == ["a.jpg", "b.jpg"], what="the new picture")
        put(folder / "a.jpg", 0, picture(value=1))
        await wait_for(lambda: len(intake.names) == 3, what="the picture of the new content")
    assert intake.pictures[2].content == picture(value=1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF"])
async def test_a_file_that_grows_is_taken_when_it_is_whole(
    kind: str, folder: Path, intake: KeepingIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = picture(kind)
    path = folder / f"a.{kind.lower()}"
    # Much longer than the test takes: only the end of the file may let it be taken.
    monkeypatch.setattr(folders, "_INCOMPLETE_S", 1000.0)
    async with kept(intake, folder) as keeper:
        await wait_for(lambda: keeper.status.state == "running", what="the source")
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            put(folder / "whole.jpg", 0)
            await wait_for(lambda: intake.names == ["whole.jpg"], what="the file that is whole")
            file.write(content[len(content) // 2 :])
        await wait_for(lambda: len(intake.names) == 2, what="the file")
    assert intake.pictures[1].content == content


async def test_a_file_that_stays_incomplete_is_taken_as_it_is(folder: Path, intake: KeepingIntake) -> None:
    put(folder / "half.jpg", 10, picture()[:100])
    put(folder / "empty.jpg", 10, b"")
    async with kept(intake, folder):
        await wait_for(lambda: len(intake.names) == 2, what="the files")
    assert {each.name: each.content for each in intake.pictures} == {"half.jpg": picture()[:100], "empty.jpg": b""}


async def test_files_that_are_too_large_are_refused_by_name(
    folder: Path, intake: KeepingIntake, caplog: pytest.LogCaptureFixture
) -> None:
    with put(folder / "large.jpg", 10).open("r+b") as file:
        file.truncate(folders.MAX_FILE_BYTES + 1)
    put(folder / "small.jpg", 5)
    async with kept(intake, folder) as keeper:
        await wait_for(lambda: keeper.status.skipped == 1 and bool(intake.names), what="both files")
    assert intake.names == ["small.jpg"]
    assert caplog.text.count("large.jpg") == 1


async def test_files_are_moved_once_they_are_answered_and_no_name_is_overwritten(
    folder: Path, intake: KeepingIntake
) -> None:
    done = folder / "done"
    put(done / "a.jpg", 50, b"of old")
    put(folder / "a.jpg", 10)
    put(folder / "deep" / "b.jpg", 5)
    async with kept(intake, folder, after="move", move_to=str(done)):
        await wait_for(lambda: (done / "deep" / "b.jpg").exists(), what="the second file")
    assert intake.names == ["a.jpg", "deep/b.jpg"]
    assert (done / "a.jpg").read_bytes() == b"of old"
    assert (done / "a-2.jpg").read_bytes() == picture()
    assert not (folder / "a.jpg").exists()


async def test_a_file_that_was_answered_before_the_node_stopped_is_deleted_by_the_next_start(
    folder: Path, intake: KeepingIntake
) -> None:
    path = put(folder / "a.jpg", 10)
    async with kept(intake, folder):
        await wait_for(lambda: bool(intake.names), what="the picture")
    async with kept(intake, folder, after="delete"):
        await wait_for(lambda: not path.exists(), what="the end of the file")
    assert intake.names == ["a.jpg"]


async def test_a_folder_that_vanishes_and_comes_back(folder: Path, intake: KeepingIntake) -> None:
    put(folder / "a.jpg", 10)
    async with kept(intake, folder, kind="folder") as keeper:
        await wait_for(lambda: bool(intake.names), what="the picture")
        away = folder.with_name("away")
        os.rename(folder, away)
        await wait_for(lambda: keeper.status.state == "waiting", what="the trouble")
        assert "No such file or directory" in keeper.status.reason
        os.rename(away, folder)
        put(folder / "b.jpg", 5)
        await wait_for(lambda: len(intake.names) == 2, what="the new picture")
        assert keeper.status.restarts >= 1
    assert intake.names == ["a.jpg", "b.jpg"]


async def test_a_full_spool_loses_no_file(folder: Path, intake: KeepingIntake) -> None:
    put(folder / "a.jpg", 10)
    intake.error = SpoolUnavailable("the disk is full")
    async with kept(intake, folder) as keeper:
        await wait_for(lambda: keeper.status.reason == "the disk is full", what="the reason")
        intake.error = None
        await wait_for(lambda: intake.names == ["a.jpg"], what="the picture")


async def test_a_paused_source_takes_nothing(folder: Path, intake: KeepingIntake) -> None:
    async with kept(intake, folder) as keeper:
        await wait_for(lambda: keeper.status.state == "running", what="the source")
        keeper.pause()
        await wait_for(lambda: keeper.status.state == "paused", what="the pause")
        put(folder / "a.jpg", 10)
        assert not intake.names
        keeper.resume()
        await wait_for(lambda: intake.names == ["a.jpg"], what="the picture")


async def test_many_files_are_all_taken_with_few_in_memory(
    folder: Path, intake: KeepingIntake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_MOST_WAITING", 20)
    monkeypatch.setattr(folders, "_PART", 7)
    monkeypatch.setattr(folders, "_IN_A_ROW", 10)
    for number in range(200):
        put(folder / f"{number:03}.jpg", 1000 - number)
    async with kept(intake, folder):
        await wait_for(lambda: len(intake.names) == 200, what="the pictures", timeout_s=60)
    assert len(set(intake.names)) == 200
    # The oldest come first, whatever the order of the folder; a few may be seen before all have been listed.
    assert set(intake.names[:40]) >= {f"{number:03}.jpg" for number in range(20)}


async def test_a_folder_that_cannot_be_watched_is_read_again_and_again(
    folder: Path, intake: KeepingIntake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def watch(*paths: object, **options: object) -> None:
        raise OSError("no space left for watches")

    monkeypatch.setattr("watchfiles.watch", watch)
    monkeypatch.setattr(folders, "_RESCAN_UNWATCHED_S", 0.1)
    async with kept(intake, folder) as keeper:
        await wait_for(lambda: keeper.status.state == "running", what="the source")
        for name in ("a.jpg", "b.jpg"):
            put(folder / name, 10)
            await wait_for(lambda name=name: name in intake.names, what="the picture")  # type: ignore[misc]
    assert caplog.text.count("no space left for watches") == 1


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
async def test_rsync_fills_a_folder(folder: Path, intake: KeepingIntake) -> None:
    origin = folder.with_name("origin")
    for number in range(50):
        put(origin / str(number % 3) / f"{number}.jpg", number, picture(value=number))
    async with kept(intake, folder):
        rsync = ["rsync", "-a", f"{origin}/", str(folder)]
        for _ in range(2):
            assert await (await asyncio.create_subprocess_exec(*rsync)).wait() == 0
        await wait_for(lambda: len(intake.names) == 50, what="the pictures")
    assert {each.name: each.content for each in intake.pictures} == {
        f"{number % 3}/{number}.jpg": picture(value=number) for number in range(50)
    }
