"""Medians and ratios by hand."""

import pytest

from experiments.peers.rows import Measurement, RowFigures, derive, rows_for


def figures(images_per_s: float, bare: float, *, p50_ms: float = 8.0, compute_ms: float | None = None) -> RowFigures:
    return RowFigures(
        images_per_s=images_per_s,
        bare_images_per_s=bare,
        p50_ms=p50_ms,
        p99_ms=20.0,
        bare_batch_ms=7.0,
        compute_ms=compute_ms,
        cpu_us_per_image=300.0,
        batch_images=None,
        generator_cpu=0.1,
    )


def test_a_ratio_is_taken_within_its_visit() -> None:
    # The machine halves its speed in the second measurement; the server keeps its share.
    measurements = [
        Measurement(cold_start_s=3.0, peak_memory_bytes=100, rows={"row": figures(90.0, 100.0)}),
        Measurement(cold_start_s=1.0, peak_memory_bytes=300, rows={"row": figures(46.0, 50.0)}),
        Measurement(cold_start_s=2.0, peak_memory_bytes=200, rows={"row": figures(80.0, 100.0)}),
    ]
    samples, medians = derive(measurements)
    assert samples["row.ratio_to_bare"] == pytest.approx([0.9, 0.92, 0.8])
    assert medians["row.ratio_to_bare"] == pytest.approx(0.9)
    assert medians["row.images_per_s"] == 80.0
    assert medians["row.p50_above_bare_ms"] == pytest.approx(1.0)
    assert (medians["cold_start_s"], medians["peak_memory_bytes"]) == (2.0, 200.0)


def test_figures_that_a_server_does_not_give_are_absent() -> None:
    samples, medians = derive([Measurement(cold_start_s=1.0, rows={"row": figures(1.0, 1.0)})])
    assert "row.compute_ms" not in samples
    assert "row.compute_ms" not in medians
    samples, _ = derive([Measurement(cold_start_s=1.0, rows={"row": figures(1.0, 1.0, compute_ms=5.0)})])
    assert samples["row.compute_ms"] == [5.0]


def test_a_row_that_failed_once_has_the_samples_of_the_other_visits() -> None:
    failed = Measurement(cold_start_s=1.0, failures={"row": "not answered: 3 x 503"})
    samples, medians = derive([failed, Measurement(cold_start_s=1.0, rows={"row": figures(10.0, 20.0)})])
    assert samples["row.images_per_s"] == [10.0]
    assert medians["row.ratio_to_bare"] == 0.5


def test_without_visits_there_is_nothing() -> None:
    assert derive([])[1] == {}


def test_the_rows_that_the_comparison_promises() -> None:
    rows = [(row.batch, row.concurrency) for row in rows_for(everything=True)]
    assert rows == [(50, 4), (50, 1), (1, 64), (1, 1)]
    assert [(row.batch, row.concurrency) for row in rows_for(everything=False)] == [(50, 4), (50, 1)]
