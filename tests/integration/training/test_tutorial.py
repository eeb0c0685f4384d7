"""`docs/get-started/train-together.md` as it is written, on one machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.fleets import running
from tests.acceptance.test_docs import blocks, commands

pytestmark = pytest.mark.train
DATA = Path(os.environ.get("TERRACE_DATA", "data"))


@pytest.mark.timeout(300)
@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason="needs MNIST in the folder TERRACE_DATA")
def test_the_commands_run(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(DATA.resolve())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = "".join(text for language, text in blocks("docs/get-started/train-together.md") if language == "sh")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shell],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoint.pt").is_file()
    (line,) = commands("docs/get-started/train-together.md", "Serve the result")
    arguments = line.replace("run/model-set", str(tmp_path / "run" / "model-set")).split()[2:]
    with running(*arguments, "--port", "0", log=tmp_path / "log") as up:
        assert "scheduler  http://" in up.output
        up.process.terminate()
        up.process.wait(30)
