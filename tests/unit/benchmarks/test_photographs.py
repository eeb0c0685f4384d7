"""The photographs that are measured with, and what is made of the times."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.photographs import PHOTOGRAPHS, make_jpegs, ratio_of


def point(fleet_s: float, *bare_s: float, equal: int = 10) -> dict[str, Any]:
    both = dict(zip(("bare_all_cores_per_batch_s", "bare_one_core_per_batch_s"), bare_s, strict=True))
    return {"fleet_s": fleet_s, "equal": equal, **both}


def source(folder: Path) -> Path:
    """What stands for a photograph: shapes, edges and grain."""
    rng = np.random.default_rng(0)
    soft = Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8)).resize((900, 600), Image.Resampling.BICUBIC)
    soft.save(folder / "photograph.png")
    return folder / "photograph.png"


@pytest.mark.parametrize("synthetic", [True, False])
def test_photographs_are_all_different_and_of_the_usual_size(tmp_path: Path, synthetic: bool) -> None:
    sources = [] if synthetic else [source(tmp_path)]
    files = make_jpegs(20, 1, sources)
    assert files == make_jpegs(20, 1, sources)
    assert len(set(files)) == 20
    assert {Image.open(io.BytesIO(data)).size for data in files} == {(500, 375), (375, 500)}
    assert all(30_000 < len(data) < 90_000 for data in files)


def test_the_better_way_of_the_bare_loop_counts() -> None:
    assert ratio_of(point(2.0, 1.0, 1.5)) == ratio_of(point(2.0, 1.5, 1.0)) == 0.5


@pytest.mark.parametrize(("fleet_s", "missed"), [(1.1, 0), (1.2, 1)])
def test_one_row_of_all_rounds(fleet_s: float, missed: int) -> None:
    points = [point(fleet_s, 1.0, 2.0), point(fleet_s, 2.0, 1.0), point(fleet_s / 2, 1.0, 1.0, equal=9)]
    record = {"config": {"photographs": 10}, "points": points}
    (row,) = PHOTOGRAPHS.rows(record)
    assert row["ratio"]["median"] == pytest.approx(1 / fleet_s)
    assert row["ratio"]["maximum"] == pytest.approx(2 / fleet_s)
    assert row["fleet_per_s"]["median"] == pytest.approx(10 / fleet_s)
    assert row["bare_per_s"]["median"] == pytest.approx(10)
    assert (row["rounds"], row["equal"]) == (3, 29)
    assert len(row["missed"]) == missed
    assert PHOTOGRAPHS.table(record).rows[-1][1] == "29 of 30"
    (row,) = PHOTOGRAPHS.rows({**record, "config": {"photographs": 10, "judged": False}})
    assert row["missed"] == []
