"""`tests.zygote` forks processes that behave like those of a new interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.zygote import fresh_processes

PROGRAM = """
import os, random, sys
from scheduler.api import app
from tierkit.wire import trace
print(os.getcwd(), os.getppid(), os.getsid(0) == os.getpid(), os.environ.get("COLOUR"), "HOME" in os.environ)
print(trace.new_trace().trace_id)
print("seen", file=sys.stderr)
"""


def started(program: str, *, fresh: bool = False, **options: Any) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-P", "-m", "timeit", "-n1", "-r1", program]
    if not fresh:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)
    with fresh_processes():
        return started(program, **options)


@pytest.mark.parametrize("session", [False, True])
def test_a_process_has_its_own_folder_environment_streams_and_session(tmp_path: Path, session: bool) -> None:
    options: dict[str, Any] = {"cwd": tmp_path, "env": {"COLOUR": "red"}, "start_new_session": session}
    both = [started(PROGRAM, fresh=fresh, **options) for fresh in (False, True)]
    draws = []
    for found in both:
        assert (found.returncode, found.stderr) == (0, "seen\n")
        line, drawn, _ = found.stdout.splitlines()
        assert line == f"{tmp_path} {os.getpid()} {session} red False"
        draws.append(drawn)
    draws.append(started(PROGRAM).stdout.splitlines()[1])
    assert len(set(draws)) == 3


@pytest.mark.parametrize("program", ["raise SystemExit(7)", "import os; os.kill(os.getpid(), 9)", "1 / 0"])
def test_a_process_ends_as_it_would_otherwise(program: str) -> None:
    forked, new = started(program), started(program, fresh=True)
    assert forked.returncode == new.returncode != 0
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_what_python_reads_when_it_starts_counts() -> None:
    options: dict[str, Any] = {"env": {**os.environ, "PYTHONOPTIMIZE": "1"}}
    assert started("import sys; print(sys.flags.optimize)", **options).stdout.splitlines()[0] == "1"
