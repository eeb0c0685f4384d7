"""The networks of the benchmark of releases have the faults that they are to have, and rows tell good from bad."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.releases import networks
from benchmarks.releases.experiment import RELEASES, other_set
from benchmarks.releases.networks import KINDS, base_set, pictures, variant
from models.manifest import load_manifest
from models.session import load_model
from tierkit.tensors import Array
from tierkit.types import Tier

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sets")
    with pytest.MonkeyPatch.context() as fewer:
        fewer.setattr(networks, "_LAYERS", {kind: max(1, count // 50) for kind, count in networks._LAYERS.items()})
        return {kind: base_set(folder / kind, kind) for kind in KINDS}


def answers(models: Path, tier: Tier, images: Array) -> Array:
    manifest = load_manifest(models)
    entry = manifest.default_for(tier)
    model = load_model(entry, models, labels=manifest.labels(entry))
    return model.run({model.inputs[0].name: images}, ["probabilities"])["probabilities"]


def test_good_networks_name_the_tint_and_agree_with_the_tier_above(sets: dict[str, Path], tmp_path: Path) -> None:
    images = pictures(60)
    above = answers(sets["good"], Tier.EDGE, images).argmax(axis=1)
    assert set(above) == {0, 1, 2}
    other = variant(sets["good"], tmp_path / "other", 1)
    for models in (sets["good"], sets["slow"], sets["nan"], other):
        assert (answers(models, Tier.END, images).argmax(axis=1) == above).all()
    digests = {load_manifest(models).default_for(Tier.END).sha256 for models in (*sets.values(), other)}
    assert len(digests) == 4


def test_faults(sets: dict[str, Path], tmp_path: Path) -> None:
    images = pictures(200, 0.5)
    one = variant(sets["good"], tmp_path / "one", 1, one_class=True)
    assert set(answers(one, Tier.END, images).argmax(axis=1)) == {0}
    damaged = np.isnan(answers(sets["nan"], Tier.END, images)).any(axis=1)
    assert (damaged == (images[:, 0, 0] == 255).all(axis=1)).all()
    assert 50 < damaged.sum() < 150


def test_the_bundled_networks_in_other_files_are_a_whole_set(tmp_path: Path) -> None:
    made = load_manifest(other_set(tmp_path / "set", 3))
    assert {entry.sha256 for entry in made.models}.isdisjoint(entry.sha256 for entry in load_manifest().models)
    for entry in made.models:
        assert (tmp_path / "set" / entry.file).stat().st_size == entry.size_bytes
    shutil.rmtree(tmp_path / "set")


def trial(kind: str, outcome: str, **changes: Any) -> dict[str, Any]:
    point = {
        "part": "trials",
        "kind": kind,
        "outcome": outcome,
        "seconds": 5.0,
        "extended": False,
        "images": 200,
        "outside": 0,
        "failed": [],
        "mixed": [],
    }
    return {**point, **changes}


def switch(during: list[float], **changes: Any) -> dict[str, Any]:
    point = {
        "part": "switch",
        "switch_s": 1.0,
        "caught_up_s": 2.0,
        "requests": 300,
        "jobs": 20,
        "failed": [],
        "mixed": [],
        "samples": {"before": [10.0] * 100, "during": during, "after": [10.0] * 100},
    }
    return {**point, **changes}


@pytest.mark.parametrize(
    ("points", "missed"),
    [
        ([trial("good", "done"), trial("good", "done")], []),
        ([trial("good", "done"), trial("good", "rolled back")], ["1 of 2 ended otherwise than they should"]),
        ([trial("slow", "rolled back"), trial("slow", "refused")], []),
        ([trial("nan", "done")], ["1 of 1 ended otherwise than they should"]),
        ([trial("slow", "rolled back", outside=5)], ["5 images were answered outside the canary"]),
        ([trial("damaged", "refused", failed=["image 3: x"])], ["1 requests or images failed"]),
        ([switch([12.0] * 100)], []),
        ([switch([16.0] * 100)], ["the 99th percentile is 1.60 times the one before, above 1.5"]),
        ([switch([10.0] * 100, mixed=["job 1"])], ["1 jobs have answers of two networks of a tier"]),
    ],
)
def test_rows_name_the_targets_that_are_missed(points: list[dict[str, Any]], missed: list[str]) -> None:
    (row,) = RELEASES.rows({"points": points})
    assert row["missed"] == missed
    (line,) = RELEASES.table({"points": points}).rows
    assert line[-1] == ("; ".join(missed) or "all reached")
