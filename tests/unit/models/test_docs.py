"""`docs/models.md` says what the manifest says, and its example runs."""

import re
from pathlib import Path

import pytest

from models.manifest import load_manifest
from tierkit.types import Tier

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tier", Tier)
def test_the_table_has_the_size_and_the_accuracy_of_the_manifest(tier: Tier):
    entry = load_manifest().default_for(tier)
    (row,) = re.findall(rf"^\| {entry.tier} \| `{re.escape(entry.name)}` \| INT8 \|.*$", TEXT, flags=re.MULTILINE)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert f"{entry.parameters / 1e6:.2f}" in cells
    assert f"{entry.size_bytes / 1e6:.1f}" in cells
    for accuracy in (entry.coarse_accuracy, entry.fine_accuracy):
        assert ("-" if accuracy is None else f"{accuracy:.4f}") in cells


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert getattr(names["coarse"], "shape", None) == (50, 20)


def test_each_shipped_network_has_its_record():
    for entry in load_manifest().models:
        assert (ROOT / "models" / "records" / entry.training.record).is_file()
