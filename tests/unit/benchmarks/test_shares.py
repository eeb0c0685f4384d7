"""Verdicts on the shares of two schedulers."""

from benchmarks.shares import missed


def test_the_targets() -> None:
    assert missed({"share": 0.48, "flooded": True}) == []
    assert missed({"share": 0.41, "flooded": True}) == ["it keeps 0.41 of the throughput, below 0.45"]
    assert missed({"share": 0.5, "flooded": False}) == ["the flood ended too early: use shorter jobs"]
