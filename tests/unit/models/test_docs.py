"""The pages on networks say what the manifest and the records say, and their example runs."""

import json
import re
from pathlib import Path

import pytest

from models.manifest import load_manifest
from tierkit.types import Tier

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "how-to" / "networks.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results" / "networks.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "how-to" / "train-networks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tier", Tier)
def test_the_table_has_the_size_and_the_accuracy_of_the_manifest(tier: Tier):
    entry = load_manifest().default_for(tier)
    (row,) = re.findall(rf"^\| {entry.tier} \| `{re.escape(entry.name)}` \| INT8 \|.*$", RESULTS, flags=re.MULTILINE)
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


def test_each_shipped_network_has_its_records_and_the_manifest_their_totals():
    for entry in load_manifest().models:
        file: str | None = entry.trained.record
        chain = []
        while file is not None:
            chain.append(json.loads((ROOT / "models" / "records" / file).read_bytes()))
            initial = chain[-1]["config"].get("initial")
            file = initial and f"{initial}.json"
        assert entry.trained.epochs == len(chain[0]["epochs"])
        assert entry.trained.total_epochs == sum(len(record["epochs"]) for record in chain)
        assert entry.trained.total_minutes == round(sum(record["minutes"] for record in chain), 1)


def test_the_recipe_is_that_of_the_records():
    steps = re.findall(r"^terrace models train (\S+) --threads (\d) ", TRAINING, flags=re.MULTILINE)
    for name, threads in steps:
        record = json.loads((ROOT / "models" / "records" / f"{name}.json").read_bytes())
        assert record["steps"] == record["planned_steps"], name
        assert record["environment"]["threads"] == threads
    assert sorted(name for name, _ in steps) == sorted(entry.name for entry in load_manifest().models)


def test_the_escalation_page_says_what_the_record_says():
    page = (
        (ROOT / "docs" / "results" / "scheduling.md")
        .read_text(encoding="utf-8")
        .split("| chosen for |")[1]
        .split("\n\n")[0]
    )
    rows = {}
    for line in re.findall(r"^\| (?:accuracy|budget) .*$", page, flags=re.MULTILINE):
        aim, lowest, below, *figures = [cell.strip() for cell in line.strip("|").split("|")]
        rows["threshold" if aim.startswith("accuracy") else "budget", lowest] = [below, *figures]
    record = json.loads((ROOT / "models" / "records" / "escalation.json").read_bytes())
    for found in record["test"]:
        below = ", ".join(f"{threshold:.3f}" for threshold in found["thresholds"].values())
        shares = [found["went_to"]["edge"], found["went_to"]["cloud"]]
        shares += [found["stayed_at"]["end"], found["stayed_at"]["edge"]]
        fine = "-" if found["fine_accuracy"] is None else f"{found['fine_accuracy']:.4f}"
        accuracies = [fine, f"{found['coarse_accuracy']:.4f}", f"{found['relative_accuracy']:.4f}"]
        expected = [below, *(f"{share:.1%}".replace(".0%", "%").replace("%", " %") for share in shares), *accuracies]
        assert rows[found["escalate"], found["escalate_from"]] == expected
    assert len(rows) == len(record["test"])
