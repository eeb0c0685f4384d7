"""The example package, installed as people install packages, and processes that have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "tests" / "extension_package"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for packages, with the example."""
    folder = tmp_path_factory.mktemp("site")
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *flags, "--target", str(folder), str(PACKAGE)],
        check=True,
        timeout=110,
    )
    return folder


@pytest.fixture
def with_package(site: Path, fresh_processes: None) -> dict[str, str]:
    """Environment of a process that has the example package. Other processes of the test do not have it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
