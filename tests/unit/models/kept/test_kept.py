"""The kept sample: balanced, bounded, and never the reason that anything is lost."""

from __future__ import annotations

import dataclasses
import math
import resource
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from models.hierarchy import Hierarchy, bundled_hierarchy
from models.kept.sample import Cell, KeptPicture, Kind, checked, kind_of, which_to_drop
from models.kept.store import KeptStore
from tierkit.errors import InvalidAnswer, SetupError, SpoolUnavailable
from tierkit.types import Tier

SIZE = 1 << 20


@pytest.fixture(scope="module")
def classes() -> Hierarchy:
    return bundled_hierarchy("cifar-100")


def picture(sequence: int, *, label: int = 0, kind: Kind = "differs", classes: str = "c", **other) -> KeptPicture:
    given = {
        "source": "door",
        "sequence": sequence,
        "sha256": "0" * 64,
        "release": 1,
        "local_sha256": "1" * 64,
        "local": 0,
        "local_confidence": 0.5,
        "margin": 0.1,
        "tier": Tier.CLOUD,
        "node_id": "cloud-1",
        "upper_sha256": "2" * 64,
        "label": label,
        "confidence": 0.9,
        "coarse_label": 0,
        "coarse_confidence": 0.9,
        "kind": kind,
        "form": "pixels",
        "classes": classes,
    }
    return KeptPicture(**{**given, **other})


@pytest.mark.parametrize(
    ("local", "above", "unsure", "kind"),
    [(1, 2, True, "differs"), (1, 2, False, "differs"), (1, 1, True, "unsure"), (1, 1, False, "sure")],
)
def test_the_kind_of_a_picture(local: int, above: int, unsure: bool, kind: Kind):
    assert kind_of(local, above, unsure=unsure) == kind


@pytest.mark.parametrize(
    "wrong",
    [
        {"confidence": math.nan},
        {"coarse_confidence": 1.5},
        {"margin": math.inf},
        {"local_confidence": -0.1},
        {"label": 100},
        {"coarse_label": 20},
        {"local": -1},
        {"classes": "others"},
    ],
)
def test_answers_that_cannot_be_learned_are_refused(wrong: dict[str, Any], classes: Hierarchy):
    good = picture(1, classes=classes.digest)
    assert checked(good, classes) == good
    with pytest.raises(InvalidAnswer, match=next(iter(wrong)) if "classes" not in wrong else "classes"):
        checked(dataclasses.replace(good, **wrong), classes)


@pytest.mark.parametrize(
    ("counts", "goes"),
    [
        ({Cell(1, "differs", False): 3, Cell(2, "differs", False): 5}, Cell(2, "differs", False)),
        (
            {Cell(1, "differs", False): 3, Cell(1, "unsure", False): 4, Cell(2, "unsure", False): 5},
            Cell(1, "unsure", False),
        ),
        # More than half are sure.
        ({Cell(1, "differs", False): 7, Cell(2, "sure", False): 8}, Cell(2, "sure", False)),
        ({Cell(1, "differs", False): 8, Cell(2, "sure", False): 8}, Cell(1, "differs", False)),
        # Labelled ones go last.
        ({Cell(1, "differs", True): 9, Cell(2, "unsure", False): 1}, Cell(2, "unsure", False)),
        ({Cell(1, "differs", True): 9, Cell(2, "sure", False): 1}, Cell(2, "sure", False)),
        ({Cell(1, "differs", True): 2, Cell(2, "sure", True): 3}, Cell(2, "sure", True)),
    ],
)
def test_what_goes_when_the_sample_is_full(counts: dict[Cell, int], goes: Cell):
    assert which_to_drop(counts) == goes


_cells = st.builds(Cell, st.integers(0, 5), st.sampled_from(["differs", "unsure", "sure"]), st.booleans())


@given(st.dictionaries(_cells, st.integers(0, 50)))
def test_the_balance_holds(counts: dict[Cell, int]):
    if not any(counts.values()):
        return
    goes = which_to_drop(counts)
    assert counts[goes] > 0
    free = {cell: count for cell, count in counts.items() if count and not cell.labelled}
    assert not (goes.labelled and free)
    if goes.kind == "sure" and any(cell.kind != "sure" for cell in free):
        assert 2 * sum(count for cell, count in free.items() if cell.kind == "sure") > sum(counts.values())


def test_a_full_sample_stays_balanced_and_within_its_size(tmp_path: Path):
    store = KeptStore(tmp_path / "kept", SIZE)
    content = bytes(20_000)
    for sequence in range(1, 201):
        # One class comes four times as often as all others.
        assert store.keep(picture(sequence, label=0 if sequence % 5 else 1 + sequence % 3), content)
    counts = store.counts()
    assert counts.pictures + counts.dropped == 200
    assert counts.pictures > 30
    assert counts.bytes <= counts.size_bytes == SIZE
    held = Counter(each.target for _, each, _ in store.read_all())
    assert max(held.values()) - min(held.values()) <= 2
    store.close()


def test_rare_sure_pictures_are_not_displaced(tmp_path: Path):
    store = KeptStore(tmp_path / "kept", SIZE)
    for sequence in range(1, 301):
        store.keep(picture(sequence, label=sequence % 4, kind="differs" if sequence % 20 else "sure"), bytes(20_000))
    counts = store.counts()
    assert counts.sure >= 5
    assert counts.sure * 2 <= counts.pictures + 2
    store.close()


def test_what_is_kept_comes_back_in_another_process(tmp_path: Path):
    store = KeptStore(tmp_path / "kept", SIZE)
    first, second = picture(1, taken_at=12.5), picture(2, kind="unsure")
    assert store.keep(first, b"one")
    assert store.keep(second, b"two")
    reader = KeptStore.reading(tmp_path / "kept")
    assert [row[1:] for row in reader.read_all()] == [(first, b"one"), (second, b"two")]
    assert store.keep(picture(3), b"three")  # a reader does not hold the writer up
    assert [each.sequence for _, each, _ in reader.read(after=2)] == [3]
    with pytest.raises(SetupError, match="another process"):
        KeptStore(tmp_path / "kept", SIZE)
    reader.close()
    store.close()
    again = KeptStore(tmp_path / "kept", SIZE)
    assert again.counts().pictures == 3
    again.close()


def test_a_label_survives_new_answers(tmp_path: Path):
    store = KeptStore(tmp_path / "kept", SIZE)
    store.keep(picture(1, label=3), b"one")
    assert store.label("door", 1, 7, name="ann", at=5.0)
    assert not store.label("door", 9, 7, name="ann", at=5.0)
    assert not store.keep(picture(1, label=4), b"one")
    ((_, kept, _),) = store.read()
    assert (kept.target, kept.person_name, kept.person_at) == (7, "ann", 5.0)
    assert store.label("door", 1, None, name="bob", at=6.0)
    assert store.keep(picture(1, label=4), b"one")
    ((_, kept, _),) = store.read()
    assert (kept.target, kept.person, kept.person_name) == (4, None, None)
    store.close()


def test_a_picture_that_is_too_large_displaces_nothing(tmp_path: Path):
    store = KeptStore(tmp_path / "kept", SIZE)
    store.keep(picture(1), b"one")
    assert not store.keep(picture(2), bytes(SIZE // 4))
    assert store.counts().pictures == 1
    store.close()


def test_a_damaged_file_is_set_aside(tmp_path: Path):
    folder = tmp_path / "kept"
    store = KeptStore(folder, SIZE)
    store.keep(picture(1), b"one")
    store.close()
    content = bytearray((folder / "kept.db").read_bytes())
    content[100:3000] = b"x" * 2900
    (folder / "kept.db").write_bytes(content)
    with pytest.raises(SetupError, match="Restart the end node") as caught:
        KeptStore.reading(folder)
    assert "\n" not in str(caught.value)
    store = KeptStore(folder, SIZE)
    assert store.counts().pictures == 0
    assert (folder / "damaged-kept.db").read_bytes() == content
    assert store.keep(picture(1), b"one")
    store.close()


def test_a_damaged_row_is_left_out(tmp_path: Path):
    folder = tmp_path / "kept"
    store = KeptStore(folder, SIZE)
    store.keep(picture(1), b"one")
    store.keep(picture(2), b"two")
    store.close()
    with sqlite3.connect(folder / "kept.db") as connection:
        connection.execute("UPDATE kept SET body = ? WHERE sequence = 1", (b'{"source": 4}',))
    connection.close()
    reader = KeptStore.reading(folder)
    assert [each.sequence for _, each, _ in reader.read_all()] == [2]
    reader.close()


def test_a_smaller_size_makes_room(tmp_path: Path):
    store = KeptStore(tmp_path / "kept", 4 * SIZE)
    for sequence in range(1, 101):
        store.keep(picture(sequence), bytes(20_000))
    before = store.counts()
    store.close()
    store = KeptStore(tmp_path / "kept", SIZE)
    assert store.keep(picture(101), bytes(20_000))
    after = store.counts()
    assert after.pictures < before.pictures
    assert after.bytes <= SIZE
    store.close()


def test_no_sample_and_a_folder_that_is_a_file(tmp_path: Path):
    with pytest.raises(SetupError, match="learn"):
        KeptStore.reading(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError):
        KeptStore(tmp_path / "file", SIZE)


def test_a_full_disk_loses_nothing(tmp_path: Path):
    store = KeptStore(tmp_path / "kept", SIZE)
    store.keep(picture(1), b"one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "kept" / "kept.db").stat().st_size, hard))
    try:
        with pytest.raises(SpoolUnavailable):
            store.keep(picture(2), bytes(50_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.keep(picture(2), bytes(50_000))
    assert [each.sequence for _, each, _ in store.read_all()] == [1, 2]
    store.close()
