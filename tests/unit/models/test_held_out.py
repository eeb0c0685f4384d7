"""Which images training left out, by the records alone."""

import json
from pathlib import Path

import numpy as np
import pytest

from models.held_out import held_out_per_class, hold_out
from models.manifest import load_manifest
from tierkit.errors import DataError, WeightsError

RECORDS = Path(__file__).parents[3] / "models" / "records"


def write_records(folder: Path, **runs: dict[str, object]) -> Path:
    for name, config in runs.items():
        (folder / f"{name}.json").write_text(json.dumps({"config": config}))
    return folder


def entry(record: str):
    entry = load_manifest().models[0]
    return entry.model_copy(update={"training": entry.trained.model_copy(update={"record": f"{record}.json"})})


def test_held_out_images_are_the_last_of_each_class():
    split = hold_out(np.array([0, 1, 0, 1, 0, 1]), 1)
    assert split.held_out.tolist() == [4, 5]
    assert split.train.tolist() == [0, 1, 2, 3]


def test_a_class_that_would_be_left_without_images_is_named():
    with pytest.raises(DataError, match="class 1 has 1"):
        hold_out(np.array([0, 0, 1]), 1)


def test_the_shipped_networks_have_not_seen_the_last_twenty_images_of_each_class():
    assert held_out_per_class(load_manifest().models, RECORDS) == 20


def test_what_a_teacher_or_an_earlier_run_has_seen_counts(tmp_path: Path):
    write_records(
        tmp_path,
        student={"held_out_per_class": 9, "initial": "early", "teacher": {"runs": ["teacher"]}},
        early={"held_out_per_class": 7, "initial": None, "teacher": None},
        teacher={"held_out_per_class": 5},
    )
    assert held_out_per_class([entry("student")], tmp_path) == 5
    write_records(tmp_path, early={"held_out_per_class": 0})
    with pytest.raises(WeightsError, match="'early' was trained on all images"):
        held_out_per_class([entry("student")], tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", '{"config": {"held_out_per_class": "many"}}'])
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, content: str):
    with pytest.raises(WeightsError, match=r"training record .*--records"):
        held_out_per_class([entry("gone")], tmp_path)
    (tmp_path / "gone.json").write_text(content)
    with pytest.raises(WeightsError, match=r"gone\.json is damaged"):
        held_out_per_class([entry("gone")], tmp_path)
