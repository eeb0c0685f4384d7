"""Strategies as values: no network, no clock. Gradients are those of half the square of the distance to a goal."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.schedules import constant
from tierkit.errors import InvalidInput, SetupError
from training.strategies.build import build_strategy
from training.strategies.config import HostedConfig, OuterConfig, ServerConfig
from training.strategies.finding import HOSTED, STRATEGIES, find_strategy
from training.strategies.protocol import Strategy
from training.trust.config import TrustConfig
from training.units import Computed, Flat, UnitLease, Update

GOAL = np.array([1.0, -2.0, 0.5], np.float32)
EMPTY = np.zeros(0, np.float32)
RATE = 0.1


def flat(*values: float) -> Flat:
    return np.array(values, np.float32)


def start(config: HostedConfig, *, steps: int = 100, workers: int = 1, buffers: Flat = EMPTY) -> Strategy:
    learner = constant(RATE, steps=steps)
    return build_strategy(config, (flat(0, 0, 0), buffers), learner, workers=workers, lease_s=10.0)


def granted(strategy: Strategy, worker: str = "a", now: float = 0.0) -> UnitLease:
    lease = strategy.grant(worker, now)
    assert lease is not None
    return lease


def brought(lease: UnitLease, values: Flat, buffers: Flat = EMPTY) -> Update:
    computed = Computed(values=values, buffers=buffers, loss=0.0)
    return Update(lease=lease.number, worker=lease.worker, steps=lease.unit.span, computed=computed)


def test_sgd_of_one_worker_is_the_sequential_loop_to_the_bit() -> None:
    expected = flat(0, 0, 0)
    for name in ("sgd", "dc-constant", "dc-adaptive"):
        config = HOSTED[name].model_copy(update={"delay_compensation": 0.0})
        strategy = start(config)
        expected = flat(0, 0, 0)
        for _ in range(100):
            lease = granted(strategy)
            assert strategy.take(brought(lease, strategy.weights - GOAL), 0.0) == "taken"
            expected = expected - np.float32(RATE) * (expected - GOAL)
        assert strategy.finished
        assert strategy.weights.tobytes() == expected.tobytes()


def test_a_rate_of_the_strategy_takes_the_place_of_the_networks_highest() -> None:
    strategy = start(ServerConfig(rule="sgd", rate=0.5))
    strategy.take(brought(granted(strategy), flat(1, 0, 2)), 0.0)
    np.testing.assert_allclose(strategy.weights, -0.5 * flat(1, 0, 2))


def test_adagrad_follows_its_formula() -> None:
    strategy = start(ServerConfig(rule="adagrad"))
    for gradient in (flat(1, -2, 0.5), flat(3, 1, 0.5)):
        strategy.take(brought(granted(strategy), gradient), 0.0)
    expected = -RATE * (flat(1, -1, 1) + flat(3 / 10**0.5, 1 / 5**0.5, 0.5 / 0.5**0.5))
    np.testing.assert_allclose(strategy.weights, expected, rtol=1e-5)


def test_delay_compensation_corrects_by_how_far_the_weights_have_moved_meanwhile() -> None:
    # Zheng et al. 2016: g + lambda g g (w - w_backup), of a worker whose weights are one update old.
    g = flat(1, 2, -1)
    for rule, decay in (("dc-constant", 0.0), ("dc-adaptive", 0.5)):
        strategy = start(ServerConfig(rule=rule, delay_compensation=0.5, decay=decay))
        old, other = granted(strategy, "old"), granted(strategy, "other")
        strategy.take(brought(other, flat(1, 1, 1)), 0.0)
        moved = -RATE * flat(1, 1, 1)
        np.testing.assert_allclose(strategy.weights, moved, rtol=1e-6)
        strategy.take(brought(old, g), 0.0)
        strength = 0.5 if rule == "dc-constant" else 0.5 / np.sqrt(0.5 * 0.5 * flat(1, 1, 1) + 0.5 * g * g + 1e-7)
        expected = moved - RATE * (g + strength * g * g * moved)
        np.testing.assert_allclose(strategy.weights, expected, rtol=1e-5)


def test_average_meets_the_worker_half_way() -> None:
    strategy = start(ServerConfig(rule="average", period=2))
    lease = granted(strategy)
    strategy.take(brought(lease, flat(0, 0, 0) - flat(2, 4, 6)), 0.0)
    np.testing.assert_allclose(strategy.weights, flat(1, 2, 3))


@pytest.mark.parametrize("trust", [None, TrustConfig(centre="trimmed-mean", cheaters=0.0)])
def test_updates_count_as_much_as_they_have_steps(trust: TrustConfig | None) -> None:
    strategy = start(OuterConfig(period=50, trust=trust), buffers=flat(0, 0), steps=101, workers=3)
    changes = zip((50, 50, 1), (flat(-1, 0, 0), flat(0, -1, 0), flat(0, 0, -101)), strict=True)
    leases = [granted(strategy, f"w{number}") for number in range(3)]
    for lease, (steps, change) in zip(leases, changes, strict=True):
        assert lease.unit.steps == steps
        assert strategy.take(brought(lease, change, flat(steps, 0)), 0.0) == "taken"
    np.testing.assert_allclose(strategy.weights, flat(50 / 101, 50 / 101, 1), rtol=1e-6)
    np.testing.assert_allclose(strategy.buffers, flat((50 * 50 + 50 * 50 + 1) / 101, 0), rtol=1e-6)


def test_average_counts_a_short_unit_by_its_steps() -> None:
    strategy = start(ServerConfig(rule="average", period=3), steps=4)
    strategy.take(brought(granted(strategy), flat(0, 0, 0)), 0.0)
    strategy.take(brought(granted(strategy), flat(-4, 0, 0)), 0.0)
    np.testing.assert_allclose(strategy.weights, flat(1, 0, 0))


@pytest.mark.parametrize(("workers", "momentum"), [(1, 0.0), (2, 0.5), (4, 0.75), (8, 0.875)])
def test_a_block_has_the_momentum_of_its_updates(workers: int, momentum: float) -> None:
    strategy = start(OuterConfig(period=1, momentum="1 - 1/N"), steps=2 * workers, workers=workers)
    for _ in range(2):
        for lease in [granted(strategy, f"w{number}") for number in range(workers)]:
            strategy.take(brought(lease, flat(-1, 0, 0)), 0.0)
    np.testing.assert_allclose(strategy.weights, flat(2 + momentum, 0, 0), rtol=1e-6)


@pytest.mark.parametrize(
    ("workers", "own", "momentum"), [(1, None, 0.9), (4, None, 0.6), (10, None, 0.0), (20, None, 0.0), (4, 0.5, 0.5)]
)
def test_sgd_has_the_momentum_that_the_delay_of_its_workers_lacks(
    workers: int, own: float | None, momentum: float
) -> None:
    strategy = build_strategy(
        ServerConfig(rule="sgd", momentum=own),
        (flat(0, 0, 0), EMPTY),
        constant(1.0, steps=10, momentum=0.9),
        workers=workers,
        lease_s=10.0,
    )
    strategy.take(brought(granted(strategy), flat(1, 0, 0)), 0.0)
    strategy.take(brought(granted(strategy), flat(0, 0, 0)), 0.0)
    # Nesterov: the first step is 1 + m, the second one m * m.
    np.testing.assert_allclose(strategy.weights, flat(-(1 + momentum + momentum**2), 0, 0), rtol=1e-6)


def test_rounds_average_their_workers_and_wait_for_all() -> None:
    strategy = start(OuterConfig(period=5), steps=20, workers=2)
    first, second = granted(strategy, "a"), granted(strategy, "b")
    assert strategy.grant("c", 0.0) is None
    assert (first.unit.steps, first.unit.version) == (5, 0)
    strategy.take(brought(first, flat(-1, 0, 0)), 0.0)
    assert (strategy.version, strategy.grant("a", 0.0)) == (0, None)
    strategy.take(brought(second, flat(0, -1, 0)), 0.0)
    assert strategy.version == 1
    np.testing.assert_allclose(strategy.weights, flat(0.5, 0.5, 0))


def test_a_round_that_waits_for_all_goes_on_with_another_worker_for_one_that_left() -> None:
    strategy = start(OuterConfig(period=5, quorum=1.0), steps=15, workers=2)
    lost, other = granted(strategy, "lost"), granted(strategy, "a")
    strategy.take(brought(other, flat(-1, 0, 0)), 0.0)
    assert strategy.grant("a", 9.0) is None
    again = granted(strategy, "a", 11.0)
    assert again.unit.first == lost.unit.first
    assert strategy.take(brought(lost, flat(-9, 9, 9)), 11.0) == "late"
    assert strategy.take(brought(again, flat(-3, 0, 0)), 11.0) == "taken"
    np.testing.assert_allclose(strategy.weights, flat(2, 0, 0))


ROBUST = TrustConfig(centre="trimmed-mean", cheaters=0.0)


@pytest.mark.parametrize("trust", [None, ROBUST])
def test_a_fast_worker_has_one_update_in_a_round_of_different_data(trust: TrustConfig | None) -> None:
    strategy = start(OuterConfig(period=1, once=True, quorum=1.0, trust=trust), workers=3)
    assert strategy.take(brought(granted(strategy, "fast"), flat(-3, 0, 0)), 0.0) == "taken"
    assert strategy.grant("fast", 1.0) is None
    leases = [granted(strategy, name, 1.0) for name in ("slow", "slower")]
    assert strategy.grant("fast", 1.0) is None
    for lease in leases:
        strategy.take(brought(lease, flat(0, -3, 0)), 2.0)
    np.testing.assert_allclose(strategy.weights, flat(1, 2, 0), rtol=1e-6)
    assert granted(strategy, "fast", 2.0).unit.version == 1


@pytest.mark.parametrize("trust", [None, ROBUST])
def test_a_round_of_different_data_ends_with_its_quorum_when_the_others_leave(trust: TrustConfig | None) -> None:
    strategy = start(OuterConfig(period=1, once=True, quorum=0.6, trust=trust), workers=5)
    names = ("a", "b", "c")
    leases = [granted(strategy, name) for name in (*names, "leaves")]
    for lease in leases[:3]:
        strategy.take(brought(lease, flat(-1, 0, 0)), 1.0)
    assert strategy.version == 0
    assert strategy.grant("a", 1.0) is None
    strategy.leave("leaves")
    assert granted(strategy, "a", 1.0).unit.version == 1
    np.testing.assert_allclose(strategy.weights, flat(1, 0, 0), rtol=1e-6)


def test_the_workers_of_a_round_are_remembered_after_a_restart() -> None:
    config = OuterConfig(period=1, once=True, quorum=1.0)
    first, again = start(config, workers=3), start(config, workers=3)
    first.take(brought(granted(first, "fast"), flat(-3, 0, 0)), 0.0)
    vectors, figures = first.state()
    again.restore({name: values.copy() for name, values in vectors.items()}, figures)
    assert again.grant("fast", 1.0) is None
    assert again.grant("slow", 1.0) is not None


def rounds_of_two(*, steps: int = 100, **settings: float) -> tuple[Strategy, UnitLease]:
    """A round that takes both workers 2 s; then the lease of one that does not come back, and that of one that does."""
    strategy = start(OuterConfig.model_validate({"period": 5, **settings}), steps=steps, workers=2)
    for lease in [granted(strategy, "lost"), granted(strategy, "a")]:
        assert strategy.take(brought(lease, flat(0, 0, 0)), 2.0) == "taken"
    lost = granted(strategy, "lost", 2.0)
    strategy.take(brought(granted(strategy, "a", 2.0), flat(-1, 0, 0)), 4.0)
    return strategy, lost


def test_a_round_ends_without_an_update_that_is_overdue_which_counts_in_the_next() -> None:
    strategy, lost = rounds_of_two()
    assert (strategy.grant("a", 4.4), strategy.version) == (None, 1)
    following = granted(strategy, "a", 4.5)
    assert (strategy.version, following.unit.version, following.unit.first) == (2, 2, 20)
    np.testing.assert_allclose(strategy.weights, flat(1, 0, 0))
    assert strategy.take(brought(lost, flat(0, -2, 0)), 5.0) == "taken"
    assert strategy.take(brought(lost, flat(0, -2, 0)), 5.1) == "duplicate"
    assert strategy.take(brought(following, flat(-2, 0, 0)), 6.5) == "taken"
    assert strategy.version == 3
    np.testing.assert_allclose(strategy.weights, flat(2, 1, 0))
    # It has taken 3 s for that one, so it has 3.75 s for the next.
    slow = granted(strategy, "lost", 6.5)
    strategy.take(brought(granted(strategy, "a", 6.5), flat(0, 0, 0)), 8.5)
    assert strategy.grant("a", 10.2) is None
    assert granted(strategy, "a", 10.25).unit.version == slow.unit.version + 1


def test_a_round_waits_for_its_share_of_updates() -> None:
    strategy, _ = rounds_of_two(quorum=0.51)
    assert (strategy.grant("a", 11.0), strategy.version) == (None, 1)
    assert granted(strategy, "a", 12.0).unit.first == 10  # the lease has run out


def test_an_update_that_is_missing_for_several_rounds_is_late_and_others_get_its_steps() -> None:
    strategy, lost = rounds_of_two(most_stale=1)
    after = granted(strategy, "a", 4.5)  # ends the second round
    other = granted(strategy, "b", 4.5)
    for lease in (after, other):
        assert strategy.take(brought(lease, flat(0, 0, 0)), 5.5) == "taken"
    assert strategy.take(brought(lost, flat(9, 9, 9)), 5.6) == "late"
    assert granted(strategy, "b", 5.6).unit.first == lost.unit.first


@pytest.mark.parametrize("family", ["outer", "server"])
def test_at_the_end_of_a_run_steps_whose_update_is_overdue_are_given_to_others(family: str) -> None:
    config = OuterConfig(period=5) if family == "outer" else ServerConfig(rule="sgd", period=5)
    strategy = start(config, steps=20, workers=2)
    for lease in [granted(strategy, "lost"), granted(strategy, "a")]:
        strategy.take(brought(lease, flat(0, 0, 0)), 2.0)
    lost = granted(strategy, "lost", 2.0)
    strategy.take(brought(granted(strategy, "a", 2.0), flat(0, 0, 0)), 4.0)
    assert strategy.grant("a", 4.4) is None
    again = granted(strategy, "a", 4.5)
    assert (again.unit.first, again.unit.steps) == (lost.unit.first, lost.unit.steps)
    assert strategy.take(brought(again, flat(0, 0, 0)), 5.5) == "taken"
    assert strategy.take(brought(lost, flat(9, 9, 9)), 5.6) == "late"
    assert strategy.finished
    assert np.abs(strategy.weights).max() == 0


def test_slow_workers_that_take_steps_from_each_other_come_to_an_end() -> None:
    strategy = start(OuterConfig(period=5), steps=20, workers=1)
    strategy.take(brought(granted(strategy, "quick"), flat(0, 0, 0)), 1.0)
    now, leases = 1.0, {}
    while not strategy.finished and now < 400.0:
        for name in "ab":  # 8 s for an update
            if name not in leases and (lease := strategy.grant(name, now)) is not None:
                leases[name] = lease, now + 8.0
            elif name in leases and now >= leases[name][1]:
                strategy.take(brought(leases.pop(name)[0], flat(0, 0, 0)), now)
        now += 0.25
    assert strategy.finished


def test_the_last_round_has_the_workers_for_whom_there_are_steps() -> None:
    strategy = start(OuterConfig(period=5), steps=5, workers=3)
    strategy.take(brought(granted(strategy), flat(-1, 0, 0)), 0.0)
    assert (strategy.finished, strategy.version) == (True, 1)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_optimiser_is_torchs_sgd(nesterov: bool) -> None:
    strategy = start(OuterConfig(period=1, rate=0.7, momentum=0.9, nesterov=nesterov), steps=3)
    weights, velocity = np.zeros(3), np.zeros(3)
    for change in (flat(1, 2, 3), flat(-1, 0.5, 2), flat(0.1, 0, 1)):
        strategy.take(brought(granted(strategy), change), 0.0)
        velocity = 0.9 * velocity + change
        weights = weights - 0.7 * (change + 0.9 * velocity if nesterov else velocity)
    np.testing.assert_allclose(strategy.weights, weights, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(HOSTED.keys() - {"tournament"}))  # whose lineages may diverge
@pytest.mark.parametrize(
    "values",
    [flat(1, 2), flat(1, 2, np.nan), flat(np.inf, 0, 0), np.zeros(3), np.zeros((3, 1), np.float32)],
    ids=["short", "nan", "inf", "float64", "shape"],
)
def test_what_does_not_fit_changes_nothing_and_its_steps_are_granted_again(name: str, values: Any) -> None:
    strategy = start(HOSTED[name])
    lease = granted(strategy)
    assert strategy.take(brought(lease, values), 0.0) == "refused"
    assert (strategy.version, strategy.weights.tolist()) == (0, [0, 0, 0])
    assert granted(strategy).unit.first == lease.unit.first


def test_an_update_counts_once() -> None:
    strategy = start(ServerConfig(rule="sgd"))
    update = brought(granted(strategy), flat(1, 1, 1))
    assert [strategy.take(update, 0.0) for _ in range(3)] == ["taken", "duplicate", "duplicate"]
    np.testing.assert_allclose(strategy.weights, -RATE * flat(1, 1, 1))


def test_an_update_from_weights_that_are_too_old_is_refused() -> None:
    strategy = start(ServerConfig(rule="sgd", most_stale=2))
    old = granted(strategy, "slow")
    for _ in range(3):
        strategy.take(brought(granted(strategy), flat(1, 1, 1)), 0.0)
    before = strategy.weights.copy()
    assert strategy.take(brought(old, flat(1, 1, 1)), 0.0) == "stale"
    np.testing.assert_array_equal(strategy.weights, before)
    assert granted(strategy).unit.first == old.unit.first


def test_running_statistics_of_one_worker_are_the_runs_and_of_many_an_average() -> None:
    alone = start(ServerConfig(rule="sgd"), buffers=flat(0, 0))
    alone.take(brought(granted(alone), flat(0, 0, 0), flat(4, 8)), 0.0)
    np.testing.assert_allclose(alone.buffers, flat(4, 8))
    shared = start(ServerConfig(rule="sgd"), buffers=flat(0, 0))
    leases = [granted(shared, f"w{n}") for n in range(4)]
    shared.take(brought(leases[0], flat(0, 0, 0), flat(4, 8)), 0.0)
    np.testing.assert_allclose(shared.buffers, flat(1, 2))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('rule = "sg"', "no rule 'sg' of the family server"),
        ('family = "inner"', "family is 'inner'"),
        ('family = ["exchange"]', "family is .'exchange'."),
        ('family = "exchange"\nrule = "allreduce"\napart = 0.3', "apart is for another rule"),
        ('family = "exchange"\nrule = "ensemble"\nperiod = 2', "period is for another rule"),
        ('rule = "adagrad"\nmomentum = 0.5', "momentum is for the rule sgd"),
        ('rule = "sgd"\nn_push = 5', "n_push is unknown"),
        ('family = "outer"\nmomentum = "1 - 1/M"', "momentum"),
        ('family = "outer"\ninner = "adamw"', "inner_rate"),
        ('family = "outer"\ninner = "adamw"\ninner_rate = 0.001\n[trust]\nrecheck = 0.1', "moments"),
        ('family = "outer"\nmomentum = 1.0', "momentum"),
        ("rule = ", "TOML"),
        ('family = "outer"\n[trust]\nupdates = 5', "trust.updates"),
        ('rule = "sgd"\nperiod = "5"', "period is '5'"),
        ('rule = "sgd"\nperiod = true', "period is True"),
        ('rule = "sgd"\nrate = inf', "rate is inf"),
        ('family = "outer"\nperiod = 1_000_000_000', "period is 1000000000"),
        ('family = "outer"\nnesterov = true', "momentum"),
        ('family = "exchange"\nrule = "pipeline"\n[trust]\nrecheck = 0.1', "ranks trust each other"),
        ('rule = "pipeline"', 'needs family = "exchange"'),
        ('rule = "lbfgs"', 'needs family = "batch"'),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_is(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises((InvalidInput, SetupError), match=error):
        find_strategy(str(file))


def test_names_and_files_give_strategies(tmp_path: Path) -> None:
    assert find_strategy("diloco") == STRATEGIES["diloco"]
    file = tmp_path / "own.toml"
    file.write_text('family = "outer"\nperiod = 7')
    assert find_strategy(str(file)) == OuterConfig(period=7)
    with pytest.raises(InvalidInput, match="downpour"):
        find_strategy("down")
    with pytest.raises(SetupError):
        find_strategy(str(tmp_path / "none.toml"))
