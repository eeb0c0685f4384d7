"""`python -m experiments.…`: what is asked for wrongly ends in one sentence, before anything is measured."""

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import beats, durability, main_job, overload, tables
from experiments.peers import __main__ as peers
from tierkit.commandline import asked_wrongly, run_module
from tierkit.errors import DataError, DeadlineExceeded, InvalidInput, PortInUse, SetupError, TerraceError

COMMANDS: dict[str, Callable[..., Any]] = {
    "experiments.beats": beats.run,
    "experiments.durability": durability.main,
    "experiments.main_job": main_job.main,
    "experiments.overload": overload.run,
    "experiments.peers": peers.run,
    "experiments.tables": tables.run,
}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("experiments.beats --nodes 0", "Invalid value for '--nodes': '0' is no number from 1 to 10000."),
        ("experiments.beats --nodes x", "Invalid value for '--nodes': 'x' is no whole number from 1 to 10000."),
        ("experiments.beats --nodes 1.5", "'1.5' is no whole number from 1 to 10000."),
        ("experiments.beats --seconds nan", "'nan' is no number from 0.1 to 3600."),
        ("experiments.beats --seconds long", "'long' is no number from 0.1 to 3600."),
        ("experiments.beats --server-core -1", "'-1' is no number from 0."),
        ("experiments.beats --nope", "No such option: --nope"),
        ("experiments.beats --server-core 0 --load-core 0", "a core each"),
        ("experiments.durability --tasks 10001", "'10001' is no number from 1 to 10000."),
        ("experiments.durability --out {file}", "is a file"),
        ("experiments.durability --out {file}/runs", "cannot make the folder"),
        ("experiments.main_job --end 999", "'999' is no number from 1 to 100."),
        ("experiments.main_job --out {file}", "is a file"),
        ("experiments.main_job --data {file}", "set TERRACE_DATA to the folder"),
        ("experiments.overload --seconds inf", "'inf' is no number from 1 to 3600."),
        ("experiments.overload --report --out {file}.none", "no records in"),
        ("experiments.peers --rounds 101", "'101' is no number from 1 to 100."),
        ("experiments.peers --only nobody", "no contender 'nobody'"),
        ("experiments.tables {file}.none", "cannot read the page"),
        ("experiments.tables {file}", "it is no text in UTF-8"),
    ],
)
def test_what_is_asked_for_wrongly_ends_with_two_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff")
    name, *arguments = line.format(file=file).split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        run_module(name, COMMANDS[name])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{name}: ")
    assert sentence in said
    assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == [file]


def full_disk() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as exc:
        raise SetupError("cannot write the record") from exc


def busy() -> None:
    raise DeadlineExceeded("not done within 9 s")


def unwritable() -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "/somewhere")


def stopped() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        (full_disk, 1, "experiments.x: cannot write the record.\n"),
        (busy, 1, "experiments.x: not done within 9 s.\n"),
        (unwritable, 1, "experiments.x: /somewhere: Permission denied.\n"),
        (stopped, 130, ""),
    ],
)
def test_what_cannot_be_done_and_ctrl_c_have_exit_codes_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: Callable[[], None],
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["experiments.x"])
    with pytest.raises(SystemExit) as ended:
        run_module("experiments.x", function)
    assert (ended.value.code, capsys.readouterr().err) == (code, said)


@pytest.mark.parametrize(
    ("error", "wrong"),
    [(InvalidInput("x"), True), (DataError("x"), True), (SetupError("x"), True), (PortInUse("x"), False)],
)
def test_what_other_options_would_have_helped_was_asked_for_wrongly(error: TerraceError, wrong: bool) -> None:
    assert asked_wrongly(error) is wrong
