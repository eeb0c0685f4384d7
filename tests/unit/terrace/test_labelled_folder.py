"""The layout of an exported data set, and what is left out of it."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from models.dataset import Dataset
from models.hierarchy import Hierarchy
from terrace import labelled_folder
from terrace.labelled_folder import LABELS, ExportCounts, LabelledFolder, Said, new_folder, said_of, side_of
from tierkit.atomic import alone_in
from tierkit.errors import InvalidAnswer, InvalidInput, NotFound, SetupError
from tierkit.types import Tier
from tierkit.wire.api import FineAnswer
from tierkit.wire.sources import SeenPicture

SHAPES = Hierarchy.parse(
    {
        "name": "shapes",
        "fine": ["circle", "ellipse", "square"],
        "superclasses": {"round": ["circle", "ellipse"], "angular": ["square"]},
    },
    source="test",
)
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


def png(number: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (9, 7), (number % 256, number // 256, 0)).save(file, kind)
    return file.getvalue()


def seen(sequence: int, *, person: str | None = None, answer: str | None = None, sure: float = 0.9) -> SeenPicture:
    fine = None
    if answer is not None:
        above: dict[str, Any] = {"coarse_index": 0, "coarse_label": "round", "node": "edge-1", "tier": Tier.EDGE}
        fine = FineAnswer(index=0, label=answer, confidence=sure, sha256="2" * 64, **above)
    return SeenPicture(
        node="pi-1",
        source="gate",
        sequence=sequence,
        fine=fine,
        person=person,
        person_by=None if person is None else "=anna",
        person_at=None if person is None else NOON,
    )


def fetch(node: str, source: str, sequence: int) -> bytes:
    return png(sequence)


def fill(
    folder: Path,
    *pictures: SeenPicture,
    content: Callable[[str, str, int], bytes] = fetch,
    hierarchy: Hierarchy = SHAPES,
    **options: Any,
) -> ExportCounts:
    folder.mkdir(exist_ok=True)
    written = LabelledFolder(folder, hierarchy, **{"test_share": 0.5, "least_confidence": 0.7, **options})
    return written.fill(pictures, content)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / LABELS).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("picture", "least", "expected"),
    [
        (seen(1, person="circle", answer="square"), 0.7, Said(label="circle", by="person")),
        (seen(1, person="circle"), None, Said(label="circle", by="person")),
        (seen(1, answer="square", sure=0.7), 0.7, Said(label="square", by="answer")),
        (seen(1, answer="square", sure=0.69), 0.7, None),
        (seen(1, answer="square", sure=float("nan")), 0.0, None),
        (seen(1, answer="square", sure=1.5), 0.7, None),
        (seen(1, answer="square"), None, None),
        (seen(1), 0.0, None),
    ],
)
def test_a_person_counts_more_than_an_answer(picture: SeenPicture, least: float | None, expected: Said | None) -> None:
    assert said_of(picture, least) == expected


def test_the_content_decides_about_the_split() -> None:
    digests = [hashlib.sha256(bytes([number])).hexdigest() for number in range(200)]
    assert {side_of(digest, 0) for digest in digests} == {"train"}
    assert {side_of(digest, 1) for digest in digests} == {"test"}
    few = {digest for digest in digests if side_of(digest, 0.2) == "test"}
    assert 20 <= len(few) <= 60
    assert few <= {digest for digest in digests if side_of(digest, 0.5) == "test"}


def test_the_folder_is_a_data_set_with_the_origin_of_each_label(tmp_path: Path) -> None:
    pictures = [seen(number, person=SHAPES.fine[number % 3]) for number in range(24)]
    done = fill(tmp_path / "set", *pictures, seen(30, answer="square"), seen(31, answer="circle", sure=0.5))
    assert (done.pictures, done.by_person, done.by_answer) == (25, 24, 1)
    assert done.without_pictures == {"train": (), "test": ()}
    dataset = Dataset.open(str(tmp_path / "set"), None)
    assert dataset.hierarchy == SHAPES
    assert len(dataset.read("train")) + len(dataset.read("test")) == 25
    table = rows(tmp_path / "set")
    assert len(table) == 25
    for row in table:
        content = (tmp_path / "set" / row["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == row["sha256"]
        assert row["file"] == f"{side_of(row['sha256'], 0.5)}/{row['class']}/pi-1+gate-{row['sequence']}.png"
        assert content == png(int(row["sequence"]))
    first, last = table[0], table[-1]
    assert (first["said_by"], first["person_at"], first["upper_tier"]) == ("person", NOON.isoformat(), "")
    assert first["person"] == "'=anna"  # a spreadsheet would compute it
    assert (last["said_by"], last["person"], last["upper_label"]) == ("answer", "", "square")
    assert (last["upper_confidence"], last["upper_tier"], last["upper_network"]) == ("0.9", "edge", "2" * 64)


def test_what_cannot_be_used_is_counted(tmp_path: Path) -> None:
    def some(node: str, source: str, sequence: int) -> bytes:
        if sequence == 2:
            raise NotFound("deleted")
        return {3: b"damaged", 4: png(1), 6: png(6)[:-30], 7: png(7, "BMP")}.get(sequence, png(sequence))

    labels = {5: "triangle"}
    pictures = [seen(number, person=labels.get(number, "circle")) for number in range(1, 8)]
    done = fill(tmp_path / "set", *pictures, content=some, test_share=0)
    assert (done.pictures, done.gone, done.damaged, done.other_classes, done.repeated) == (1, 1, 3, 1, 1)
    assert done.without_pictures == {"train": ("ellipse", "square"), "test": SHAPES.fine}
    assert [row["sequence"] for row in rows(tmp_path / "set")] == ["1"]
    assert [path.name for path in tmp_path.glob("set/*/*/*")] == ["pi-1+gate-1.png"]


def test_the_first_label_of_a_content_stays(tmp_path: Path) -> None:
    done = fill(tmp_path / "set", seen(1, person="circle"), seen(2, answer="square"), content=lambda *picture: png(0))
    assert (done.by_person, done.by_answer, done.repeated) == (1, 0, 1)


def test_an_export_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelled_folder, "MOST_PICTURES", 2)
    done = fill(tmp_path / "exact", seen(1, person="circle"), seen(2, person="circle"), seen(3))
    assert (done.pictures, done.full) == (2, False)
    done = fill(tmp_path / "more", *(seen(number, person="circle") for number in range(5)))
    assert (done.pictures, done.full) == (2, True)


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "__MACOSX", "x" * 256, "a\nb", "a\0b"])
def test_a_class_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput):
        fill(tmp_path / "set", hierarchy=Hierarchy.flat("odd", ["circle", name]))


@pytest.mark.parametrize("place", [{"node": "../../up"}, {"source": "a/b"}, {"node": ""}], ids=str)
def test_names_that_cannot_be_files_are_refused(tmp_path: Path, place: dict[str, Any]) -> None:
    with pytest.raises(InvalidAnswer):
        fill(tmp_path / "set", seen(1, person="circle").model_copy(update=place))
    assert [path.name for path in tmp_path.rglob("*.png")] == []


@pytest.mark.parametrize("empty", [True, False])
def test_a_folder_appears_when_it_is_complete(tmp_path: Path, empty: bool) -> None:
    folder = tmp_path / "set"
    if empty:
        folder.mkdir()
    with new_folder(folder) as partial:
        (partial / "file").write_text("x")
        assert not (folder / "file").exists()
    assert (folder / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def write_and_fail(folder: Path, error: BaseException) -> None:
    with new_folder(folder) as partial:
        (partial / "file").write_text("x")
        raise error


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), SetupError), (KeyboardInterrupt(), KeyboardInterrupt)],
    ids=repr,
)
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException, raised: type[BaseException]) -> None:
    with pytest.raises(raised):
        write_and_fail(tmp_path / "set", error)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".set.partial" / "train"
    left.mkdir(parents=True)
    (left / "old.png").write_text("x")
    (left.parent / "link").symlink_to(tmp_path)
    with new_folder(tmp_path / "set") as partial:
        assert list(partial.iterdir()) == []
    assert list(tmp_path.glob("set/*")) == []


def test_a_folder_that_got_files_meanwhile_stays(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    writing = new_folder(folder)
    writing.__enter__()
    folder.mkdir()
    (folder / "other").write_text("x")
    with pytest.raises(InvalidInput):
        writing.__exit__(None, None, None)
    assert [path.name for path in tmp_path.rglob("*")] == ["set", "other"]


def test_one_process_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    with alone_in(tmp_path / ".set.partial"):
        (tmp_path / ".set.partial" / "file").write_text("x")
        with pytest.raises(SetupError), new_folder(tmp_path / "set"):
            pass
        assert (tmp_path / ".set.partial" / "file").exists()
