"""Input files: whole or not there, shared by content, gone with their last holder."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.ingest.inputs import InputFiles
from tierkit.errors import DataError, TooLarge

SHAPE = (4, 4, 3)


@pytest.fixture
def files(tmp_path) -> InputFiles:
    return InputFiles(tmp_path / "inputs", SHAPE)


def pixels(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), np.uint8)


def write(files: InputFiles, *parts: np.ndarray) -> str:
    with files.create(max_images=10) as writer:
        for part in parts:
            writer.append(part)
        return files.keep(writer)


def names(files: InputFiles) -> list[str]:
    return [path.name for path in files.folder.iterdir()]


def test_the_folder_is_its_owners_alone(tmp_path):
    (tmp_path / "old").mkdir(mode=0o755)
    for name in ("old", "new"):
        assert InputFiles(tmp_path / name, SHAPE).folder.stat().st_mode & 0o777 == 0o700


def test_what_is_written_is_mapped_back_read_only(files):
    images = pixels(5)
    sha256 = write(files, images[:2], images[2:])
    found = files.open(sha256, 5)
    assert np.array_equal(found, images)
    assert not found.flags.writeable
    assert not found[1:3].flags.owndata


def test_the_name_is_the_content(files):
    images = pixels(4)
    assert write(files, images) == write(files, images[:1], images[1:])
    assert write(files, images) != write(files, images[::-1])
    assert len(names(files)) == 2


def test_the_same_bytes_as_other_images_are_another_input(files, tmp_path):
    other = InputFiles(tmp_path / "other", (2, 8, 3))
    assert write(files, pixels(1)) != write(other, pixels(1).reshape(1, 2, 8, 3))


def test_a_writer_that_is_left_early_leaves_nothing(files):
    with files.create(max_images=10) as writer:
        writer.append(pixels(1))
    assert names(files) == []


def test_left_overs_of_a_crash_are_removed_at_start(files):
    with files.create(max_images=10) as writer:
        writer.append(pixels(1))
        assert len(names(files)) == 1
        InputFiles(files.folder, SHAPE)
        assert names(files) == []


def test_a_file_lives_as_long_as_it_is_held(files):
    sha256 = write(files, pixels(1))
    assert write(files, pixels(1)) == sha256
    files.release(sha256)
    mapped = files.open(sha256, 1)
    files.release(sha256)
    assert names(files) == []
    assert np.array_equal(mapped, pixels(1))


def test_strays_are_removed_and_held_files_kept(files):
    kept, stray = write(files, pixels(1)), write(files, pixels(2))
    again = InputFiles(files.folder, SHAPE)
    again.hold(kept)
    again.remove_strays()
    assert names(again) == [f"{kept}.u8"]
    with pytest.raises(DataError, match="is gone"):
        again.open(stray, 2)


def test_a_file_of_another_size_is_refused(files):
    sha256 = write(files, pixels(2))
    files.path(sha256).write_bytes(b"short")
    with pytest.raises(DataError, match="5 bytes instead of 96"):
        files.open(sha256, 2)


def test_more_images_than_the_limit(files):
    with files.create(max_images=3) as writer:
        writer.append(pixels(3))
        with pytest.raises(TooLarge, match="more than 3 images"):
            writer.append(pixels(1))
    with files.create(max_images=3) as writer, pytest.raises(TooLarge, match="more than 3 images in one job"):
        writer.append(pixels(4))
