"""What a log line holds, in both forms."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest

from tierkit import logs
from tierkit.wire.trace import Trace

log = logging.getLogger("tierkit.somewhere")


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def configured(style: Literal["text", "json"], level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level, style, node_id="end-1", stream=stream)
    return stream


def test_json_has_one_object_a_line_with_request_and_extras() -> None:
    stream = configured("json")
    with logs.request_context("r-1", Trace("1" * 32, "2" * 16)):
        log.info("line\nbreak", extra={"lease_s": 2.0, "where": {"a"}})
    log.warning("outside")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "line\nbreak"
    assert (first["level"], first["logger"], first["node_id"], first["request_id"]) == (
        "info",
        "tierkit.somewhere",
        "end-1",
        "r-1",
    )
    assert first["lease_s"] == 2.0
    assert first["where"] == "{'a'}"
    assert first["time"].endswith("Z")
    assert first["trace_id"] == "1" * 32
    assert not {"request_id", "trace_id"} & set(second)


def test_text_keeps_a_record_on_one_line() -> None:
    stream = configured("text")
    with logs.request_context("r-1"):
        log.info("forged\n12:00:00 ERROR", extra={"lease_s": 2.0})
    (line,) = stream.getvalue().splitlines()
    assert "INFO" in line
    assert line.endswith("end-1 forged\\n12:00:00 ERROR lease_s=2.0 [r-1]")


def test_control_characters_do_not_reach_the_terminal() -> None:
    stream = configured("text")
    try:
        raise ValueError("\x9b2J")
    except ValueError:
        log.exception("\x1b[2Jgone", extra={"name_of_job": "\x07"})
    text = stream.getvalue()
    assert "\\u001b[2Jgone name_of_job=\\u0007" in text
    assert text.endswith("ValueError: \\u009b2J\n")


@pytest.mark.parametrize("style", ["text", "json"])
def test_tracebacks_are_kept(style: Literal["text", "json"]) -> None:
    stream = configured(style)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("it broke")
    assert "ZeroDivisionError" in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()


def test_chatty_libraries_are_quiet() -> None:
    stream = configured("text", level="debug")
    logging.getLogger("httpx").info("HTTP Request: GET http://...")
    logging.getLogger("uvicorn.error").info("Started server process")
    log.debug("ours")
    assert len(stream.getvalue().splitlines()) == 1
