"""The command line of the comparison."""

import os
from pathlib import Path

import pytest

from benchmarks.__main__ import app
from terrace.cli import run

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="pinning is Linux's")


@pytest.mark.parametrize(
    ("arguments", "sentence", "code"),
    [
        (["--only", "nope"], "no contender 'nope'", 2),
        (["--server-core", "0", "--load-core", "0"], "a core each", 2),
        (["--models", "{tmp}"], "manifest", 2),
        (["--large", "nope"], "no model 'nope'", 2),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    arguments: list[str],
    sentence: str,
    code: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if len(os.sched_getaffinity(0)) < 2 and sentence != "a core each":
        pytest.skip("the comparison needs two cores")
    filled = [word.format(tmp=tmp_path) for word in arguments]
    words = ["peers", *filled, "--venvs", str(tmp_path), "--out", str(tmp_path / "out")]
    assert run(words, app, "benchmarks") == code
    errors = capsys.readouterr().err
    assert sentence in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()
