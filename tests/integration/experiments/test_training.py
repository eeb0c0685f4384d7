"""`terrace experiment training`, as small as it can be: a host process, and all tables on a few images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from experiments.harness import RECORD
from experiments.training.cases import TABLES, cases
from experiments.training.compared import compared
from experiments.training.school import Classroom, School
from experiments.training.teaching import LESSONS
from models.data import read_sample
from models.manifest import load_manifest
from terrace.commands.experiment import app
from tests.digits import write_digits
from tierkit.errors import DataError
from training.strategies.finding import STRATEGIES

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]

IMAGES = 480


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"), IMAGES)


def run(digits: Path, folder: Path, *flags: str) -> Any:
    known = ["training", "--quick", "--json", "--data", str(digits), "--images", str(IMAGES), "--out", str(folder)]
    return CliRunner().invoke(app, [*known, *flags], catch_exceptions=False)


def test_all_tables(digits: Path, tmp_path: Path) -> None:
    ended = run(digits, tmp_path / "run", "--exchanges", "8")
    assert ended.exit_code == 0, ended.output
    rows = json.loads(ended.stdout)
    assert len(rows) == len(cases())
    assert {row["table"] for row in rows} == set(TABLES)
    for row in rows:
        by_processes = row["strategy"].startswith(("hybrid", "pipeline"))
        assert by_processes or row["virtual_seconds"] > 0
        assert row["updates"] > 0
        assert 0 < row["step_s"] < 1
        if "step_bytes" not in row:  # with a host
            assert row["bytes_sent"] >= row["updates"] * row["size_bytes"]
            assert 0 < row["serve_s"] < 1
            assert (row["twice"], row["missing"]) == (0, 0)
        assert row["seed"] == 0
    by_table = {table: [row for row in rows if row["table"] == table] for table in TABLES}
    assert all(row["accuracy"] is None for row in by_table["slow-worker"])
    assert all(0 <= row["accuracy"] <= 1 for table in ("delay", "bytes", "faults") for row in by_table[table])
    assert [row["faults"] > 0 for row in by_table["faults"]] == [False, True, False, True]
    names = [line[0] for line in compared(by_table["strategies"]).rows]
    assert names[0] == "one process"
    assert set(STRATEGIES) <= {*(name.partition(", wide")[0] for name in names), "elastic"}
    record = json.loads((tmp_path / "run" / RECORD).read_text())
    assert record["config"]["network"] == "mnist-64-64"
    assert len(record["points"]) == len(rows)


def test_shares_need_no_images(tmp_path: Path) -> None:
    flags = ["training", "--only", "shares", "--json", "--out", str(tmp_path / "run")]
    ended = CliRunner().invoke(app, flags, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    rows = {row.pop("network"): row for row in json.loads(ended.stdout)}
    assert rows["mnist-100"] == {
        "convolution_macs": 0,
        "dense_macs": 784 * 100 + 100 * 10,
        "convolution_parameters": 0,
        "dense_parameters": 784 * 100 + 100 + 100 * 10 + 10,
    }
    found = rows["alexnet"]
    assert found["dense_parameters"] / (found["dense_parameters"] + found["convolution_parameters"]) > 0.95
    weights = (64 * 3 * 25, 128 * 64 * 25, 256 * 128 * 9, 256 * 256 * 9, 256 * 256 * 9)
    assert found["convolution_macs"] == sum(
        each * side**2 for each, side in zip(weights, (32, 16, 8, 8, 8), strict=True)
    )


def test_workers_learn_from_the_answers_of_a_teacher_in_as_many_steps_as_one_machine() -> None:
    sample, hierarchy = read_sample(), load_manifest().hierarchy
    room = Classroom(training=sample.take(np.arange(300)), test=sample.take(np.arange(300, 400)), hierarchy=hierarchy)
    school = School(room, {"epochs": 1})
    one, four, plain = (school.give(lesson, 0) for lesson in LESSONS)
    assert one["steps"] == four["steps"] == plain["steps"] == 3
    assert one["step_s"] == four["step_s"] == plain["step_s"]  # measured once
    assert [each["answers_bytes"] for each in (one, four, plain)] == [300 * 2 * 100 * 2] * 2 + [0]
    assert (one["bytes_sent"], four["bytes_sent"] > 0) == (0, True)
    assert four["loss"] != plain["loss"]  # the answers are a part of it
    with pytest.raises(DataError):
        School(Classroom(training=sample.take(np.arange(150)), test=room.test, hierarchy=hierarchy))


def test_a_table_that_is_none_is_refused(digits: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["training", "--data", str(digits), "--only", "speed", "--out", str(tmp_path / "r")]
    )
    assert result.exit_code != 0
    assert "scaling" in str(result.exception)


def test_too_few_images_are_told(digits: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["training", "--data", str(digits), "--out", str(tmp_path / "r")])
    assert result.exit_code != 0
    assert "60,000" in str(result.exception)
