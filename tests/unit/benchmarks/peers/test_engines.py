"""The rows of `engines` from a record."""

from typing import Any

from benchmarks.peers.engines import ENGINES


def _round(number: int, engine: str, *, start_s: float, p50_ms: float) -> dict[str, Any]:
    loads = [
        {"batch": batch, "concurrency": at_once, "p50_ms": p50_ms * batch, "images_per_s": 1000 / p50_ms}
        for batch, at_once in ((1, 1), (50, 1), (50, 6))
    ]
    return {"round": number, "engine": engine, "cold_start_s": start_s, "peak_memory_bytes": 2**20, "loads": loads}


def test_figures_are_medians_of_the_rounds_and_a_failure_is_told() -> None:
    points = [_round(number, "onnx", start_s=start_s, p50_ms=2.0) for number, start_s in enumerate((1.0, 9.0, 2.0))]
    record = {"points": [*points, {"round": 0, "engine": "ray: 1 replica", "failure": "no Ray"}]}
    onnx, ray = ENGINES.rows(record)
    assert (onnx["rounds"], onnx["cold_start_s"], onnx["failure"]) == (3, 2.0, "")
    assert [load["p50_ms"] for load in onnx["loads"]] == [2.0, 100.0, 100.0]
    assert (ray["rounds"], ray["cold_start_s"], ray["failure"]) == (0, None, "no Ray")
    cells = list(ENGINES.table(record).rows)
    assert cells[0] == ["onnx", "2.0", "1", "2.0", "100.0", "500", "3"]
    assert cells[1][:2] == ["ray: 1 replica", "unmeasured: no Ray"]
