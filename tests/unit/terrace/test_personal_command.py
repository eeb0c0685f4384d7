"""`terrace train work --personal`: options that contradict each other."""

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
