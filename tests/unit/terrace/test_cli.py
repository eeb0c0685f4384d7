"""The command line itself: what it costs, how it fails, what it prints where."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.data import read_sample
from scheduler.core.policy import PolicyRequest
from scheduler.settings import SchedulerSettings
from terrace import __version__
from terrace.cli import _COMMANDS, _load, run
from terrace.options import DEFAULT_PORT, DEFAULT_URL, PATIENCE_S
from tierkit.client import Backoff, PolicyFields
from tierkit.http.address import free_port

FLEET_FILE = str(Path(__file__).parents[3] / "deploy/fleet.toml")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERRACE_SCHEDULER", "TERRACE_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


def test_a_service_is_not_made_to_carry_the_face() -> None:
    program = (
        "import sys, terrace.cli\n"
        "print(sorted({'rich', 'httpx', 'numpy', 'sqlalchemy', 'PIL', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def below(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The command, and those below it."""
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from below(child, *path, name)


@pytest.mark.parametrize("name", _COMMANDS)
def test_no_help_page_shows_a_value_beside_a_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    for path in below(_load(name), name):
        assert run([*path, "--help"]) == 0
        assert "<bool>" not in capsys.readouterr().out, path


def test_a_node_by_this_command_loads_what_it_loads_by_its_own() -> None:
    """The wrong setting ends the process when all its modules are there and nothing has begun."""
    loaded = [
        imports([sys.executable, "-X", "importtime", "-m", *module, "--threads", "many"])
        for module in (["terrace", "end"], ["end_node"])
    ]
    packages = [{name.partition(".")[0] for name in names} for names in loaded]
    assert packages[0] - packages[1] == {"terrace"}
    # rich is there all the same: httpx imports it for a command line of its own.
    assert loaded[0].isdisjoint({"terrace.console", "sqlalchemy", "PIL", "fastapi", "tierkit.client"})


def imports(command: list[str]) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--threads is 'many'" in done.stderr
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_the_commands_look_where_the_scheduler_listens() -> None:
    settings = SchedulerSettings()
    assert f"http://{settings.host}:{settings.port}" == DEFAULT_URL
    assert settings.port == DEFAULT_PORT


def test_every_field_of_the_policy_has_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["classify", "--help"]) == 0
    text = capsys.readouterr().out
    options = [f"--{name.removesuffix('_s').replace('_', '-')}" for name in PolicyRequest.model_fields]
    assert [option for option in options if option not in text] == []
    assert set(PolicyFields.__annotations__) == set(PolicyRequest.model_fields)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"terrace {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["clasify"], "'classify'"),
        (["classify"], "'SOURCES'"),
        (["demo", "--images", "0"], "'--images'"),
        (["up", "--host", "pi"], "--host"),
        (["up", "--end", "100000"], "'--end'"),
        (["jobs", "wait", "x", "--budget", "nan"], "'--budget'"),
        (["up", "--fleet", FLEET_FILE, "--host", "hub", "--end", "4"], "--end"),
        (["up", "--fleet", FLEET_FILE, "--untrusted", "cloud"], "--untrusted"),
        (["demo", "--cloud", "100000"], "'--cloud'"),
        (["classify", "a.png", "--out", "results.xls"], ".jsonl"),
        (["classify", "sample", "--out", "absent/results.csv"], "absent"),
        (["classify", "sample", "--out", "/proc/results.csv"], "/proc"),
        (["jobs", "shw"], "'show'"),
        (["devices", "list", "--tls-ca", "ca.pem"], "--tls-ca"),
        (["classify", ""], "empty"),
        (["sample", "photos", "--count="], "empty"),
        (["experiment", "report", ""], "empty"),
        (["models", "show", "nope"], "'nope'"),
        (["models", "list", "--models", "absent"], "absent"),
        (["models", "speed", "--batch", "99999999"], "'--batch'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert word in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["jobs", "list"],
        ["jobs", "show", "x"],
        ["devices", "list"],
        ["devices", "drain", "end-1"],
        ["devices", "resume", "end-1"],
        ["classify", "sample"],
    ],
    ids=" ".join,
)
def test_no_scheduler_is_one_sentence_that_says_what_to_do(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert run([*arguments, "--scheduler", url]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in (url, "'terrace up'", "--scheduler", "TERRACE_SCHEDULER"))


@pytest.mark.parametrize(
    "arguments", [["devices", "list"], ["jobs", "events", "x"], ["classify", "sample"], ["doctor"]], ids=" ".join
)
def test_a_scheduler_that_hangs_is_one_sentence_within_seconds(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("terrace.options.PATIENCE_S", 0.2)
    # As a stopped process: the system takes the connection, and nobody ever answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        assert run([*arguments, "--scheduler", url]) == 1
    assert time.monotonic() - began < 5
    captured = capsys.readouterr()
    assert url in captured.err + captured.out
    assert captured.err.count("\n") == (0 if arguments == ["doctor"] else 1)


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """A server that gives this answer to every request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


STANDBY = 421, '{"error": "this scheduler is a standby: ask the one that leads"}'


@pytest.mark.parametrize("how", ["--scheduler", "TERRACE_SCHEDULER"])
def test_of_several_schedulers_the_one_that_leads_is_found(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with answering(*STANDBY) as standby, answering(200, '{"devices": []}') as leader:
        urls = f"{gone}/v1, {standby}/,{leader}/v1"
        if how == "--scheduler":
            assert run(["devices", "list", how, urls]) == 0
        else:
            monkeypatch.setenv(how, urls)
            assert run(["devices", "list"]) == 0
    # With all of them, a node that is started so is not lost with the one that leads now.
    assert f"--scheduler {gone},{standby},{leader}" in capsys.readouterr().out


def test_where_all_are_standbys_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("terrace.options.Backoff", partial(Backoff, failover_s=0.0))
    with answering(*STANDBY) as first, answering(*STANDBY) as second:
        assert run(["jobs", "list", "--scheduler", f"{first},{second}"]) == 1
        assert run(["jobs", "list", "--scheduler", first]) == 1
    several, single = capsys.readouterr().err.splitlines()
    assert all(word in several for word in ("no scheduler leads", first, second))
    assert "standby" in single
    assert "URL,URL" in single, "which is how the others are named"


def test_commands_wait_no_longer_than_a_person() -> None:
    assert PATIENCE_S == 10


def test_a_sample_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sample", str(tmp_path / "new" / "photos"), "--count", "3"]) == 0
    files = sorted((tmp_path / "new" / "photos").iterdir())
    assert [file.name for file in files] == ["001-aquarium_fish.png", "002-baby.png", "005-bed.png"]
    with Image.open(files[2]) as picture:
        np.testing.assert_array_equal(np.asarray(picture), read_sample().images[5])
    assert capsys.readouterr().out.startswith("3 images in")
    (tmp_path / "file").touch()
    assert run(["sample", str(tmp_path / "file")]) == 2
    assert "FOLDER" in capsys.readouterr().err
    assert run(["sample", str(tmp_path / "file" / "photos")]) == 2
    assert str(tmp_path / "file" / "photos") in capsys.readouterr().err


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""Output is kept until the end, as it is for users: what cannot be written then shows twice, or not at all."""


@pytest.mark.parametrize("arguments", [["--help"], ["models", "list"], ["models", "list", "--json"]], ids=" ".join)
def test_a_full_disk_is_one_sentence(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "terrace", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=BUFFERED)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("arguments", [["models", "list"], ["models", "list", "--json"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "terrace", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=BUFFERED)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["jobs", "show", "../../x"], "'../../x'"),
        (["jobs", "cancel", ".."], "'..'"),
        (["devices", "remove", "../x"], "'../x'"),
        (["jobs", "show", "../\x1b[2J"], "'../\\x1b[2J'"),
    ],
)
def test_an_id_stays_an_id(arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert shown in capsys.readouterr().err


def test_the_environment_names_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERRACE_SCHEDULER", "ftp://nowhere")
    assert run(["jobs", "list"]) == 2
    assert "ftp://nowhere" in capsys.readouterr().err


def test_a_fleet_file_with_a_mistake_is_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path_factory.mktemp("fleet") / "fleet.toml"
    path.write_text("[host.a]\nend = 1\n")
    assert run(["up", "--fleet", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert "scheduler is missing" in said


def test_doctor_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == all(check["verdict"] != "fail" for check in report["checks"])
    assert {"installation", "models", "data", "ports", "fleet"} == {check["group"] for check in report["checks"]}


@pytest.mark.parametrize("how", ["--models", "TERRACE_MODELS"])
def test_doctor_looks_at_the_model_set_that_is_named(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent")
    arguments = ["--models", absent] if how == "--models" else []
    if not arguments:
        monkeypatch.setenv(how, absent)
    assert run(["doctor", "--json", *arguments]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [absent in check["detail"] for check in checks if check["group"] == "models"] == [True]


def test_doctor_does_not_fill_lines_up_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS")
    run(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert any("onnxruntime" in line for line in lines)
    assert max(map(len, lines)) < 500


@pytest.mark.parametrize(
    ("words", "expected"),
    [("terrace do", "doctor"), ("terrace jobs ", "wait"), ("terrace classify --sche", "--scheduler")],
)
def test_shells_can_complete(words: str, expected: str) -> None:
    environment = {
        **os.environ,
        "_TERRACE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    program = "from terrace.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert expected in done.stdout.split()


def test_ctrl_c_while_the_command_line_is_imported_is_no_error() -> None:
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'terrace.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from terrace.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
