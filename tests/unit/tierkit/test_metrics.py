"""What is counted of batches and requests."""

from prometheus_client import REGISTRY

from tierkit.errors import Overloaded
from tierkit.inference.metrics import ModelMetrics
from tierkit.inference.statistics import BatchRecord, ModelRun, ModelStatistics

RECORD = BatchRecord(
    queue_s=(0.1, 0.2), input_s=0.0, runs=(ModelRun(3, 0.5),), output_s=0.0, images=3, infer_s=0.5, compute_s=0.5
)


def test_metrics_hold_everything_that_was_observed() -> None:
    metrics = ModelMetrics("end", "counted", "0" * 64)
    for _ in range(5):
        metrics.observe_batch(RECORD)
        metrics.observe_request(0.7, 1000, None)
    metrics.observe_request(0.7, 1000, Overloaded("full"))
    labels = {"tier": "end", "model": "counted"}

    def value(name: str, **more: str) -> float | None:
        return REGISTRY.get_sample_value(name, labels | more)

    assert value("terrace_batch_size_sum") == 15
    assert value("terrace_compute_duration_seconds_count") == 5
    assert value("terrace_queue_duration_seconds_count") == 10
    assert value("terrace_upload_bytes_total") == 6000
    assert value("terrace_request_duration_seconds_count", outcome="ok") == 5
    assert value("terrace_request_duration_seconds_count", outcome="unavailable") == 1


def test_statistics_hold_every_batch() -> None:
    statistics = ModelStatistics()
    for _ in range(5):
        statistics.add_batch(RECORD)
    statistics.add_failure(0.25)
    assert statistics.images == 15
    told = statistics.as_json()
    assert (told["inference_count"], told["execution_count"]) == (15, 5)
    assert told["inference_stats"]["success"] == {"count": 10, "ns": 6_500_000_000}
    assert told["inference_stats"]["compute_infer"] == {"count": 10, "ns": 5_000_000_000}
    assert told["inference_stats"]["fail"] == {"count": 1, "ns": 250_000_000}
    assert told["batch_stats"][0]["batch_size"] == 3
    assert told["batch_stats"][0]["compute_infer"] == {"count": 5, "ns": 2_500_000_000}
