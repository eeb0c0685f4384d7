"""What the documentation says was measured is what the records say."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import PLOTS, RECORDS, keep, main, places_of
from tierkit.errors import InvalidInput

pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "results"
PAGES = {path.name: path.read_text("utf-8") for path in RESULTS.glob("*.md")}


def table3(at: str, parameters: int = 432, **changes: Any) -> dict[str, Any]:
    point = {"network": "wrn", "network_tier": "cloud", "shape": [32, 32, 16], "parameters": parameters, "bytes": 1000}
    return {
        "experiment": "table3",
        "results": {"rows": []},
        "samples": {},
        "seed": 0,
        "config": {"quick": False, "tasks": 200, "ends": [parameters], "runs": parameters},
        "points": [point],
        "state": "complete",
        "notes": [],
        "command": ["__main__.py", "experiment", "table3", "--out", "runs/mine", "--json"],
        "commit": "0123456789abcdef+changes",
        "host": {
            "cores": 2,
            "cpu": "a processor",
            "python": "3.11.7",
            "terrace": "0.1.0",
            "load_average": "0.50 0.40 0.30",
            "priority": "nice 0",
        },
        "measured_at": f"2030-01-{at}T01:02:03+00:00",
        **changes,
    }


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def write(folder: Path, *records: dict[str, Any]) -> None:
    for record in records:
        name = f"{record['experiment']}-{record['measured_at'][:10]}T010203Z.json"
        (folder / name).write_text(json.dumps(record))


@pytest.mark.parametrize("name", PAGES)
def test_tables_and_plots_are_those_of_the_records(name: str) -> None:
    again = f"run: python -m benchmarks.tables docs/results/{name}"
    for words, place in places_of(RESULTS / name).items():
        assert f"<!-- table: {words} -->\n\n{place.markdown}\n\n<!-- end of table -->" in PAGES[name], again
        for file, content in place.plots.items():
            assert in_the_picture((RESULTS / PLOTS / file).read_text()) == in_the_picture(content.decode()), again


def in_the_picture(svg: str) -> tuple[list[str], Counter[str]]:
    """Titles, names and numbers beside the axes; and how many points, lines and bars there are of each colour."""
    return re.findall("<!-- (.*?) -->", svg), Counter(re.findall(r'style="[^"]*?(?:stroke|fill): (#\w+)', svg))


def test_every_plot_beside_the_pages_is_shown_on_one() -> None:
    shown = "".join(PAGES.values())
    assert [path.name for path in (RESULTS / PLOTS).iterdir() if f"({PLOTS}/{path.name})" not in shown] == []


def test_every_record_is_shown_or_named_on_a_page() -> None:
    shown = "".join(path.read_text("utf-8") for path in DOCS.rglob("*.md"))
    assert [path.name for path in RECORDS.glob("*.json") if f"/records/{path.name}`" not in shown] == []


def test_a_place_for_another_table_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(table3("01", experiment="other")))
    assert (
        places_of(page(tmp_path, "<!-- table: other -->\n<!-- table: nothing -->\n<!-- table: table3 -->\n"), tmp_path)
        == {}
    )


def test_a_place_says_by_which_command_and_when_it_was_measured(tmp_path: Path) -> None:
    write(tmp_path, table3("01"))
    words = "table3-2030-01-01T010203Z"
    place = places_of(page(tmp_path, f"<!-- table: {words} -->"), tmp_path)[words]
    assert place.markdown.endswith(
        "Measured by `terrace experiment table3` of commit 0123456789ab with changes, 2030-01-01 01:02 UTC, 2 cores "
        "(a processor), load 0.50 at its end; n = 1 for each row (readings of the files) "
        f"(record `benchmarks/records/{words}.json`)."
    )


def test_the_name_of_an_experiment_stands_for_its_newest_record(tmp_path: Path) -> None:
    write(tmp_path, table3("02", parameters=433), table3("01"))
    (tmp_path / "table3-other-2031.json").write_text("{}")
    assert "| 433 |" in places_of(page(tmp_path, "<!-- table: table3 -->"), tmp_path)["table3"].markdown


def test_several_records_are_put_together(tmp_path: Path) -> None:
    write(tmp_path, table3("01"), table3("02", parameters=433))
    words = "table3-2030-01-02T010203Z table3-2030-01-01T010203Z"
    text = places_of(page(tmp_path, f"<!-- table: {words} -->"), tmp_path)[words].markdown
    assert text.index("| 433 |") < text.index("| 432 |")
    assert (text.count("Measured by"), text.count("2030-01-01 01:02")) == (2, 1)


@pytest.mark.parametrize(
    "changes", [{"state": "interrupted"}, {"config": {"tasks": 40}}, {"experiment": "table1", "points": []}]
)
def test_records_of_other_conditions_are_not_put_together(tmp_path: Path, changes: dict[str, Any]) -> None:
    other = table3("02", **changes)
    write(tmp_path, table3("01"), other)
    with pytest.raises(InvalidInput, match="cannot be put together"):
        places_of(page(tmp_path, f"<!-- table: table3-2030-01-01T010203Z {other['experiment']} -->"), tmp_path)


def test_a_run_is_kept_under_its_experiment_and_time(tmp_path: Path) -> None:
    run, records = tmp_path / "run", tmp_path / "records"
    run.mkdir()
    records.mkdir()
    (run / "record.json").write_text(json.dumps(table3("01")))
    assert keep(run, records) == records / "table3-2030-01-01T010203Z.json"
    (run / "record.json").write_text(json.dumps(table3("02", state="interrupted")))
    with pytest.raises(InvalidInput, match=r"run is interrupted: only complete ones are kept"):
        keep(run, records)
    (run / "record.json").write_text(json.dumps(table3("03", config={"quick": True})))
    with pytest.raises(InvalidInput, match=r"is a quick one: only whole ones are kept, so run it without --quick"):
        keep(run, records)
    assert len(list(records.iterdir())) == 1


def test_a_run_that_cannot_be_kept_is_a_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.tables", "--keep", str(tmp_path), "docs/none.md"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    sentence = f"cannot read the record {tmp_path / 'record.json'}: No such file or directory"
    assert sentence in capsys.readouterr().err
