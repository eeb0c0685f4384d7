"""Commands of experiments: what is asked for wrongly ends in one sentence, before anything is measured."""

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import tables
from experiments.peers import command as peers
from experiments.tables import RECORDS
from terrace.cli import run as run_terrace
from tierkit.commandline import asked_wrongly, run_module
from tierkit.errors import DataError, DeadlineExceeded, InvalidInput, PortInUse, SetupError, TerraceError


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("beats --nodes 0", "Invalid value for '--nodes': '0' is no number from 1 to 10000."),
        ("beats --nodes x", "Invalid value for '--nodes': 'x' is no whole number from 1 to 10000."),
        ("beats --nodes 1.5", "'1.5' is no whole number from 1 to 10000."),
        ("beats --seconds nan", "'nan' is no number from 0.1 to 3600."),
        ("beats --seconds long", "'long' is no number from 0.1 to 3600."),
        ("beats --server-core -1", "'-1' is no number from 0."),
        ("beats --nope", "No such option: --nope"),
        ("beats --server-core 0 --load-core 0", "a core each"),
        ("durability --tasks 10001", "'10001' is no number from 1 to 10000."),
        ("durability --out {file}", "is a file"),
        ("durability --out {file}/runs", "cannot make the folder"),
        ("main-job --end 999", "'999' is no number from 1 to 100."),
        ("main-job --out {file}", "is a file"),
        ("main-job --data {file}", "set TERRACE_DATA to the folder"),
        ("overload --seconds inf", "'inf' is no number from 1 to 3600."),
        ("overload --report --out {file}.none", "no records in"),
        ("peers --rounds 101", "'101' is no number from 1 to 100."),
        ("peers --only nobody", "no contender 'nobody'"),
        ("peers --duel terrace", "a duel is with another server"),
        ("peers --report --out {file}.none", "no records in"),
    ],
)
def test_a_measurement_that_is_asked_for_wrongly_ends_with_two_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff")
    assert run_terrace(["experiment", *line.format(file=file).split()]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("terrace experiment ")
    assert sentence in said
    assert list(tmp_path.iterdir()) == [file]


def test_install_only_measures_no_duel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []

    def install(contenders: Any, folder: Path, announce: Any) -> tuple[dict[str, Path], dict[str, str]]:
        installed.extend(contender.name for contender in contenders)
        return {}, {}

    monkeypatch.setattr(peers, "install", install)
    monkeypatch.setattr(peers, "check_cores", lambda *_cores: None)
    words = ["--duel", "fastapi", "--install-only", "--venvs", str(tmp_path), "--out", str(tmp_path / "out")]
    assert run_terrace(["experiment", "peers", *words]) == 0
    assert installed == ["terrace", "fastapi"]
    assert list((tmp_path / "out").iterdir()) == []


def test_json_of_the_records_of_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_terrace(["experiment", "peers", "--report", "--json", "--out", str(RECORDS)]) == 0
    rows = json.loads(capsys.readouterr().out)
    duel = [row for row in rows if "ratio" in row]
    assert {(row["images_per_request"], row["concurrency"]) for row in duel} == {(50, 4), (50, 1), (1, 64), (1, 1)}
    assert all(row["of_bare"] > 0 and row["ratio"] > 0 for row in duel)
    assert {row["server"] for row in rows if "server" in row} >= {"terrace", "fastapi"}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [("{file}.none", "cannot read the page"), ("{file}", "it is no text in UTF-8")],
)
def test_what_is_asked_for_wrongly_ends_with_two_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff")
    monkeypatch.setattr(sys, "argv", ["experiments.tables", line.format(file=file)])
    with pytest.raises(SystemExit) as ended:
        run_module("experiments.tables", tables.run)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("experiments.tables: ")
    assert sentence in said
    assert ended.value.code == 2


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
