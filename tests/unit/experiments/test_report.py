"""The page of all runs, from records alone."""

import errno
import html
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import RECORDS
from experiments.catalog import EXPERIMENTS
from experiments.harness import RECORD, Request, execute
from experiments.profile import read_profile
from experiments.report import REPORT, write_report
from tierkit.errors import InvalidInput, SetupError

REQUEST = Request(profile_name="native", profile=read_profile("native"))


POINT = {"network": "x", "network_tier": "cloud", "shape": [32, 32, 16], "parameters": 432, "bytes": 1000}
HOST = {"cpu": "a processor", "cores": 2, "python": "3.11.7", "terrace": "0.1.0"}


async def table3(folder: Path) -> Path:
    return (await execute(EXPERIMENTS["table3"], REQUEST, folder, lambda *words: None)).folder


async def test_one_page_without_other_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    await table3(tmp_path / "deep" / "first")
    (tmp_path / "second").mkdir()
    shutil.copyfile(RECORDS / "escalation-2026-11-26T015053Z.json", tmp_path / "second" / RECORD)
    page, warnings = write_report(tmp_path, EXPERIMENTS)
    assert (page, warnings) == (tmp_path / REPORT, [])
    text = page.read_text()
    assert '<h2 id="run-1">table3: output, parameters and size of the encoders (deep/first)</h2>' in text
    assert '<a href="#run-2">escalation: ' in text
    assert "<td>9,472</td>" in text
    # Two plots of one run: their words tell them apart.
    first, second = re.findall(r'<img alt="(.*?)" src="data:image/svg\+xml;base64,', text)
    assert "Fine accuracy against share of images that go to the cloud: " in first
    assert "Accuracy of the superclasses against upload " in second
    assert "n = 1 for each row (runs)" in text
    assert "http://" not in text
    assert "This run is" not in text
    assert (tmp_path / "second" / "escalation-cost.png").exists()


def test_records_that_were_kept_stand_in_one_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    kept = ["table3-2026-11-25T200139Z.json", "table2-2026-11-25T200551Z.json"]
    for name in kept:
        shutil.copyfile(RECORDS / name, tmp_path / name)
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "table3-2030-01-01T010203Z.json").write_text('{"experiment": "ta')
    page, (warning,) = write_report(tmp_path, EXPERIMENTS)
    text = page.read_text()
    assert "(table3-2026-11-25T200139Z)</h2>" in text
    assert "(table2-2026-11-25T200551Z)</h2>" in text
    assert "table3-2030-01-01T010203Z.json is not a whole record" in warning
    # Nothing is written but the page.
    assert len(list(tmp_path.iterdir())) == len(kept) + 3


async def test_a_run_that_is_not_whole_says_so(tmp_path: Path) -> None:
    record = await table3(tmp_path / "table3") / RECORD
    record.write_text(record.read_text().replace('"state": "complete"', '"state": "interrupted"'))
    page, _ = write_report(tmp_path, EXPERIMENTS)
    assert "This run is interrupted." in page.read_text()


async def test_a_record_of_an_unknown_experiment_is_told_of(tmp_path: Path) -> None:
    record = await table3(tmp_path / "old") / RECORD
    record.write_text(record.read_text().replace('"experiment": "table3"', '"experiment": "table9"'))
    _, warnings = write_report(tmp_path, EXPERIMENTS)
    assert warnings == [f"left out: old/{RECORD}: made by no experiment of this version"]


def test_records_of_other_commands_are_named_and_left_out(tmp_path: Path) -> None:
    shutil.copy(next(RECORDS.glob("privacy-audit-*.json")), tmp_path)
    (audit,) = write_report(tmp_path, EXPERIMENTS)[1]
    assert audit.startswith("left out: privacy-audit-")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"results": 7}, "results is 7: "),
        ({"samples": [1]}, "samples: "),
        ({"points": {}}, "points: "),
        ({"points": [1, 2]}, "points.1 is 2: "),
        ({"notes": [{"a": 1}]}, "notes.0: "),
        ({"state": "splendid"}, "state is 'splendid': "),
        ({"seed": math.nan}, "seed is nan: "),
        ({"seed": "x" * 99}, "seed is 'x"),
        ({"seed": 1.5}, "seed is 1.5: "),
        ({"seed": True}, "seed is True: "),
        ({"seed": -1}, "seed is -1: "),
        ({"commit": 5}, "commit is 5: "),
        ({"command": []}, "command has too few entries"),
        ({"command": [1]}, "command.0 is 1: "),
        ({"config": {}}, "its config and points do not fit table3 ('quick' is missing)"),
        ({"points": [{"network": "x"}]}, "its config and points do not fit table3 ('"),
        ({"host": {"cores": 2, "cpu": "x"}}, "host.python is missing; host.terrace is missing"),
        ({"host": {**HOST, "cores": "two"}}, "host.cores is 'two': "),
        ({"host": {**HOST, "load_average": ""}}, "host.load_average is '': "),
        (
            {"measured_at": "yesterday"},
            "measured_at is 'yesterday': ",
        ),
    ],
    ids=str,
)
async def test_what_is_damaged_in_a_record_is_named(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    record = await table3(tmp_path / "table3") / RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    with pytest.raises(SetupError) as caught:
        write_report(tmp_path, EXPERIMENTS)
    assert f"the record {record} is damaged: " in str(caught.value)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("field", ["config", "seed", "commit", "host", "points", "samples"])
async def test_a_record_that_lacks_what_makes_it_one_is_named_and_left_out(tmp_path: Path, field: str) -> None:
    await table3(tmp_path / "table3")
    record = await table3(tmp_path / "less") / RECORD
    record.write_text(
        json.dumps({name: value for name, value in json.loads(record.read_text()).items() if name != field})
    )
    page, (warning,) = write_report(tmp_path, EXPERIMENTS)
    assert warning == f"{record} is not a whole record of an experiment: it has no {field}"
    assert '<h2 id="run-1">table3: ' in page.read_text()
    assert 'id="run-2"' not in page.read_text()


async def test_what_a_later_version_adds_to_a_record_is_passed_over(tmp_path: Path) -> None:
    record = await table3(tmp_path / "table3") / RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 9, "weather": {"rain": None}}))
    assert write_report(tmp_path, EXPERIMENTS)[1] == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"compute_ms_per_image": {}}, "this experiment compares with what machines of a known speed can do"),
        ({"seed": -1}, "config.profile: seed is -1: "),
        ({"nodes": {"end": 1}}, "nodes.edge is missing"),
    ],
)
def test_a_profile_in_a_record_that_is_none_is_told_of_in_plain_words(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    record = json.loads((RECORDS / "figure3-2026-11-26T150432Z.json").read_text())
    record["config"]["profile"] |= change
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(SetupError) as caught:
        write_report(tmp_path, EXPERIMENTS)
    assert sentence in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("profile", [5, {}, {"source": ["<b>", 3]}])
def test_a_source_that_is_none_does_not_end_a_report(tmp_path: Path, profile: Any) -> None:
    record = json.loads((RECORDS / "table2-2026-11-25T200551Z.json").read_text())
    record["config"]["profile"] = profile
    (tmp_path / RECORD).write_text(json.dumps(record))
    page, _ = write_report(tmp_path, EXPERIMENTS)
    assert "<b>" not in page.read_text()


def test_the_report_names_the_source_of_what_was_emulated(tmp_path: Path) -> None:
    shutil.copy(RECORDS / "table2-2026-11-25T200551Z.json", tmp_path / RECORD)
    page, _ = write_report(tmp_path, EXPERIMENTS)
    assert "The profile's source: The hierarchical framework paper" in html.unescape(page.read_text())


async def test_names_and_texts_of_a_record_are_no_markup_and_no_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    evil = "<script>alert(1)</script>"
    folder = tmp_path / os.fsdecode(b"a<b>&'\"\xff")
    folder.mkdir()
    record = json.loads((RECORDS / "table1-2026-11-25T200138Z.json").read_text())
    for point in record["points"]:
        point["network"] = f"$\\frac{{$ {evil}|\n"
    record["config"]["profile"]["name"] = evil
    record["notes"] = [f"{evil} `<b>` \ud800"]
    record["command"] += [evil, "`"]
    (folder / RECORD).write_text(json.dumps(record))
    page, warnings = write_report(tmp_path, EXPERIMENTS)
    assert warnings == []
    text = page.read_text()
    assert "<script" not in text
    assert "<b>" not in text
    assert "<code>&lt;b&gt;</code> \\ud800" in text
    assert "(a&lt;b&gt;&amp;&#x27;&quot;\\udcff)" in text
    table = (folder / "table.md").read_text().split("\n\n")[1]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


async def test_the_page_fits_small_and_dark_screens_and_paper(tmp_path: Path) -> None:
    await table3(tmp_path / "table3")
    page, _ = write_report(tmp_path, EXPERIMENTS)
    text = page.read_text()
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert "@media print" in text
    assert text.count("<thead><tr><th") == 1  # so that each sheet of paper has the headings
    assert "<code>" in text
    assert "`" not in text


async def test_the_page_names_what_is_not_on_it(tmp_path: Path) -> None:
    await table3(tmp_path / "table3")
    (tmp_path / "table2-2030-01-01T010203Z.json").write_text("{")
    shutil.copyfile(next(RECORDS.glob("privacy-audit-*.json")), tmp_path / "privacy-audit-2030-01-01T010203Z.json")
    page, warnings = write_report(tmp_path, EXPERIMENTS)
    listed = page.read_text().partition('<h2 id="left-out">')[2]
    assert len(warnings) == listed.count("<li>") == 2
    assert "table2-2030-01-01T010203Z.json is not a whole record" in listed
    assert "made by <code>terrace privacy audit</code>" in listed


def test_records_that_are_all_damaged_make_no_page(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"table2-2030-01-0{number}T010203Z.json").write_text("{")
    with pytest.raises(
        SetupError, match=r"none of the 2 records in .* can be used; of the first one: .*01T010203Z.json"
    ):
        write_report(tmp_path, EXPERIMENTS)
    assert not (tmp_path / REPORT).exists()


async def test_a_page_without_room_leaves_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await table3(tmp_path / "table3")
    await table3(tmp_path / "table3-2")
    page, _ = write_report(tmp_path, EXPERIMENTS)
    before = page.read_bytes()

    def no_room(path: Path, content: bytes) -> None:
        raise SetupError(f"cannot write {path}: No space left on device") from OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr("experiments.harness.write_atomically", no_room)
    with pytest.raises(SetupError, match=r"cannot write .*table\.md"):
        write_report(tmp_path, EXPERIMENTS)
    assert page.read_bytes() == before


async def test_a_run_folder_that_is_read_only_is_on_the_page_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await table3(tmp_path / "table3")

    def forbidden(path: Path, content: bytes) -> None:
        raise SetupError(f"cannot write {path}: Permission denied") from PermissionError(
            errno.EACCES, "Permission denied"
        )

    monkeypatch.setattr("experiments.harness.write_atomically", forbidden)
    page, (warning,) = write_report(tmp_path, EXPERIMENTS)
    assert warning == f"cannot write {tmp_path / 'table3' / 'table.md'}: Permission denied"
    assert '<h2 id="run-1">table3: ' in page.read_text()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
async def test_a_pipe_that_is_called_as_a_record_is_not_waited_for(tmp_path: Path) -> None:
    await table3(tmp_path / "table3")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / RECORD)
    assert write_report(tmp_path, EXPERIMENTS)[1] == []


def test_a_half_written_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text('{"experiment": "ta')
    with pytest.raises(SetupError, match="is not a whole record"):
        write_report(tmp_path, EXPERIMENTS)


async def test_a_half_written_record_does_not_keep_the_others_from_the_page(tmp_path: Path) -> None:
    await table3(tmp_path / "table3")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / RECORD).write_text('{"experiment": "ta')
    page, (warning,) = write_report(tmp_path, EXPERIMENTS)
    assert "is not a whole record" in warning
    assert '<h2 id="run-1">table3: ' in page.read_text()


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no record of an experiment"):
        write_report(tmp_path, EXPERIMENTS)


def test_every_experiment_has_a_name_of_its_own() -> None:
    assert [name for name, experiment in EXPERIMENTS.items() if experiment.name != name] == []
