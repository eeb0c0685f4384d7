"""Whatever happens to a launcher, what it started does not outlive it."""

import os
import select
import signal
import subprocess
import sys

from tierkit.orphan import PARENT_VARIABLE

CHILD = """
import signal
from tierkit.orphan import die_with_parent
die_with_parent()
print("up", flush=True)
signal.pause()
"""
LAUNCHER = f"""
import os, signal, subprocess, sys
environment = {{**os.environ, "{PARENT_VARIABLE}": str(os.getpid())}}
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, env=environment)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""


def test_a_killed_launcher_takes_its_child_along() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        child = os.pidfd_open(int(launcher.stdout.readline()))
        try:
            assert select.select([child], [], [], 0)[0] == []
            launcher.send_signal(signal.SIGKILL)
            assert select.select([child], [], [], 10)[0] == [child], "the child still runs"
        finally:
            os.close(child)


def test_a_child_whose_launcher_is_gone_already_does_not_start() -> None:
    environment = {**os.environ, PARENT_VARIABLE: "1" if os.getpid() != 1 else "2"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "is gone" in done.stderr


def test_the_variable_is_not_inherited() -> None:
    program = (
        "import os; from tierkit.orphan import PARENT_VARIABLE, die_with_parent\n"
        "die_with_parent(); print(PARENT_VARIABLE in os.environ)"
    )
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
