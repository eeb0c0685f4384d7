"""Logs of several services as one stream that a person can read."""

import json

from terrace.loglines import LogPainter

PAINTER = LogPainter({"scheduler": "scheduler", "end-1": "end"})
RECORD = {"time": "2030-01-02T03:04:05.678Z", "level": "warning", "logger": "x", "message": "gone", "node_id": "end-1"}


def test_a_record_shows_who_what_and_the_facts() -> None:
    text = PAINTER.paint("end-1", json.dumps({**RECORD, "after_s": 1.5}))
    assert text.plain.endswith(" end-1     gone after_s=1.5")
    assert {str(span.style): text.plain[span.start : span.end].strip() for span in text.spans}["yellow"] == "gone"


def test_times_are_utc_and_say_so() -> None:
    east = {**RECORD, "time": "2030-01-02T03:04:05.678+02:00"}
    assert PAINTER.paint("end-1", json.dumps(east)).plain.startswith("01:04:05Z ")
    assert PAINTER.paint("end-1", "no record").plain[8:10] == "Z "


def test_names_stand_in_columns() -> None:
    plain = [PAINTER.paint(name, json.dumps(RECORD)).plain for name in ("end-1", "scheduler")]
    assert len({line.index("gone") for line in plain}) == 1


def test_an_exception_follows_its_record() -> None:
    text = PAINTER.paint("end-1", json.dumps({**RECORD, "exception": "Traceback\n  ValueError"}))
    assert text.plain.endswith("gone\nTraceback\n  ValueError")


def test_lines_that_are_no_records_are_kept_as_they_are() -> None:
    for line in ("Segmentation fault", "[1, 2]", '{"other": 1}', "[red]not markup[/red]"):
        assert PAINTER.paint("end-1", line).plain.endswith(line)
