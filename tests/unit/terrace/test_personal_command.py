"""`terrace train work` on kept pictures: options that contradict each other, and a folder without pictures."""

from pathlib import Path

import pytest

from terrace.cli import run as terrace


@pytest.mark.parametrize(
    "words",
    [
        ["--scheduler", "http://127.0.0.1:1"],
        ["http://127.0.0.1:1", "--kept", "kept"],
        ["--scheduler", "http://127.0.0.1:1", "--kept", "kept", "--run", "a" * 32],
        ["--scheduler", "http://127.0.0.1:1", "--kept", "kept", "--device", "cuda"],
    ],
    ids=["no kept pictures", "a host", "a run", "a GPU"],
)
def test_a_head_is_trained_on_this_machine_and_in_no_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert terrace(["train", "work", "--personal", *words]) == 2
    assert "--personal" in capsys.readouterr().err


@pytest.mark.train
def test_a_folder_without_kept_pictures_is_refused_before_a_run_gives_a_seat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs the extra 'learn' (torch)")
    # Nobody listens there: an error about the connection would come from asking for a run.
    words = ["train", "work", "--scheduler", "http://127.0.0.1:1", "--kept", str(tmp_path), "--patience-s", "0"]
    assert terrace(words) == 2
    assert "holds no kept pictures" in capsys.readouterr().err
