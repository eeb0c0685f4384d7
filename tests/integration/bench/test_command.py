"""`terrace bench` as a person or a program calls it."""

import csv
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
from tests.integration.bench.aids import SumModel
from tierkit.errors import MissingExtra, NotFound

QUICK = ["--measurement-interval", "200", "--warmup-interval", "50"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_option_is_documented() -> None:
    text = Path("docs/benchmarking.md").read_text()
    options = [max(option.opts, key=len) for option in typer.main.get_command(app).params]
    short = {"--model": "`-m`", "--url": "`-u`", "--batch-size": "`-b`", "--header": "`-H`", "--csv": "`-f`"}
    assert [option for option in options if f"`{option}`" not in text and short.get(option, option) not in text] == []


def test_a_closed_loop_table(threaded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the figures are long, and 80 columns do not hold them all.
    monkeypatch.setenv("COLUMNS", "160")
    output = run("-m", "sum", "-u", threaded_url, "-b", "4", "--concurrency-range", "1:3:2", *QUICK)
    heading = next(line for line in output.splitlines() if "images/s" in line)
    assert heading.split()[:6] == ["clients", "images/s", "p50", "p90", "p95", "p99"]
    assert {"queue", "compute", "network", "batch"} <= set(heading.split())
    assert [line.split()[0] for line in output.splitlines()[-2:]] == ["1", "3"]


def test_the_table_fits_a_terminal(threaded_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rate = ["--request-rate-range", "50", "--deadline", "1000"]
    lines = run("-m", "sum", "-u", threaded_url, *rate, *QUICK).splitlines()
    heading = next(line for line in lines if "images/s" in line)
    assert {"requests/s", "p50", "p99", "queue", "compute"} <= set(heading.split())
    assert "network" not in heading
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.lstrip().startswith("50")]) == 1


def test_json_and_csv_agree(threaded_url: str, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    arguments = ["-m", "sum", "-u", threaded_url, "--request-rate-range", "50:100:50"]
    document = json.loads(run(*arguments, *QUICK, "--deadline", "1000", "-f", str(path), "--json"))
    assert [level["request_rate"] for level in document["levels"]] == [50.0, 100.0]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["p99.9_ms"]) for row in rows] == pytest.approx(
        [level["p99.9_ms"] for level in document["levels"]], abs=1e-3
    )
    assert all(level["answered"] == level["requests"] > 0 for level in document["levels"])
    assert document["load_generator"]["cores"] >= 1


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot(threaded_url: str, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    path = tmp_path / f"plot{suffix}"
    run("-m", "sum", "-u", threaded_url, "--concurrency-range", "1:2", *QUICK, "--plot", str(path))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_a_plot_without_its_extra_is_refused_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # importing it raises ImportError
    with pytest.raises(MissingExtra, match=r"\[plots\]"):
        run("-m", "sum", "-u", "127.0.0.1:1", "--plot", str(tmp_path / "plot.png"))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ("--concurrency-range 1 --request-rate-range 1", "--request-rate-range"),
        ("--plot plot.gif", "plot.gif"),
        ("--plot nowhere/plot.png", "nowhere"),
        ("--csv nowhere/out.csv", "nowhere"),
        ("--csv both.svg --plot ./both.svg", "both.svg"),
        ("--concurrency-range 0", "'0'"),
        ("--concurrency-range a:b", "'a:b'"),
        ("--concurrency-range 1.5", "'1.5'"),
        ("--concurrency-range=", "empty"),
        ("--concurrency-range 20001", "20,000"),
        ("--request-rate-range 1e9", "'1e9'"),
        ("--shape images", "'images'"),
        ("--header nonsense", "'nonsense'"),
        ("--header content-LENGTH:5", "content-LENGTH"),
        ("--tls-ca ca.pem", "--tls-ca"),
        ("--service-kind other", "'other'"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_sent(
    wrong: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terrace(["bench", "-m", "sum", "-u", "127.0.0.1:1", *wrong.split()]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert word in sentence


def test_a_model_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert terrace(["bench", "-u", "127.0.0.1:1"]) == 2
    assert "-m" in capsys.readouterr().err


def test_a_wrong_model_ends_it(threaded_url: str) -> None:
    with pytest.raises(NotFound, match="no model 'other'"):
        run("-m", "other", "-u", threaded_url)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_measured(threaded_url: str, model: SumModel, number: signal.Signals) -> None:
    arguments = ["-m", "sum", "-u", threaded_url, "--concurrency-range", "1:3", "--warmup-interval", "0", "--json"]
    code = "import sys; from terrace.commands.bench import app; app(sys.argv[1:])"
    before = model.images_seen
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--measurement-interval", "60000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while model.images_seen < before + 100:
        assert time.monotonic() < deadline
        assert process.poll() is None
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    [level] = json.loads(output)["levels"]
    assert level["interrupted"] is True
    assert level["answered"] > 50
    assert level["window_s"] < 40
