"""Folders of observations: names, what a repeated command fetches, and what a full disk leaves."""

from __future__ import annotations

import csv
import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from terrace.picture_folder import OBSERVATIONS, FilledFolder, PictureFolder, folder_names
from tierkit.commandline import asked_wrongly
from tierkit.errors import InvalidAnswer, InvalidInput, NotFound, Unavailable

JPEG, PNG = b"\xff\xd8\xff" + b"j" * 100, b"\x89PNG\r\n\x1a\n" + b"p" * 100


class Scheduler:
    """Its CSV and its pictures."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.pictures: dict[tuple[str, str, int], bytes] = {}
        self.asked: list[int] = []
        self.away_at: int | None = None
        """It goes away at this picture."""

    def has(self, sequence: int, label: str, content: bytes | None = JPEG, *, node: str = "pi-1", **more: Any) -> None:
        self.rows = [row for row in self.rows if row["sequence"] != sequence]
        kept = "false" if content is None else "true"
        self.rows.append({"node": node, "source": "gate", "sequence": sequence, "label": label, "picture": kept} | more)
        if content is not None:
            self.pictures[node, "gate", sequence] = content

    def fetch(self, node: str, source: str, sequence: int) -> bytes:
        if sequence == self.away_at:
            raise Unavailable("away")
        self.asked.append(sequence)
        if (node, source, sequence) not in self.pictures:
            raise NotFound("no picture")
        return self.pictures[node, source, sequence]

    def fill(self, out: Path, **options: Any) -> FilledFolder:
        self.asked.clear()
        with closing(PictureFolder(out)) as folder:
            with folder.table.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["node", "source", "sequence", "label", "picture"])
                writer.writeheader()
                writer.writerows(self.rows)
            return folder.fill(self.fetch, **options)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def table(folder: Path) -> dict[str, str]:
    with (folder / OBSERVATIONS).open(encoding="utf-8-sig", newline="") as file:
        return {row["sequence"]: row["file"] for row in csv.DictReader(file)}


def test_labels_become_names_of_folders() -> None:
    plain = ["fish", "aquarium_fish", "Schäferhund", "犬", "maple tree", "=1+1"]
    hostile = [
        "../x",
        "..",
        "",
        " ",
        "/etc/passwd",
        "a\\b",
        "CON",
        "com1.txt",
        "nul",
        "a:b",
        "x\x00y\n",
        "end.",
        ".git",
    ]
    hostile += [
        "x" * 300,
        "犬" * 300,
        "\u202egpj",
        "observations.csv",
        "a/b",
        "a_b",
        "Schäferhund".replace("ä", "a\u0308"),
    ]
    names = folder_names([*plain, *hostile, "Cat", "cat"])
    assert [names[label] for label in plain] == plain
    assert len({name.casefold() for name in names.values()}) == len(names)
    for name in names.values():
        assert len(name.encode()) <= 120
        assert not name.startswith(".")
        assert not set(name) & set('/\\:\x00\n"*?<>|\u202e')
        assert name.rstrip(" .") == name
    for label in ("CON", "com1.txt", "nul", "observations.csv"):
        assert names[label].startswith(f"_{label}-")
    # A name does not depend on other labels.
    assert folder_names(["../x"])["../x"] == names["../x"]


def test_pictures_are_sorted_by_label_and_all_observations_are_in_the_table(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    scheduler.has(1, "fish")
    scheduler.has(2, "people", PNG)
    scheduler.has(3, "fish", None)
    scheduler.has(4, "")
    scheduler.has(5, "'=1+1")  # as the scheduler writes the label =1+1
    scheduler.has(6, "fish", node="pi", source="1-gate")
    scheduler.pictures["pi", "1-gate", 6] = JPEG
    scheduler.has(7, "fish")
    del scheduler.pictures["pi-1", "gate", 7]
    passed: list[None] = []
    filled = scheduler.fill(tmp_path / "out", passed=lambda: passed.append(None))
    assert (filled.observations, filled.pictures, filled.new, filled.without_picture, len(passed)) == (7, 4, 4, 3, 6)
    found = ["=1+1/pi-1+gate-5.jpg", "fish/pi+1-gate-6.jpg", "fish/pi-1+gate-1.jpg", "people/pi-1+gate-2.png"]
    assert files(tmp_path / "out") == sorted([*found, OBSERVATIONS])
    assert (tmp_path / "out/people/pi-1+gate-2.png").read_bytes() == PNG
    assert table(tmp_path / "out") == {
        **{"1": found[2], "2": found[3], "3": "", "4": "", "5": f"'{found[0]}", "6": found[1], "7": ""},
    }
    assert not (tmp_path / "out" / OBSERVATIONS).read_bytes().startswith(b"\xef\xbb\xbf")
    scheduler.fill(tmp_path / "out", bom=True)
    assert (tmp_path / "out" / OBSERVATIONS).read_bytes().startswith(b"\xef\xbb\xbfnode,")


def test_a_repeated_command_fetches_only_what_is_new(scheduler: Scheduler, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        scheduler.has(number, "fish")
    scheduler.fill(tmp_path)
    scheduler.has(4, "people")
    # Its picture is no longer at the scheduler.
    scheduler.has(1, "fish", None)
    filled = scheduler.fill(tmp_path)
    assert (scheduler.asked, filled.new, filled.pictures) == ([4], 1, 4)
    assert table(tmp_path)["1"] == "fish/pi-1+gate-1.jpg"


def test_an_amended_picture_moves_unless_the_user_has_sorted_it(scheduler: Scheduler, tmp_path: Path) -> None:
    for number in (1, 2):
        scheduler.has(number, "fish")
    scheduler.has(3, "insects")
    scheduler.fill(tmp_path)
    (tmp_path / "shark").mkdir()
    (tmp_path / "fish/pi-1+gate-2.jpg").rename(tmp_path / "shark/pi-1+gate-2.jpg")
    for _ in range(2):
        for number in (1, 2, 3):
            scheduler.has(number, "ray")
        filled = scheduler.fill(tmp_path)
        sorted_now = ["observations.csv", "ray/pi-1+gate-1.jpg", "ray/pi-1+gate-3.jpg", "shark/pi-1+gate-2.jpg"]
        assert files(tmp_path) == sorted_now
        assert scheduler.asked == []
        assert table(tmp_path)["2"] == "shark/pi-1+gate-2.jpg"
    assert filled.moved == 0
    # A class without pictures would be an error to readers of such folders.
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["ray", "shark"]


def test_a_table_that_others_have_written_is_replaced(scheduler: Scheduler, tmp_path: Path) -> None:
    scheduler.has(1, "fish")
    scheduler.fill(tmp_path)
    for content in (b"", b"a;b\n1;2\n", b"\xff\xfe\x00", b"file,label\n" + b"x" * 200_000 + b",y\n"):
        (tmp_path / OBSERVATIONS).write_bytes(content)
        assert scheduler.fill(tmp_path).pictures == 1
        assert table(tmp_path) == {"1": "fish/pi-1+gate-1.jpg"}


def test_a_command_that_is_cut_continues(scheduler: Scheduler, tmp_path: Path) -> None:
    for number in range(1, 5):
        scheduler.has(number, "fish")
    scheduler.away_at = 3
    with pytest.raises(Unavailable):
        scheduler.fill(tmp_path)
    assert files(tmp_path) == ["fish/pi-1+gate-1.jpg", "fish/pi-1+gate-2.jpg"]
    scheduler.away_at = None
    assert scheduler.fill(tmp_path).pictures == 4
    assert scheduler.asked == [3, 4]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses larger files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_with_one_sentence_and_no_half_file(scheduler: Scheduler, tmp_path: Path) -> None:
    scheduler.has(1, "fish")
    scheduler.has(2, "people", JPEG * 1000)
    with (
        files_of_at_most(50_000),
        pytest.raises(InvalidInput, match=r"cannot write .*people.*; the same command") as info,
    ):
        scheduler.fill(tmp_path)
    assert not asked_wrongly(info.value)
    assert files(tmp_path) == ["fish/pi-1+gate-1.jpg"]
    assert os.listdir(tmp_path) == ["fish"]
    assert scheduler.fill(tmp_path).new == 1


@pytest.mark.parametrize("node", ["../../x", "/tmp/x", "", "PI"])
def test_a_scheduler_writes_to_no_other_place(scheduler: Scheduler, tmp_path: Path, node: str) -> None:
    scheduler.has(1, "fish", node=node)
    with pytest.raises(InvalidAnswer, match="an observation with the name"):
        scheduler.fill(tmp_path / "out")
    assert files(tmp_path) == []


def test_one_command_uses_a_folder_at_a_time(tmp_path: Path) -> None:
    with closing(PictureFolder(tmp_path / "out")), pytest.raises(InvalidInput, match="another command is at work"):
        PictureFolder(tmp_path / "out")
    PictureFolder(tmp_path / "out").close()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="cannot write"):
        PictureFolder(tmp_path / "file")


def test_a_table_of_somebody_else_is_not_replaced(scheduler: Scheduler, tmp_path: Path) -> None:
    for content in ("mine\n", "", "node,source\n"):
        (tmp_path / "observations.csv").write_text(content)
        with pytest.raises(InvalidInput, match="not a table of observations"):
            PictureFolder(tmp_path)
        assert (tmp_path / "observations.csv").read_text() == content
    (tmp_path / "observations.csv").unlink()
    scheduler.has(1, "fish")
    for _ in range(2):
        scheduler.fill(tmp_path)
    assert len(table(tmp_path)) == 1


@pytest.mark.train
def test_torchvision_reads_the_folder(scheduler: Scheduler, tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    for number, label in enumerate(["fish", "../x", "CON", "fish"]):
        scheduler.has(number, label)
    scheduler.fill(tmp_path)
    found = datasets.ImageFolder(str(tmp_path))
    assert sorted(found.targets) == [0, 1, 2, 2]
    assert found.classes[2] == "fish"
