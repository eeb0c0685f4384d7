"""The tables of training: what is run, how it is judged, and how the rows are shown."""

from collections import Counter
from typing import Any

import pytest

from experiments.training.cases import TABLES, cases, judge, key, p_value, round_s, source_s
from experiments.training.experiment import TRAINING

ROW: dict[str, Any] = {
    "table": "scaling",
    "strategy": "downpour",
    "scaling": "weak",
    "workers": 4,
    "slow": (),
    "faulty": False,
    "seed": 0,
    "accuracy": 0.9,
    "epoch_seconds": 1.0,
    "virtual_seconds": 20.0,
    "timed_epochs": 20,
    "updates": 100,
    "formula_updates": 100,
    "size_bytes": 10,
    "bytes_sent": 1_000,
    "bytes_received": 1_000,
    "faults": 0,
    "twice": 0,
    "missing": 0,
    "step_s": 0.002,
    "serve_s": 0.001,
}


def verdicts(*changes: dict[str, Any]) -> list[tuple[str, bool]]:
    """Of the last of these rows."""
    rows = [{**ROW, **change} for change in changes]
    return [(judged.words, judged.reached) for judged in judge(rows)[key(rows[-1])]]


def test_every_table_has_lines_that_differ() -> None:
    lines = cases()
    assert {line.table for line in lines} == set(TABLES)
    places = Counter(
        (line.table, line.name, line.workers, line.scaling, line.slow, line.faulty, line.cheat, line.stays_s, line.lost)
        for line in lines
    )
    assert set(places.values()) == {1}
    assert {line.table for line in cases(["delay"])} == {"delay"}


@pytest.mark.parametrize(
    ("differences", "p"),
    [([1.0, 1.0, 1.0, 1.0, 1.0], 1 / 32), ([1.0, 2.0, -0.5], 2 / 8), ([-1.0, -1.0], 1.0), ([0.0, 0.0], 1.0)],
)
def test_p_is_the_share_of_signs_with_a_mean_as_large(differences: list[float], p: float) -> None:
    assert p_value(differences) == pytest.approx(p)


@pytest.mark.parametrize(("seconds", "reached"), [(1.014, True), (1.0141, False)])
def test_twelve_workers_take_hardly_longer_than_four(seconds: float, reached: bool) -> None:
    ((words, found),) = verdicts({}, {"workers": 12, "epoch_seconds": seconds})
    assert (words.startswith("1.014 of 4 workers"), found) == (True, reached)
    ((words, found),) = verdicts({"workers": 3}, {"workers": 11, "epoch_seconds": seconds})
    assert (words.startswith("1.014 of 3 workers"), found) == (True, reached)
    assert verdicts({"scaling": "strong"}, {"scaling": "strong", "workers": 12, "epoch_seconds": 9.0}) == []


@pytest.mark.parametrize(("seconds", "reached"), [(1.03, True), (1.031, False)])
def test_compensation_takes_hardly_longer_than_downpour(seconds: float, reached: bool) -> None:
    found = verdicts({}, {"strategy": "dc-adaptive", "epoch_seconds": seconds})
    assert [each for _, each in found] == [reached]


@pytest.mark.parametrize(
    ("gains", "reached"), [([0.01] * 5, True), ([0.01] * 4, False), ([0.01, 0.02, 0.03, 0.04, -0.001], False)]
)
def test_a_gain_counts_seed_by_seed(gains: list[float], reached: bool) -> None:
    delay = {"table": "delay", "scaling": "strong", "workers": 8}
    before = [{**delay, "strategy": "sgd", "seed": seed, "accuracy": seed / 10} for seed in range(5)]
    after = [
        {**delay, "strategy": "adagrad", "seed": seed, "accuracy": seed / 10 + gain} for seed, gain in enumerate(gains)
    ]
    ((words, found),) = verdicts(*before, *after)
    assert ("points to sgd" in words, found) == (True, reached)


def test_a_slow_worker_is_held_against_none_and_against_the_formula() -> None:
    slow = {"table": "slow-worker", "scaling": "strong", "workers": 8, "timed_epochs": 1}
    quiet = {**slow, "strategy": "asynchronous"}
    for seconds, reached in ((1.15, True), (1.16, False)):
        found = verdicts(quiet, {**quiet, "slow": (4.0,), "epoch_seconds": seconds})
        assert [each for _, each in found] == [reached]
    # Two rounds of eight with the slow worker, and a last one of four without it.
    slow_s, quick_s = (
        round_s(workers=8, steps=20, step_s=step_s, serve_s=0.001, transfer_s=0.0002 + 10 / 125e6, delay_s=0.0002)
        for step_s in (0.008, 0.002)
    )
    whole_s = 2 * slow_s + quick_s
    for seconds, reached in ((whole_s, True), (1.06 * whole_s, False)):
        late = {**slow, "strategy": "synchronous", "slow": (4.0,), "updates": 20, "epoch_seconds": seconds}
        assert [each for _, each in verdicts(late)] == [reached]


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        ({}, [True, True, True]),
        ({"bytes_sent": 21}, [False, True, True]),
        ({"updates": 3}, [False, True, True]),
        ({"accuracy": 0.889}, [True, True, False]),
    ],
)
def test_diloco_sends_a_fortieth_and_loses_no_point(change: dict[str, Any], reached: list[bool]) -> None:
    table = {"table": "bytes", "scaling": "strong"}
    few = {"updates": 2, "formula_updates": 2, "bytes_sent": 20, "bytes_received": 20}
    found = verdicts({**table, "strategy": "each step"}, {**table, "strategy": "diloco", **few, **change})
    assert [each for _, each in found] == reached


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        ({}, [True, True]),
        ({"twice": 1}, [False, True]),
        ({"missing": 1}, [False, True]),
        ({"accuracy": 0.88}, [True, False]),
    ],
)
def test_faults_lose_nothing_and_apply_nothing_twice(change: dict[str, Any], reached: list[bool]) -> None:
    table = {"table": "faults", "scaling": "strong"}
    found = verdicts(table, {**table, "faulty": True, "faults": 100, **change})
    assert [each for _, each in found] == reached


@pytest.mark.parametrize(("accuracy", "reached"), [(0.855, True), (0.85, False)])
def test_a_robust_rule_is_held_against_the_mean_without_cheaters(accuracy: float, reached: bool) -> None:
    table = {"table": "cheating", "scaling": "strong", "workers": 10, "cheaters": 3, "quarantined": ["w7", "w8"]}
    calm = {**table, "strategy": "fedavg", "cheat": None}
    robust = {**table, "strategy": "fedavg, median", "cheat": "noise", "accuracy": accuracy}
    assert [found for _, found in verdicts(calm, robust)] == [reached]
    assert verdicts(calm, {**calm, "cheat": "noise", "accuracy": 0.1}) == []
    assert verdicts(robust) == []


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        ({"epoch_seconds": 1.3, "accuracy": 0.8901}, [True, True]),
        ({"epoch_seconds": 1.31}, [False, True]),
        ({"accuracy": 0.889}, [True, False]),
    ],
)
def test_workers_that_come_and_go_cost_little_time_and_no_point(change: dict[str, Any], reached: list[bool]) -> None:
    calm = {"table": "churn", "scaling": "strong", "stays_s": None}
    assert verdicts(calm) == []
    assert [each for _, each in verdicts(calm, {**calm, "stays_s": 20.0, **change})] == reached


def test_gossip_is_held_against_allreduce_and_sends_the_same_with_more_ranks() -> None:
    table = {"table": "exchanges", "scaling": "strong", "spread": 0.02, "step_bytes": 400.0}
    plain, gossip = {**table, "strategy": "allreduce", "accuracy": 0.95}, {**table, "strategy": "gossip"}
    for change, reached in (
        ({"accuracy": 0.9471}, [True, True]),
        ({"accuracy": 0.9469}, [False, True]),
        ({"accuracy": 0.95, "spread": 0.051}, [True, False]),
    ):
        assert [found for _, found in verdicts(plain, {**gossip, **change})] == reached
    for size, same in ((400.0, True), (401.0, False)):
        assert [found for _, found in verdicts(gossip, {**gossip, "workers": 8, "step_bytes": size})] == [same]


@pytest.mark.parametrize(("gains", "reached"), [([0.015, 0.03], True), ([0.014, 0.09], False)])
def test_lineages_that_meet_gain_in_each_seed(gains: list[float], reached: bool) -> None:
    table = {"table": "exchanges", "scaling": "strong"}
    apart = [{**table, "strategy": "lineages apart", "seed": seed, "mean": 0.9} for seed in range(2)]
    met = [{**table, "strategy": "tournament", "seed": seed, "mean": 0.9 + gain} for seed, gain in enumerate(gains)]
    assert [found for _, found in verdicts(*apart, *met)] == [reached]


def test_an_ensemble_is_held_against_its_best_network() -> None:
    table = {"table": "exchanges", "scaling": "strong", "strategy": "ensemble", "best_local": 0.9}
    for combined, accuracy, reached in ((0.9081, 0.9181, [True, True]), (0.9079, 0.9179, [False, False])):
        found = verdicts({**table, "combined": combined, "accuracy": accuracy})
        assert [each for _, each in found] == reached


@pytest.mark.parametrize(("size", "accuracy", "reached"), [(12.0, 0.9, [True, True]), (11.9, 0.88, [False, False])])
def test_factors_are_held_against_the_bytes_of_allreduce(size: float, accuracy: float, reached: list[bool]) -> None:
    wide = {**ROW, "table": "exchanges", "strategy": "allreduce, wide layers", "step_bytes": size}
    found = verdicts(wide, {**wide, "strategy": "factors", "step_bytes": 1.0, "accuracy": accuracy})
    assert [each for _, each in found] == reached
    assert verdicts({**wide, "strategy": "factors"}) == []


@pytest.mark.parametrize(("size", "reached"), [(8_000, True), (7_900, False)])
def test_hybrid_is_held_against_the_bytes_of_allreduce(size: int, reached: bool) -> None:
    found = verdicts({**ROW, "table": "exchanges", "strategy": "hybrid", "allreduce_bytes": size})
    assert [each for _, each in found] == [reached]


def test_the_table_of_shares_has_a_line_for_each_network_and_the_source() -> None:
    point = {
        "network": "net",
        "convolution_macs": 900_000,
        "dense_macs": 100_000,
        "convolution_parameters": 10_000,
        "dense_parameters": 190_000,
    }
    record = {"config": {"quick": False, "only": ["shares"]}, "points": [point]}
    first, second = TRAINING.table(record).rows
    assert first == ["net", "1.00", "90.00", "10.00", "0.20", "5.00", "95.00"]
    assert second[0].startswith("the source")
    assert TRAINING.rows(record) == [point]


def test_the_table_of_a_teacher_compares_each_lesson_with_one_machine() -> None:
    row = {"steps": 40, "bytes_sent": 1_000_000, "bytes_received": 2_000_000, "workers": 4}
    points = [
        {**row, "lesson": "one machine", "workers": 1, "seed": 0, "accuracy": 0.5, "virtual_seconds": 12.0},
        {**row, "lesson": "four workers", "seed": 0, "accuracy": 0.4, "virtual_seconds": 4.0},
        {**row, "lesson": "one machine", "workers": 1, "seed": 1, "accuracy": 0.5, "virtual_seconds": 12.0},
        {**row, "lesson": "four workers", "seed": 1, "accuracy": 0.5, "virtual_seconds": 3.0},
    ]
    record = {"config": {"quick": False, "only": ["teacher"]}, "points": points}
    assert TRAINING.rows(record) == points
    one, four = TRAINING.table(record).rows
    assert one == ["one machine", "1", "2", "50.00", "40", "12.0", "1.00", "3.0"]
    assert four == ["four workers", "4", "2", "45.00", "40", "3.5", "3.50", "3.0"]
    missing = {"config": {"quick": False, "only": ["teacher"]}, "points": points[1:2]}
    assert TRAINING.table(missing).rows[0][6] == "-"


def test_one_table_over_all_strategies() -> None:
    point = {**ROW, "table": "strategies", "scaling": "strong", "slow": [], "bytes_sent": 1e6, "bytes_received": 1e6}
    one = {**point, "strategy": "one process", "workers": 1, "virtual_seconds": 10.0, "real_seconds": 5.0}
    fedavg = {**point, "strategy": "fedavg", "virtual_seconds": 4.0, "real_seconds": 10.0}
    points = [
        one,
        fedavg,
        {**fedavg, "lost": True, "accuracy": 0.89, "virtual_seconds": 5.0},
        {**fedavg, "cheat": "sign-flip", "accuracy": 0.5},
        {**point, "strategy": "allreduce", "epoch_seconds": 2.5, "step_bytes": 1.0},
        {**point, "strategy": "allreduce", "cheat": "sign-flip", "accuracy": None, "diverged": True},
    ]
    table = TRAINING.table({"config": {"quick": False, "only": ["strategies"]}, "points": points})
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [each["strategy"] for each in cells] == ["one process", "fedavg", "allreduce"]
    faster, lost, cheat = "faster than one process?", "a lost worker costs", "a cheat costs"
    assert cells[1][faster] == "virtual: 2.5 times; here: no, one process is 2.0 times as fast"
    assert [each["MB"] for each in cells] == ["2.0", "2.0", "1.0"]
    assert (cells[1][lost], cells[1][cheat]) == ("-1.0 points, +1.00 s", "-40.0 points")
    assert "2.50 s" in cells[2][lost]
    assert "diverge" in cells[2][cheat]


def test_rows_tell_what_was_missed_but_for_quick_runs() -> None:
    points = [{**ROW, "slow": []}, {**ROW, "slow": [], "workers": 12, "epoch_seconds": 2.0, "accuracy": None}]
    record = {"config": {"quick": False, "only": ["scaling"]}, "points": points}
    rows = TRAINING.rows(record)
    assert [len(row["missed"]) for row in rows] == [0, 1]
    assert [row["runs"] for row in rows] == [1, 1]
    assert not any(row["missed"] for row in TRAINING.rows({**record, "config": {"quick": True}}))
    table = TRAINING.table(record)
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [each["accuracy, %"] for each in cells] == ["90.00", "-"]
    assert cells[1]["targets"].startswith("missed: 2.000 of 4 workers")


def test_several_seeds_are_a_mean_and_its_spread() -> None:
    points = [{**ROW, "slow": [], "seed": seed, "accuracy": 0.9 + seed / 100} for seed in range(3)]
    (row,) = TRAINING.table({"config": {"quick": False, "only": ["scaling"]}, "points": points}).rows
    assert row[3:5] == ["3", "91.00 ± 1.00"]


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        ({}, [True, True, True]),
        ({"objective": 0.102}, [False, True, True]),
        ({"objective": 0.15}, [False, False, True]),
        ({"command_bytes": 50_001}, [True, True, False]),
    ],
)
def test_lbfgs_is_held_against_the_best_runs_of_gradient_descent(change: dict[str, Any], reached: list[bool]) -> None:
    table = {"table": "second-order", "scaling": "strong", "rate": 0.8, "runs_of_grid": 5}
    descent = {**table, "strategy": "gradient descent", "workers": 1, "objective": 0.61, "momentum": 0.0}
    nesterov = {**table, "strategy": "Nesterov", "workers": 1, "objective": 0.31, "momentum": 0.9}
    assert verdicts(nesterov) == [("loss 0.3100, the lowest of 5 runs: rate 0.8, momentum 0.9", True)]
    lbfgs = {**table, "strategy": "lbfgs", "objective": 0.1, "command_bytes": 50_000, **change}
    assert [found for _, found in verdicts(descent, nesterov, lbfgs)] == reached


@pytest.mark.parametrize(
    ("seconds", "objective", "reached"),
    [(1.2, 0.1, [True, True]), (1.21, 0.1, [False, True]), (1.0, 0.2, [True, False])],
)
def test_a_slow_worker_of_lbfgs_costs_little_and_changes_no_bit(
    seconds: float, objective: float, reached: list[bool]
) -> None:
    calm = {"table": "second-order", "scaling": "strong", "strategy": "lbfgs", "objective": 0.1, "command_bytes": 1}
    slow = {**calm, "slow": (8.0,), "epoch_seconds": seconds, "objective": objective}
    assert [found for _, found in verdicts(calm, slow)] == reached


@pytest.mark.parametrize(
    ("strategy", "workers", "scaling", "seconds"),
    [
        ("downpour", 3, "weak", 3.52),
        ("dc-adaptive", 11, "weak", 3.64),
        ("downpour", 4, "weak", None),
        ("downpour", 3, "strong", None),
        ("downpour, every step", 3, "weak", None),
    ],
)
def test_the_sources_seconds_stand_where_it_has_them(
    strategy: str, workers: int, scaling: str, seconds: float | None
) -> None:
    row = {**ROW, "strategy": strategy, "workers": workers, "scaling": scaling}
    assert source_s(row) == seconds
    assert source_s({**row, "table": "delay"}) is None
