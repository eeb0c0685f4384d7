"""Figures against tables worked out by hand."""

import math

import pytest

from experiments.bench.summary import FALLBACK, OK, Sample, Window, percentile, summarise


def answered(due: float, done: float, *, outcome: str = OK, sent: float | None = None) -> Sample:
    return Sample(due, due if sent is None else sent, done, done, outcome)


@pytest.mark.parametrize(
    ("percent", "value"),
    [(50, 50), (90, 90), (99, 99), (100, 100), (1, 1), (0.1, 1), (99.5, 100)],
)
def test_nearest_rank_of_one_to_a_hundred(percent: float, value: float) -> None:
    assert percentile([float(number) for number in range(1, 101)], percent) == value


def test_a_percentile_of_a_round_number_is_not_a_rank_too_far() -> None:
    # 99.9 / 100 * 1000 is 999.0000000000001 in floating point.
    assert percentile([float(number) for number in range(1, 1001)], 99.9) == 999


def test_percentile_of_one_value_is_that_value() -> None:
    assert [percentile([7.0], percent) for percent in (1, 50, 100)] == [7.0] * 3


def test_a_closed_loop_counts_what_finished_in_the_window() -> None:
    samples = [
        answered(0.5, 0.9),  # warm-up
        answered(0.8, 1.0),  # 200 ms; finishes as the window begins
        answered(1.5, 1.6),  # 100 ms
        answered(2.9, 3.0),  # finishes as the window ends: outside
    ]
    summary = summarise(samples, Window(1.0, 3.0), images=50, open_loop=False)
    assert summary.requests == summary.answered == 2
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.images_per_s == pytest.approx(50.0)
    assert summary.latency_ms["mean"] == pytest.approx(150.0)
    assert summary.latency_ms["p50"] == pytest.approx(100.0)
    assert summary.latency_ms["p99"] == pytest.approx(200.0)
    assert summary.offered_per_s is None


def test_an_open_loop_charges_a_stall_to_every_request_that_was_due_in_it() -> None:
    # Due every 100 ms; the server stalls from 1.0 to 2.0 and then answers all that waited. A closed loop with one
    # client would have seen a single slow request.
    samples = [answered(1.0 + number / 10, 2.0) for number in range(10)]
    summary = summarise(samples, Window(1.0, 2.0), images=1, open_loop=True)
    assert summary.requests == 10
    assert summary.offered_per_s == pytest.approx(10.0)
    assert summary.latency_ms["mean"] == pytest.approx(550.0)
    assert summary.latency_ms["p50"] == pytest.approx(500.0)
    assert summary.latency_ms["p99"] == pytest.approx(1000.0)
    assert summary.requests_per_s == 0.0  # none of them finished in time


def test_throughput_of_an_open_loop_is_what_finished_whenever_it_was_due() -> None:
    samples = [answered(0.2, 1.5), answered(1.2, 2.5)]
    summary = summarise(samples, Window(1.0, 2.0), images=1, open_loop=True)
    assert summary.requests_per_s == pytest.approx(1.0)
    assert summary.latency_ms["p50"] == pytest.approx(1300.0)  # of the second, which was due in the window


def test_errors_are_counted_by_kind_and_are_no_latency() -> None:
    samples = [
        answered(1.0, 1.1),
        answered(1.0, 1.001, outcome="503"),
        answered(1.0, 1.001, outcome="503"),
        answered(1.0, 1.9, outcome="timeout"),
    ]
    summary = summarise(samples, Window(1.0, 2.0), images=1, open_loop=True)
    assert summary.errors == {"503": 2, "timeout": 1}
    assert (summary.requests, summary.answered) == (4, 1)
    assert summary.latency_ms["p99"] == pytest.approx(100.0)
    assert summary.requests_per_s == pytest.approx(1.0)


def test_fallbacks_are_answers_and_are_counted() -> None:
    summary = summarise(
        [answered(1.0, 1.1), answered(1.0, 1.2, outcome=FALLBACK)], Window(1.0, 2.0), images=1, open_loop=True
    )
    assert (summary.answered, summary.fallbacks, dict(summary.errors)) == (2, 1, {})


@pytest.mark.parametrize(("deadline_s", "goodput"), [(0.05, 0.0), (0.1, 30.0), (0.25, 60.0), (math.inf, 60.0)])
def test_goodput_counts_images_within_the_deadline(deadline_s: float, goodput: float) -> None:
    samples = [answered(1.0, 1.0625), answered(1.0, 1.1875)]
    summary = summarise(samples, Window(1.0, 2.0), images=30, open_loop=True, deadline_s=deadline_s)
    assert summary.goodput_images_per_s == pytest.approx(goodput)


def test_without_answers_there_are_no_latencies() -> None:
    summary = summarise([], Window(0.0, 1.0), images=1, open_loop=False)
    assert summary.latency_ms == dict.fromkeys(["mean", "p50", "p90", "p95", "p99", "p99.9"])
    assert summary.send_ms is None
    assert summary.images_per_s == 0.0


def test_send_time_is_the_wait_before_a_request_was_on_its_way() -> None:
    samples = [answered(1.0, 1.5, sent=1.25), answered(1.0, 1.5, sent=1.0)]
    summary = summarise(samples, Window(1.0, 2.0), images=1, open_loop=True)
    assert summary.send_ms == pytest.approx(125.0)


def test_time_to_the_first_part_of_an_answer() -> None:
    samples = [Sample(1.0, 1.0, 1.125, 1.5, OK)]
    summary = summarise(samples, Window(1.0, 2.0), images=1, open_loop=False)
    assert summary.first_ms["p50"] == pytest.approx(125.0)
    assert summary.latency_ms["p50"] == pytest.approx(500.0)
