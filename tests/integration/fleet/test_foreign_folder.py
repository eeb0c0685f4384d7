"""Terrace in a folder that holds packages of somebody else with the names of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TERRACE = Path(sys.executable).with_name("terrace")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("models", "scheduler"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the package of somebody else')\n")
    return tmp_path


def start(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


def test_the_command_runs_a_whole_fleet_there(folder: Path) -> None:
    few = ("--images", "10", "--end", "1", "--edge", "0", "--cloud", "0")
    done = start(folder, str(TERRACE), "demo", "--json", *few)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answered_coarse"] == 10


def test_the_module_refuses_to_run_with_packages_that_are_not_ours(folder: Path) -> None:
    done = start(folder, sys.executable, "-m", "terrace", "demo")
    assert done.returncode == 2
    assert f"'models' in {folder}" in done.stderr
    assert "Traceback" not in done.stderr
