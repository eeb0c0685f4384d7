"""A data set in segments: what is in them, what is refused, and the files of a worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.data import ImageSet
from models.dataset import Dataset
from models.training.config import TrainConfig
from models.training.data import TrainingData
from tests.shapes import SHAPES, shape_images
from tierkit.copies.store import Store
from tierkit.errors import DataError, InvalidInput, NotFound, TooLarge
from training.data.manifest import Piece, SegmentManifest, decoded, pieces_in
from training.data.placement import SegmentPlacement, moved, share, that_fit
from training.data.segments import assembled, cut, of_segments, opened

pytestmark = pytest.mark.train

DATA = shape_images(8)
CONFIG = TrainConfig(
    name="net",
    tier="end",
    target="fine",
    network={"kind": "mlp", "options": {"inputs": 192, "hidden": [4]}},  # type: ignore[arg-type]
    epochs=2,
    batch_size=4,
    held_out_per_class=2,
    crop_padding=1,
)


def dataset(data: ImageSet = DATA) -> Dataset:
    return Dataset(name="shapes", hierarchy=SHAPES, source="test", folder=None, reader=lambda split, folder: data)


def prepared(config: TrainConfig = CONFIG) -> TrainingData:
    return TrainingData(config, DATA, SHAPES)


def cut_into(folder: Path, parts: int = 4, config: TrainConfig = CONFIG) -> SegmentManifest:
    return cut(dataset(), prepared(config), config, parts, folder)


def contents(folder: Path, manifest: SegmentManifest) -> list[bytes]:
    return [(folder / entry.sha256).read_bytes() for entry in manifest.segments]


def pieces(folder: Path, manifest: SegmentManifest) -> list[Piece]:
    return [decoded(content, manifest) for content in contents(folder, manifest)]


def test_all_segments_together_are_the_data_set_and_have_its_classes_mixed(tmp_path: Path) -> None:
    manifest = cut_into(tmp_path)
    found = pieces(tmp_path, manifest)
    assert assembled(found[::-1], manifest).digest() == DATA.digest()
    assert all(set(piece.fine) == {0, 1, 2} for piece in found)
    assert sum(int((~piece.train).sum()) for piece in found) == 6
    assert opened(tmp_path, DATA.digest()) == manifest
    assert opened(tmp_path / "none", DATA.digest()) is None


def test_the_same_cut_gives_the_same_files(tmp_path: Path) -> None:
    assert cut_into(tmp_path / "a") == cut_into(tmp_path / "b")


def test_batches_come_from_the_segments_alone_and_are_the_same_everywhere(tmp_path: Path) -> None:
    manifest = cut_into(tmp_path)
    found = pieces(tmp_path, manifest)
    some, again = (of_segments(CONFIG, found[1:3], manifest) for _ in range(2))
    held = np.concatenate([piece.index for piece in found[1:3]])
    assert len(held) == some.train_images + sum(int((~piece.train).sum()) for piece in found[1:3])
    for step in range(20):
        one, other = some.batches.batch(step), again.batches.batch(step)
        assert (one.index == other.index).all()
        assert (one.images == other.images).all()
        assert np.concatenate([piece.train for piece in found[1:3]])[one.index.numpy()].all()
    whole = prepared()
    assert some.batches.statistics == whole.batches.statistics
    assert some.batches.steps_per_epoch == whole.batches.steps_per_epoch
    assert some.sha256 == whole.sha256


def test_segments_that_are_not_the_data_set_are_refused(tmp_path: Path) -> None:
    manifest = cut_into(tmp_path)
    found = pieces(tmp_path, manifest)
    with pytest.raises(DataError, match="lack images"):
        assembled(found[1:], manifest)
    with pytest.raises(DataError, match="twice"):
        assembled([found[0], *found[:3]], manifest)
    changed = dataclasses.replace(found[0], images=found[0].images + np.uint8(1))
    with pytest.raises(DataError, match="not the data set"):
        assembled([changed, *found[1:]], manifest)
    with pytest.raises(DataError, match="another data set"):
        opened(tmp_path, "0" * 64)
    (tmp_path / manifest.segments[0].sha256).write_bytes(b"x")
    with pytest.raises(DataError, match="damaged"):
        opened(tmp_path, manifest.data_sha256)


def test_what_cannot_be_cut_is_told(tmp_path: Path) -> None:
    for parts in (0, 37, 2_000):
        with pytest.raises(InvalidInput):
            cut_into(tmp_path, parts)
    noisy = CONFIG.model_copy(update={"label_noise": 0.5})
    with pytest.raises(InvalidInput, match="label_noise"):
        cut_into(tmp_path, config=noisy)


@given(st.binary(max_size=300), st.integers(0, 300))
@settings(max_examples=50)
def test_bytes_that_are_no_segment_are_refused(garbage: bytes, at: int) -> None:
    manifest, content = _MADE
    for bad in (garbage, content[:at], content[:at] + garbage + content[at + len(garbage) :]):
        try:
            decoded(bad, manifest)
        except DataError:
            continue
        assert len(bad) == len(content)  # other pixels, which a hash would tell


def _made() -> tuple[SegmentManifest, bytes]:
    with TemporaryDirectory() as folder:
        manifest = cut_into(Path(folder), 2)
        return manifest, contents(Path(folder), manifest)[0]


_MADE = _made()


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"chunk_bytes": 0},
        {"chunk_bytes": 10},
        {"shape": [8, 8, 300]},
        {"std": 0},
        {"segments": []},
    ],
    ids=str,
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    manifest, _ = _MADE
    with pytest.raises(ValidationError):
        SegmentManifest.model_validate({**manifest.model_dump(mode="json"), **change})


def test_the_same_segment_twice_is_refused() -> None:
    manifest, _ = _MADE
    told = manifest.model_dump(mode="json")
    with pytest.raises(ValidationError):
        SegmentManifest.model_validate({**told, "segments": [told["segments"][0]] * 2})


async def test_segments_are_read_from_a_store(tmp_path: Path) -> None:
    manifest = cut_into(tmp_path / "host")
    content = contents(tmp_path / "host", manifest)[1]
    store = Store(tmp_path / "w", manifest.files)
    await store.put(1, 0, content)
    assert pieces_in(store, [1], manifest)[0].index.tolist() == decoded(content, manifest).index.tolist()
    with pytest.raises(NotFound):
        pieces_in(store, [1, 0], manifest)


# --- who holds what ---


@pytest.mark.parametrize(
    ("room", "speed", "speeds", "count"),
    [
        (9, 0, [], 2),
        (9, 10, [10, 10, 10], 2),
        (9, 20, [10, 10, 20], 4),
        (9, 90, [10, 10, 90], 4),
        (9, 1, [10, 10, 1], 2),
        (3, 20, [10, 10, 20], 3),
        (1, 20, [10, 10, 20], 1),
    ],
)
def test_a_worker_holds_what_it_has_room_and_speed_for(
    room: int, speed: float, speeds: list[float], count: int
) -> None:
    assert share(room=room, speed=speed, speeds=speeds) == count


def place(
    placement: SegmentPlacement, worker: str, *, room: int = 4, holds: Iterable[int] = (), steps: int = 0
) -> list[int]:
    return list(placement.place(worker, room=room, holds=frozenset(holds), steps=steps, speeds={}))


def test_worker_j_holds_j_and_the_next_one_and_every_segment_is_held() -> None:
    placement = SegmentPlacement(parts=4, images=10, batch=5)
    assert [place(placement, f"w{n}") for n in (1, 2, 3)] == [[1, 2], [2, 3], [3, 0]]
    placement.leave("w2")
    assert place(placement, "w9") == [2, 3]


def test_after_a_pass_the_first_segment_goes_and_the_next_one_comes() -> None:
    placement = SegmentPlacement(parts=4, images=10, batch=5)
    places = [place(placement, "w")]
    for steps in (3, 4, 7, 8, 12):
        places.append(place(placement, "w", holds=places[-1], steps=steps))
    assert places == [[1, 2], [1, 2], [2, 3], [2, 3], [3, 0], [0, 1]]


def test_nothing_goes_while_what_comes_is_not_there() -> None:
    placement = SegmentPlacement(parts=4, images=10, batch=5)
    place(placement, "w")
    assert place(placement, "w", holds={1, 2}, steps=4) == [2, 3]
    assert place(placement, "w", holds={1, 2}, steps=40) == [2, 3]
    assert place(placement, "w", holds={1, 2, 3}, steps=41) == [3, 0]


@pytest.mark.parametrize(
    ("numbers", "count", "holds", "room", "expected"),
    [
        ((1, 2), 2, {1, 2}, 3, (2, 3)),
        ((1, 2), 2, {1, 2}, 2, (1, 2)),  # there is no room for the next one beside these
        ((1, 2), 2, {0, 1, 2}, 3, (1, 2)),  # nor beside one that batches are still drawn from
        ((1, 2), 2, {1, 2, 3}, 3, (2, 3)),  # it is here already
        ((1, 2), 4, {1, 2}, 5, (2, 3, 4, 5)),
        ((1, 2), 4, {1, 2}, 4, (2, 3, 4)),  # fewer come
        ((1,), 2, {1}, 3, (2, 3)),
        ((1,), 1, {1}, 1, (1,)),
        ((5, 0), 2, {5, 0}, 6, (0, 1)),
        ((1, 3), 2, {1, 3}, 6, (3, 4)),
        ((3, 1), 2, {3, 1}, 6, (1, 2)),
        ((1, 2, 3), 2, {1, 2, 3}, 6, (1, 2, 3)),
        ((0, 1, 2, 3, 4, 5), 6, {0, 1, 2, 3, 4, 5}, 6, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_only_segments_that_fit_beside_the_old_ones_come(
    numbers: tuple[int, ...], count: int, holds: set[int], room: int, expected: tuple[int, ...]
) -> None:
    assert moved(numbers, count=count, holds=frozenset(holds), room=room, parts=6) == expected


@pytest.mark.parametrize(
    ("numbers", "holds", "room", "expected"),
    [
        ((1, 2), set(), 2, (1, 2)),
        ((1, 2), {1, 2}, 2, (1, 2)),
        ((2, 3), {1, 2}, 3, (2, 3)),
        ((2, 3), {1, 2}, 2, (1, 2)),  # the disk was filled during the swap: all is as before
        ((0, 1), {5, 0}, 2, (5, 0)),
        ((1, 2), {2}, 1, (2,)),
        ((1,), {2}, 1, (2,)),
        ((1, 2), {5}, 2, (5, 1)),  # left there by an earlier process
        ((1, 2), {4, 5}, 2, (4, 5)),
        ((1, 2, 3), set(), 2, (1, 2)),
        ((1, 2), {0, 1, 2, 3, 4, 5}, 1, (0, 1)),  # as no honest worker says
    ],
)
def test_a_worker_whose_disk_is_filled_goes_on_with_what_it_holds(
    numbers: tuple[int, ...], holds: set[int], room: int, expected: tuple[int, ...]
) -> None:
    assert that_fit(numbers, holds=frozenset(holds), room=room, parts=6) == expected


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 30), st.sets(st.integers(0, 6))), max_size=20),
    st.integers(1, 7),
)
def test_whatever_a_worker_says_it_gets_different_segments_that_exist(
    said: list[tuple[int, int, set[int]]], parts: int
) -> None:
    placement, steps = SegmentPlacement(parts=parts, images=10, batch=5), 0
    for room, more, holds in said:
        steps += more
        known = frozenset(each for each in holds if each < parts)
        found = place(placement, "w", room=room, holds=known, steps=steps)
        assert 0 < len(set(found)) == len(found) <= room
        assert set(found) <= set(range(parts))
        # Those of an honest worker fit on its disk, beside what it holds until it has them.
        assert len(known.union(found)) <= max(room, len(known))


def test_a_worker_without_room_is_refused() -> None:
    with pytest.raises(TooLarge):
        place(SegmentPlacement(parts=4, images=10, batch=5), "w", room=0)
