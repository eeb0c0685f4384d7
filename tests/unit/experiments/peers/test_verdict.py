"""Targets, judged from records."""

from typing import Any

import pytest

from experiments.peers.verdict import Verdict, verdicts

BATCHES, LONE_BATCH = "batch-50-concurrency-4", "batch-50-concurrency-1"
SINGLES, LONE = "batch-1-concurrency-64", "batch-1-concurrency-1"

OWN = {
    f"{BATCHES}.ratio_to_bare": 0.93,
    f"{LONE_BATCH}.p50_above_bare_ms": 0.8,
    f"{LONE_BATCH}.compute_ms": 6.18,
    f"{LONE_BATCH}.bare_batch_ms": 6.0,
    f"{SINGLES}.images_per_s": 3000.0,
    f"{SINGLES}.p99_ms": 25.0,
    f"{LONE}.p50_ms": 0.6,
}


def record(name: str, singles: list[float], results: dict[str, Any], network: str = "net") -> Any:
    return {
        "config": {
            "contender": name,
            "title": name.title(),
            "network": network,
            "rows": [{"batch": 1, "concurrency": 64}] if singles else [{"batch": 50, "concurrency": 4}],
        },
        "samples": {f"{SINGLES}.images_per_s": singles} if singles else {},
        "results": results,
    }


def missed(found: list[Verdict]) -> list[str]:
    return [f"{one.what} {one.measured}, {one.target}" for one in found if not one.reached]


def test_all_targets_reached() -> None:
    own = record("terrace", [3000.0, 1500.0, 3100.0], OWN)
    # The machine halved its speed in the second round, and both with it.
    peer = record("fastapi", [1900.0, 950.0, 1800.0], {f"{SINGLES}.p99_ms": 80.0})
    found = verdicts([own, peer])
    assert missed(found) == []
    assert [one.measured for one in found] == ["0.93", "0.80", "1.03", "0.60", "1.58", "25.00"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({f"{BATCHES}.ratio_to_bare": 0.89}, "images/s 0.89, at least 0.90 of the bare loop"),
        ({f"{LONE_BATCH}.p50_above_bare_ms": 1.3}, "p50 above the bare batch 1.30, at most 1.20 ms"),
        ({f"{LONE_BATCH}.compute_ms": 6.6}, "inference 1.10, at most 1.05 times the bare session's"),
        ({f"{LONE}.p50_ms": 1.25}, "p50 1.25, at most 1.20 ms"),
        ({f"{SINGLES}.p99_ms": 90.0}, "p99 90.00, at most 80.00 ms (Fastapi's)"),
    ],
)
def test_what_is_missed_is_said(change: dict[str, float], sentence: str) -> None:
    peer = record("fastapi", [1000.0], {f"{SINGLES}.p99_ms": 80.0})
    [found] = missed(verdicts([record("terrace", [3000.0], {**OWN, **change}), peer]))
    assert found.endswith(sentence)


def test_the_best_of_the_other_servers_is_the_one_that_counts() -> None:
    peers = [record("ray", [], {f"{SINGLES}.p99_ms": None}), record("a", [1000.0], {}), record("b", [2500.0], {})]
    for peer in peers[1:]:
        peer["results"][f"{SINGLES}.p99_ms"] = 80.0
    [found] = missed(verdicts([record("terrace", [3000.0], OWN), *peers]))
    assert found.endswith("concurrency 64: images/s 1.20, at least 1.50 times the best other server (B)")


@pytest.mark.parametrize(("ratio", "reached"), [(1.6, True), (1.4, False)])
def test_a_duel_with_the_best_other_server_decides(ratio: float, reached: bool) -> None:
    def duel(title: str, network: str, value: float) -> Any:
        return {
            "config": {"title": title, "network": network},
            "results": {SINGLES: {"ratio": value, "rounds": 40}},
        }

    peers = [record(name, [speed], {f"{SINGLES}.p99_ms": 80.0}) for name, speed in (("a", 1000.0), ("b", 2000.0))]
    duels = [duel("A", "net", 9.0), duel("B", "other", 9.0), duel("B", "net", ratio)]
    found = verdicts([record("terrace", [3000.0], OWN), *peers], duels)
    (one,) = [one for one in found if "best other server" in one.target]
    assert one.measured == f"{ratio:.2f} in a duel of 40 windows; 1.50 in rounds"
    assert one.reached is reached
    (plain,) = [one for one in verdicts([record("terrace", [3000.0], OWN), *peers], duels[:2]) if "best" in one.target]
    assert (plain.measured, plain.reached) == ("1.50", True)


def test_a_large_network_has_a_target_of_its_own() -> None:
    [one] = verdicts([record("terrace", [], {f"{BATCHES}.ratio_to_bare": 0.96}, "large")])
    assert (one.target, one.reached) == ("at least 0.97 of the bare loop", False)


def test_no_figures_no_verdicts() -> None:
    assert (
        verdicts([record("fastapi", [1000.0], {}), record("terrace", [], {"unmeasured": "it did not start"}, "large")])
        == []
    )
