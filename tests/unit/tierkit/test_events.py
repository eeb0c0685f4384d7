"""Lines of an answer stream, and what is none."""

import json
from typing import Any

import pytest

from tierkit.wire.events import CoarseEvent, FallbackEvent, Sent, read_event, read_sent, written

COARSE: dict[str, Any] = {
    "event": "coarse",
    "task_id": "t",
    "node_id": "end-1",
    "model": "m",
    "labels": [1],
    "confidences": [0.5],
    "queue_ms": 0.0,
    "compute_ms": 1.0,
}
FALLBACK: dict[str, Any] = {"event": "fallback", "task_id": "t", "reason": "deadline", "detail": "late", "tried": []}
SENT: dict[str, Any] = {"form": "pixels", "upload_bytes": 3072}


def test_what_is_written_is_read() -> None:
    event = read_event(json.dumps(COARSE))
    assert isinstance(event, CoarseEvent)
    assert (event.event, event.batch_images, event.unsure) == ("coarse", None, None)
    assert read_event(written(event).decode()) == event
    fallback = read_event(json.dumps(FALLBACK))
    assert isinstance(fallback, FallbackEvent)
    assert fallback.reason == "deadline"
    assert read_sent(json.dumps(SENT)) == Sent(form="pixels", upload_bytes=3072)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        json.dumps({**COARSE, "event": "x"}),
        json.dumps({**COARSE, "more": 1}),
        json.dumps({**COARSE, "labels": [-1]}),
        json.dumps({**COARSE, "labels": [10**30]}),
        json.dumps({**COARSE, "labels": ["1"]}),
        json.dumps({**COARSE, "confidences": [1.5]}),
        json.dumps({**COARSE, "confidences": [float("nan")]}),
        json.dumps({**COARSE, "compute_ms": 1.7e308}),
        json.dumps({**COARSE, "compute_ms": -1}),
        json.dumps({**COARSE, "batch_images": 10**400}),
        json.dumps({**COARSE, "task_id": "t" * 129}),
        json.dumps({**COARSE, "model": "m" * 121}),
        json.dumps({**FALLBACK, "detail": "d" * 20_000}),
        json.dumps({**FALLBACK, "tried": ["no node"]}),
        json.dumps({**FALLBACK, "tried": ["edge-1\n"]}),
        json.dumps({**FALLBACK, "reason": "because"}),
        '{"event": ' + "[" * 100_000,
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + ', "event": "coarse"}',
        '{"a":' * 40_000,
    ],
)
def test_what_is_no_line_of_an_answer_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_event(line)


@pytest.mark.parametrize(
    "change", [{"upload_bytes": 10**4000}, {"encode_ms": 1.7e308}, {"relay_bytes": 2**51}, {"form": "f" * 33}]
)
def test_sums_of_what_was_sent_stay_numbers(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\$"):
        read_sent(json.dumps({**SENT, **change}))
