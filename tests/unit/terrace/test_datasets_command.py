"""Command lines that `terrace datasets export` refuses before it asks the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from terrace.cli import run

UNREACHABLE = "http://127.0.0.1:1"
"""A command that asks this scheduler ends with exit code 1, not 2."""


@pytest.mark.parametrize(
    "words",
    [
        ("set", "--least-confidence", "0.8"),
        ("set", "--test-share", "1.5"),
        ("set", "--answers", "--least-confidence", "nan"),
        ("no/such/place",),
        (".",),
        ("file",),
        ("full",),
    ],
)
def test_wrong_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    here = tmp_path / "here"
    for name in ("file", "full/file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    here.mkdir()
    monkeypatch.chdir(here if words == (".",) else tmp_path)
    assert run(["datasets", "export", *words, "--scheduler", UNREACHABLE]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "here"]


def test_without_a_scheduler_nothing_is_written(tmp_path: Path) -> None:
    assert run(["datasets", "export", str(tmp_path / "set"), "--scheduler", UNREACHABLE]) == 1
    assert list(tmp_path.iterdir()) == []
