"""What is counted late is there when somebody looks."""

import pytest
from prometheus_client import REGISTRY, generate_latest

from tierkit.inference.statistics import BatchRecord, ModelRun, ModelStatistics
from tierkit.metrics import ModelMetrics

RECORD = BatchRecord(queue_s=(0.1, 0.2), input_s=0.0, runs=(ModelRun(3, 0.5),), output_s=0.0)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_metrics_hold_everything_that_was_observed(count: int) -> None:
    metrics = ModelMetrics("end", f"counted-{count}")
    for _ in range(count):
        metrics.observe_batch(RECORD)
        metrics.observe_request(0.7, 1000, None)
    labels = {"tier": "end", "model": f"counted-{count}"}
    wanted = {
        "terrace_batch_size_sum": 3 * count,
        "terrace_compute_duration_seconds_count": count,
        "terrace_queue_duration_seconds_count": 2 * count,
        "terrace_upload_bytes_total": 1000 * count,
    }
    assert {name: REGISTRY.get_sample_value(name, labels) for name in wanted} == wanted
    metrics.observe_request(0.7, 1000, None)
    answered = (
        f'terrace_request_duration_seconds_count{{model="counted-{count}",outcome="ok",tier="end"}} {count + 1}.0'
    )
    assert answered in generate_latest().decode()


def test_statistics_hold_every_batch() -> None:
    statistics = ModelStatistics()
    for count in range(1, 200):
        statistics.add_batch(RECORD)
        if count in (1, 64, 65, 199):
            assert statistics.images == 3 * count
            told = statistics.as_json()
            assert (told["inference_count"], told["execution_count"]) == (3 * count, count)
            assert told["inference_stats"]["success"]["count"] == 2 * count
