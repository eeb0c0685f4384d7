"""The examples of docs/how-to/extending.md are one package, which passes its own contract tests."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

from tierkit.extensions import BUILT_IN

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "extending.md"


def test_the_examples_make_a_package_that_passes_its_contract_tests(tmp_path: Path) -> None:
    files = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    points = tomllib.loads(files["pyproject.toml"])["project"]["entry-points"]
    assert points.keys() == BUILT_IN.keys()
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    named = {value.partition(":")[0].replace(".", "/") + ".py" for found in points.values() for value in found.values()}
    assert named == {name for name in files if name.startswith("terrace_mine/")}
    untested = [] if find_spec("torch") else ["-k", "not network"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *untested, "test_contracts.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        check=False,
        timeout=110,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
