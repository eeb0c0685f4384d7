"""Input files: whole or not there, shared by content, gone with their last holder."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from models.manifest import Fit
from models.pictures import Picture
from scheduler.ingest.inputs import FileWriter, ImageWriter, InputFiles
from tierkit.errors import DataError, TooLarge

SHAPE = (4, 4, 3)
FIT = Fit(4, 4)


@pytest.fixture
def files(tmp_path) -> InputFiles:
    return InputFiles(tmp_path / "inputs", FIT)


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
        assert InputFiles(tmp_path / name, FIT).folder.stat().st_mode & 0o777 == 0o700


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
    other = InputFiles(tmp_path / "other", Fit(2, 8))
    assert write(files, pixels(1)) != write(other, pixels(1).reshape(1, 2, 8, 3))


def test_a_writer_that_is_left_early_leaves_nothing(files):
    with files.create(max_images=10) as writer:
        writer.append(pixels(1))
    assert names(files) == []


def test_left_overs_of_a_crash_are_removed_at_start(files):
    with files.create(max_images=10) as writer:
        writer.append(pixels(1))
        assert len(names(files)) == 1
        InputFiles(files.folder, FIT)
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
    again = InputFiles(files.folder, FIT)
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


@pytest.fixture
def pictures(tmp_path) -> InputFiles:
    return InputFiles(tmp_path / "pictures", None)


def write_files(inputs: InputFiles, *files: bytes | None) -> tuple[str, ImageWriter]:
    with inputs.create(max_images=10) as writer:
        for file in files:
            if file is None:
                writer.skip()
            else:
                writer.add(Picture(file, "x", max_bytes=10**6, max_pixels=10**6), file)
        return inputs.keep(writer), writer


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 5 + value), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_files_are_kept_as_they_came(pictures):
    files = [png(number) for number in range(4)]
    sha256, _ = write_files(pictures, *files)
    found = pictures.open(sha256, 4)
    assert len(found) == 4
    assert found[1:3].tolist() == files[1:3]
    assert found[2:99].tolist() == files[2:]
    assert found[0:4].dtype == object


def test_a_picture_that_cannot_be_read_keeps_its_place(pictures):
    sha256, writer = write_files(pictures, png(0), None, png(1))
    assert writer.images == 3
    assert pictures.open(sha256, 3)[0:3].tolist() == [png(0), b"", png(1)]


def test_the_same_bytes_as_other_files_are_another_input(pictures):
    assert write_files(pictures, png(0), png(1))[0] != write_files(pictures, png(1), png(0))[0]
    assert write_files(pictures, png(0), None)[0] != write_files(pictures, None, png(0))[0]


def test_arrays_become_files_without_loss(pictures):
    images = pixels(2)
    with pictures.create(max_images=10) as writer:
        writer.append(images)
        sha256 = pictures.keep(writer)
    for file, image in zip(pictures.open(sha256, 2)[0:2], images, strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(file))), image)


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content + b"x", lambda content: b""])
def test_a_file_without_its_places_is_refused(pictures, damage):
    sha256, _ = write_files(pictures, png(0), png(1))
    path = pictures.path(sha256)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="is damaged"):
        pictures.open(sha256, 2)
    with pytest.raises(DataError, match="is damaged"):
        pictures.open(sha256, 3)


@pytest.mark.parametrize(("largest", "expected"), [(1, 2**25), (2**25, 1), (2**25 + 1, 1), (10 * 2**20, 3)])
def test_a_task_has_no_more_files_than_a_request_may_carry(largest, expected):
    writer = FileWriter(io.BytesIO(), 10, "one job")
    writer.largest = largest
    assert writer.images_per_task == expected


def test_more_images_than_the_limit(files):
    with files.create(max_images=3) as writer:
        writer.append(pixels(3))
        with pytest.raises(TooLarge, match="more than 3 images"):
            writer.append(pixels(1))
    with files.create(max_images=3) as writer, pytest.raises(TooLarge, match="more than 3 images in one job"):
        writer.append(pixels(4))
