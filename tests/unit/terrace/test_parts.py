"""A source in several parts: within the bounds, and the same after a cut."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from terrace.parts import Bounds, Fact, PartsFolder, SourcePart, split
from tierkit.errors import InvalidInput

SIZES = st.lists(st.integers(0, 5000), max_size=40)


@given(sizes=SIZES, images=st.integers(1, 10), most=st.integers(1, 10_000))
def test_parts_are_runs_within_the_bounds(sizes: list[int], images: int, most: int) -> None:
    facts: list[Fact] = [(f"{number}", size, 0, None) for number, size in enumerate(sizes)]
    parts = split(facts, Bounds(images=images, bytes=most))
    assert [fact for part in parts for fact in part] == facts
    assert all(0 < len(part) <= images for part in parts)
    assert all(sum(size for _, size, *_ in part) <= most or len(part) == 1 for part in parts)


FACTS: list[Fact] = [(f"cam/{number}.jpg", 100, 7, None) for number in range(10)]
THREE = Bounds(images=4, bytes=10**6)


Open = Callable[..., PartsFolder]


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:

        def opened(folder: Path, results: str = ".jsonl", may_differ: str = "", **options: Any) -> PartsFolder:
            found = PartsFolder(folder, results=results, options=options, may_differ=frozenset({may_differ}))
            stack.callback(found.close)
            return found

        yield opened


def names(parts: list[SourcePart]) -> list[list[str]]:
    return [[fact[0].removeprefix("cam/").removesuffix(".jpg") for fact in part.facts] for part in parts]


def test_what_is_noted_is_there_after_a_cut(opened: Open, tmp_path: Path) -> None:
    before = opened(tmp_path / "parts", scheme="end")
    parts = before.plan(FACTS, THREE)
    parts[0].job = "j1"
    for part in parts[:2]:
        before.note(part)
    before.results_of(parts[0]).write_text("")
    before.close()
    after = opened(tmp_path / "parts", scheme="end")
    again = after.plan(FACTS, THREE)
    assert again == parts
    assert [after.is_done(part) for part in again] == [True, False, False]
    assert [after.key(part) for part in again] == [before.key(part) for part in parts]
    assert len({after.key(part) for part in again}) == 3


def test_files_that_have_come_or_changed_are_parts_of_their_own(opened: Open, tmp_path: Path) -> None:
    before = opened(tmp_path / "parts")
    parts = before.plan(FACTS, THREE)
    for part in parts:
        before.note(part)
        before.results_of(part).write_text("")
    before.close()
    new: list[Fact] = [("cam/05.jpg", 1, 1, None), *FACTS[:5], ("cam/5.jpg", 100, 8, None), *FACTS[6:]]
    after = opened(tmp_path / "parts")
    again = after.plan(new, THREE)
    assert names(again) == [["0", "1", "2", "3"], ["8", "9"], ["05", "4", "5", "6"], ["7"]]
    assert [after.is_done(part) for part in again] == [True, True, False, False]


def test_another_try_has_another_key(opened: Open, tmp_path: Path) -> None:
    folder = opened(tmp_path / "parts")
    part = folder.plan(FACTS, THREE)[0]
    key = folder.key(part)
    part.tries += 1
    assert folder.key(part) != key


def test_a_folder_begun_anew_has_other_keys(opened: Open, tmp_path: Path) -> None:
    first, second = opened(tmp_path / "a"), opened(tmp_path / "b")
    part = first.plan(FACTS, THREE)[0]
    assert first.key(part) != second.key(part)


def test_a_folder_of_another_command_is_refused(opened: Open, tmp_path: Path) -> None:
    opened(tmp_path / "parts", scheme="end", on_bad_input="fail").close()
    with pytest.raises(InvalidInput, match="other options"):
        opened(tmp_path / "parts", scheme="mapping", on_bad_input="fail")


def test_an_option_may_differ(opened: Open, tmp_path: Path) -> None:
    for policy in ("fail", "skip"):
        opened(tmp_path / "parts", may_differ="on_bad_input", scheme="end", on_bad_input=policy).close()


def test_two_commands_at_once_are_refused(opened: Open, tmp_path: Path) -> None:
    first = opened(tmp_path / "parts")
    with pytest.raises(InvalidInput, match="another command"):
        opened(tmp_path / "parts")
    first.close()


def test_a_damaged_folder_is_named(opened: Open, tmp_path: Path) -> None:
    opened(tmp_path / "parts").close()
    (tmp_path / "parts" / "run.json").write_text("{")
    with pytest.raises(InvalidInput, match="damaged"):
        opened(tmp_path / "parts")


@pytest.mark.parametrize("bom", [False, True])
def test_tables_are_joined_and_numbered(opened: Open, tmp_path: Path, bom: bool) -> None:
    folder = opened(tmp_path / "parts", ".csv")
    parts = folder.plan(FACTS, THREE)
    for part in parts:
        with folder.results_of(part).open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["index", "name", "label"])
            rows.writerows([number, f"'=ä,\n{fact[0]}", "red"] for number, fact in enumerate(part.facts))
    folder.merge(parts, tmp_path / "out.csv", bom=bom)
    assert (tmp_path / "out.csv").read_bytes().startswith(b"\xef\xbb\xbf") is bom
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8-sig") as file:
        found = list(csv.DictReader(file))
    assert [row["index"] for row in found] == [str(number) for number in range(10)]
    assert [row["name"] for row in found] == [f"'=ä,\n{fact[0]}" for fact in FACTS]
    assert not (tmp_path / "parts").exists()


def test_lines_are_joined_and_numbered(opened: Open, tmp_path: Path) -> None:
    folder = opened(tmp_path / "parts")
    parts = folder.plan(FACTS, THREE)
    for part in parts:
        lines = [{"index": number, "name": f"ä\u2028{fact[0]}"} for number, fact in enumerate(part.facts)]
        folder.results_of(part).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    folder.merge(parts, tmp_path / "out.jsonl")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n") if line]
    assert found == [{"index": number, "name": f"ä\u2028{fact[0]}"} for number, fact in enumerate(FACTS)]
