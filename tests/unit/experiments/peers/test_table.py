"""Markdown from records."""

import json
from pathlib import Path
from typing import Any

from experiments.peers.table import as_markdown, newest_records

KEY = "batch-50-concurrency-4"


def record(name: str, *, measured_at: str = "2030-01-01T10:00:00+00:00", network: str = "net", **results: Any) -> Any:
    return {
        "config": {
            "contender": name,
            "title": name.title(),
            "version": "1.0",
            "protocol": "raw",
            "batches": "no",
            "network": network,
            "rows": [{"batch": 50, "concurrency": 4}],
        },
        "samples": {"cold_start_s": [1.0], f"{KEY}.ratio_to_bare": [0.5, 0.7]} if "unmeasured" not in results else {},
        "results": results,
        "measured_at": measured_at,
    }


def measured(name: str, images_per_s: float, **more: Any) -> Any:
    figures: dict[str, Any] = {
        f"{KEY}.images_per_s": images_per_s,
        f"{KEY}.ratio_to_bare": 0.6,
        f"{KEY}.p50_ms": 12.345,
    }
    return record(name, **figures, cold_start_s=1.25, peak_memory_bytes=2**20 * 300, **more)


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_the_fastest_comes_first() -> None:
    text = as_markdown([measured("fastapi", 1000.0), measured("terrace", 9000.0)])
    rows = [line for line in text.splitlines() if line.startswith(("| Fastapi", "| Terrace"))]
    assert [row.split("|")[1].strip() for row in rows[:2]] == ["Terrace", "Fastapi"]
    assert rows[0].split(" | ")[1:5] == ["9,000", "0.60", "0.50 to 0.70", "12.35"]


def test_what_was_not_measured_stands_there_with_its_reason() -> None:
    failed = record("ray", unmeasured="it cannot be installed: no wheel | no luck")
    text = as_markdown([measured("terrace", 10.0), failed])
    assert len(lines(text, "| Ray | unmeasured: it cannot be installed: no wheel / no luck")) == 1
    assert len([line for line in lines(text, "| Ray") if "unmeasured" in line]) == 2


def test_a_row_that_failed_says_so() -> None:
    failed = record("ray", cold_start_s=1.0, failures={KEY: "not answered: 4 x 500"})
    assert "| Ray | unmeasured: not answered: 4 x 500" in as_markdown([failed])


def test_every_line_of_a_table_has_as_many_cells() -> None:
    text = as_markdown([measured("terrace", 10.0), record("ray", unmeasured="reason")])
    for table in text.split("###")[1:]:
        assert len({line.count("|") for line in lines(table, "|")}) == 1


def test_networks_have_tables_of_their_own() -> None:
    text = as_markdown([measured("terrace", 10.0), measured("terrace", 20.0, network="large")])
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        "### Targets",
        "### net, 50 images a request, concurrency 4",
        "### net, what they are and cost",
        "### large, 50 images a request, concurrency 4",
        "### large, what they are and cost",
    ]


def test_the_newest_record_of_each_contender_counts(tmp_path: Path) -> None:
    records = {
        "peers-a": measured("fastapi", 2.0, measured_at="2030-01-01T11:00:00+00:00"),
        "peers-b": measured("fastapi", 1.0, measured_at="2030-01-01T10:00:00+00:00"),
        "peers-c": measured("terrace", 3.0),
        "other-d": measured("ray", 4.0),
    }
    for name, content in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = newest_records(tmp_path)
    assert [entry["config"]["contender"] for entry in found] == ["terrace", "fastapi"]
    assert found[1]["results"][f"{KEY}.images_per_s"] == 2.0
