"""The page of all runs, from records alone."""

from pathlib import Path

import pytest

from experiments.catalog import EXPERIMENTS
from experiments.harness import RECORD, Request, execute
from experiments.profile import read_profile
from experiments.report import REPORT, write_report
from tierkit.errors import InvalidInput, SetupError

REQUEST = Request(profile_name="native", profile=read_profile("native"))


async def table3(folder: Path) -> Path:
    return (await execute(EXPERIMENTS["table3"], REQUEST, folder, lambda *words: None)).folder


async def test_one_page_without_other_files(tmp_path: Path) -> None:
    run = await table3(tmp_path / "table3")
    (run / "curve.svg").write_text("<svg/>")
    page, warnings = write_report(tmp_path, EXPERIMENTS)
    assert (page, warnings) == (tmp_path / REPORT, [])
    text = page.read_text()
    assert "<h2>table3: " in text
    assert "<td>9,472</td>" in text
    assert 'src="data:image/svg+xml;base64,' in text
    assert "http://" not in text
    assert "This run is" not in text


async def test_a_run_that_is_not_whole_says_so(tmp_path: Path) -> None:
    record = await table3(tmp_path / "table3") / RECORD
    record.write_text(record.read_text().replace('"state": "complete"', '"state": "interrupted"'))
    page, _ = write_report(tmp_path, EXPERIMENTS)
    assert "This run is interrupted." in page.read_text()


async def test_a_record_of_an_unknown_experiment_is_told_of(tmp_path: Path) -> None:
    record = await table3(tmp_path / "old") / RECORD
    record.write_text(record.read_text().replace('"experiment": "table3"', '"experiment": "table9"'))
    _, warnings = write_report(tmp_path, EXPERIMENTS)
    assert len(warnings) == 1
    assert "there is no experiment 'table9'" in warnings[0]


def test_a_half_written_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text('{"experiment": "ta')
    with pytest.raises(SetupError, match="is no whole record"):
        write_report(tmp_path, EXPERIMENTS)


async def test_a_half_written_record_does_not_keep_the_others_from_the_page(tmp_path: Path) -> None:
    await table3(tmp_path / "table3")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / RECORD).write_text('{"experiment": "ta')
    page, (warning,) = write_report(tmp_path, EXPERIMENTS)
    assert "is no whole record" in warning
    assert "<h2>table3: " in page.read_text()


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"there is no {RECORD}"):
        write_report(tmp_path, EXPERIMENTS)


def test_every_experiment_has_a_name_of_its_own() -> None:
    assert [name for name, experiment in EXPERIMENTS.items() if experiment.name != name] == []
