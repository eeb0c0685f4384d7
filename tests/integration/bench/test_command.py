"""`terrace bench` as a person or a program calls it."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from terrace.cli import run as terrace
from terrace.commands.bench import app
from tests.integration.bench.aids import TaskServer
from tierkit.errors import NotFound

TASKS = ["--service-kind", "tasks", "-m", "coarse", "-u"]
QUICK = ["--measurement-interval", "200", "--warmup-interval", "50"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_option_is_documented() -> None:
    text = Path("docs/how-to/benchmarking.md").read_text()
    options = [max(option.opts, key=len) for option in typer.main.get_command(app).params]
    short = {"--model": "`-m`", "--url": "`-u`", "--batch-size": "`-b`", "--header": "`-H`"}
    assert [option for option in options if f"`{option}`" not in text and short.get(option, option) not in text] == []


def test_a_closed_loop_table(threaded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the figures are long, and 80 columns do not hold them all.
    monkeypatch.setenv("COLUMNS", "160")
    output = run(*TASKS, threaded_url, "-b", "4", "--concurrency-range", "1:3:2", *QUICK)
    heading = next(line for line in output.splitlines() if "images/s" in line)
    assert heading.split()[:7] == ["clients", "images/s", "first", "p50", "p50", "p90", "p95"]
    assert "fallback" in heading
    assert [line.split()[0] for line in output.splitlines()[-2:]] == ["1", "3"]


def test_the_table_fits_a_terminal(threaded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = run(*TASKS, threaded_url, "--request-rate-range", "50", "--deadline", "1000", *QUICK).splitlines()
    heading = next(line for line in lines if "images/s" in line)
    assert {"requests/s", "p50", "p99"} <= set(heading.split())
    assert "send" not in heading
    assert max(map(len, lines)) <= 60


def test_json(threaded_url: str) -> None:
    arguments = [*TASKS, threaded_url, "--request-rate-range", "50:100:50", "--deadline", "1000", *QUICK]
    document = json.loads(run(*arguments, "--json"))
    assert [level["request_rate"] for level in document["levels"]] == [50.0, 100.0]
    assert all(level["answered"] == level["requests"] > 0 for level in document["levels"])
    assert document["load_generator"]["cores"] >= 1


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ("--concurrency-range 1 --request-rate-range 1", "--request-rate-range"),
        ("--concurrency-range 0", "'0'"),
        ("--concurrency-range a:b", "'a:b'"),
        ("--concurrency-range 1.5", "'1.5'"),
        ("--concurrency-range=", "empty"),
        ("--concurrency-range 20001", "20,000"),
        ("--request-rate-range 1e9", "'1e9'"),
        ("--header nonsense", "'nonsense'"),
        ("--header content-LENGTH:5", "content-LENGTH"),
        ("--tls-ca ca.pem", "--tls-ca"),
        ("--service-kind other", "'other'"),
        ("--service-kind tasks", "-m"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_sent(
    wrong: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terrace(["bench", "-u", "127.0.0.1:1", *wrong.split()]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert word in sentence


def test_a_wrong_model_ends_it(threaded_url: str) -> None:
    with pytest.raises(NotFound, match="no model 'other'"):
        run("--service-kind", "tasks", "-m", "other", "-u", threaded_url)


def test_ctrl_c_keeps_what_was_measured(threaded_url: str, server: TaskServer) -> None:
    arguments = [*TASKS, threaded_url, "--concurrency-range", "1:3", "--warmup-interval", "0", "--json"]
    code = "import sys; from terrace.commands.bench import app; app(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--measurement-interval", "60000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while len(server.paths) < 100:
        assert time.monotonic() < deadline
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    [level] = json.loads(output)["levels"]
    assert level["interrupted"] is True
    assert level["answered"] > 50
    assert level["window_s"] < 40
