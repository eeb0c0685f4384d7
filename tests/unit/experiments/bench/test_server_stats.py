"""Deltas of the statistics extension."""

import json
from typing import Any

import pytest

from experiments.bench.server_stats import read_counters, server_times


def body(requests: int, queue_ns: int, infer_ns: int, *, images: int = 0, executions: int = 0) -> bytes:
    zero = {"count": requests, "ns": 0}
    stats: dict[str, Any] = {
        "success": zero,
        "queue": {"count": requests, "ns": queue_ns},
        "compute_input": zero,
        "compute_infer": {"count": requests, "ns": infer_ns},
        "compute_output": zero,
    }
    entry = {"name": "m", "inference_count": images, "execution_count": executions, "inference_stats": stats}
    return json.dumps({"model_stats": [entry]}).encode()


def test_means_are_of_what_happened_between_two_looks() -> None:
    before = read_counters(body(10, 5_000_000, 40_000_000, images=100, executions=10))
    after = read_counters(body(14, 9_000_000, 60_000_000, images=148, executions=12))
    assert before is not None
    assert after is not None
    times = server_times(before, after)
    assert times is not None
    assert times.queue_ms == pytest.approx(1.0)
    assert times.compute_infer_ms == pytest.approx(5.0)
    assert times.total_ms == pytest.approx(6.0)
    assert times.batch_images == pytest.approx(24.0)


def test_nothing_in_between_and_a_restart_give_no_figures() -> None:
    low, high = read_counters(body(1, 10, 10)), read_counters(body(5, 90, 90))
    assert low is not None
    assert high is not None
    assert server_times(low, low) is None
    assert server_times(high, low) is None


def test_versions_of_a_model_are_added_up() -> None:
    entries = json.loads(body(1, 10, 20))["model_stats"] + json.loads(body(2, 30, 40))["model_stats"]
    counters = read_counters(json.dumps({"model_stats": entries}).encode())
    assert counters is not None
    assert (counters["queue"], counters["queue_count"], counters["compute_infer"]) == (40, 3, 60)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"model_stats": [1]}', b'{"model_stats": [{}]}'])
def test_another_answer_is_no_statistics(text: bytes) -> None:
    assert read_counters(text) is None
