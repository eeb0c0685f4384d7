"""Run records hold what they were given and never overwrite one another."""

import json
from pathlib import Path

import pytest

from experiments.record import RunRecord, source_commit, spread


def _record() -> RunRecord:
    return RunRecord(
        experiment="main-job", config={"tasks": 4}, samples={"makespan_s": [1.5, 2.5]}, results={"ratio": 1.1}
    )


def test_a_record_can_be_read_back_whole(tmp_path: Path) -> None:
    path = _record().write(tmp_path)
    stored = json.loads(path.read_text())
    assert stored["config"] == {"tasks": 4}
    assert stored["samples"]["makespan_s"] == [1.5, 2.5]
    assert stored["host"]["cores"] >= 1
    assert stored["host"]["priority"].startswith(("nice ", "real-time "))
    assert len(stored["host"]["load_average"].split()) == 3
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_a_second_record_stands_beside_the_first(tmp_path: Path) -> None:
    record = _record()
    assert record.write(tmp_path) != record.write(tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_spread_states_n_and_range() -> None:
    summary = spread([3.0, 1.0, 2.0])
    assert (summary.n, summary.median, summary.minimum, summary.maximum) == (3, 2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="median"):
        spread([])


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    assert source_commit(tmp_path) is None


def test_what_json_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    record = RunRecord(experiment="main-job", config={"odd": object()}, samples={}, results={})
    with pytest.raises(TypeError):
        record.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("user", ["terrace:geh/eim@10.0.0.9", "10.0.0.9"])
def test_a_record_holds_no_password(user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"postgresql+asyncpg://{user}/x?password=geheim&ssl=require"
    monkeypatch.setattr("sys.argv", ["/bin/terrace", "experiment", "durability", f"--database={url}"])
    text = _record().write(tmp_path).read_text()
    assert "eim" not in text
    assert "10.0.0.9/x?password=***&ssl=require" in text


def test_a_record_does_not_say_where_its_output_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["table5", "--out", "somewhere", "--venvs=there", "--data", "my/data", "--json", "--seed", "3"]
    monkeypatch.setattr("sys.argv", ["/bin/terrace", "experiment", *words])
    assert json.loads(_record().write(tmp_path).read_text())["command"] == [
        *("terrace", "experiment", "table5"),
        *("--seed", "3"),
    ]
