"""The files of a personal head: written whole, alone in their folder, and private."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from models.personal import MOST_HEAD_BYTES, PersonalRecord, mark_of, write_head
from tierkit.atomic import alone_in
from tierkit.errors import SetupError

BASE, OTHER = "a" * 64, "b" * 64


def record(base: str = BASE, **changes: Any) -> PersonalRecord:
    given = {
        "base": base,
        "sha256": "c" * 64,
        "size_bytes": 4,
        "release": 3,
        "temperature": 1.5,
        "pictures": 200,
        "figures": {"held_out_new": 0.8},
        "made_at": datetime.now(UTC),
    }
    return PersonalRecord.model_validate(given | changes)


def test_only_the_newest_head_stays(tmp_path: Path) -> None:
    write_head(tmp_path, record(), b"head")
    first = mark_of(tmp_path, BASE)
    assert first is not None
    write_head(tmp_path, record(), b"next")
    assert mark_of(tmp_path, BASE) not in (None, first)
    folder = tmp_path / "personal"
    (folder / ".half-written").write_bytes(b"")
    path = write_head(tmp_path, record(OTHER), b"head")
    assert {each.name for each in folder.iterdir()} == {f"{OTHER}.onnx", f"{OTHER}.json"}
    assert path.read_bytes() == b"head"
    assert mark_of(tmp_path, BASE) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("name", [f"{BASE}.onnx", f"{BASE}.json"])
def test_a_head_needs_both_files(name: str, tmp_path: Path) -> None:
    write_head(tmp_path, record(), b"head")
    (tmp_path / "personal" / name).unlink()
    assert mark_of(tmp_path, BASE) is None


def test_two_workers_do_not_write_at_once(tmp_path: Path) -> None:
    with alone_in(tmp_path / "personal"), pytest.raises(SetupError, match="another process"):
        write_head(tmp_path, record(), b"head")
    assert mark_of(tmp_path, BASE) is None


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "personal").write_text("a file")
    with pytest.raises(SetupError, match="personal"):
        write_head(tmp_path, record(), b"head")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"temperature": 0.0},
        {"size_bytes": MOST_HEAD_BYTES + 1},
        {"base": "../../etc/passwd"},
        {"figures": {"held_out_new": float("inf")}},
        {"unknown": 1},
    ],
    ids=repr,
)
def test_a_record_with_wrong_values_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        record(**wrong)
