"""The suite can be collected where the networks are missing: then the tests that need them fail, each by itself."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path

import pytest

import models.manifest

models.manifest.weights_folder = lambda: Path("absent")
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"]))
"""


def test_no_test_module_reads_the_weights_when_it_is_imported() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=root, timeout=55)
    assert done.returncode == 0, done.stdout[-2000:]
