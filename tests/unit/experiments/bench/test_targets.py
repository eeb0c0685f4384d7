"""Which answers are good ones."""

import pytest

from experiments.bench.http import Reply
from experiments.bench.targets import judge_lines, judge_status


@pytest.mark.parametrize(("status", "outcome"), [(200, "ok"), (503, "503"), (404, "404")])
def test_plain_answers_are_judged_by_their_status(status: int, outcome: str) -> None:
    assert judge_status(Reply(status=status)) == outcome


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b'{"event": "coarse"}\n{"event": "fine"}\n', "ok"),
        (b'{"event":"coarse"}\n{"event":"fallback"}\n{"event":"done"}\n', "fallback"),
        (b'{"event": "coarse"}\n{"event": "error"}\n', "error event"),
        (b'{"event": "coarse"}\n{"event": "failed"}\n', "error event"),
        (b'{"event": "coarse"}\n', "ok"),
        (b"", "no coarse answer"),
        (b'{"event": "coa', "unreadable answer"),
        (b"[]\n", "unreadable answer"),
    ],
)
def test_streamed_answers_are_judged_by_their_events(body: bytes, outcome: str) -> None:
    assert judge_lines(Reply(status=200, chunks=[body])) == outcome
    assert judge_lines(Reply(status=503, chunks=[body])) == "503"
