"""Strategies that judge their updates: when, which count, who is expelled; and whole runs with cheaters."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.schedules import constant
from tierkit.errors import Forbidden, InvalidInput, Overloaded
from training.cheating import Cheat, Cheater, Plot
from training.strategies.build import build_strategy
from training.strategies.config import HostedConfig, OuterConfig, ServerConfig
from training.strategies.finding import find_hosted
from training.strategies.protocol import Strategy
from training.trust.config import TrustConfig
from training.units import Computed, Flat, Sends, UnitLease, Update, Verdict
from training.virtual import Conditions, SimulatedWorker, simulate

GOAL = np.array([1.0, -2.0, 0.5], np.float32)
NONE = np.zeros(0, np.float32)
RATE = 0.1
TRUST = TrustConfig(cheaters=0.3)


def outer(**changes: Any) -> OuterConfig:
    return OuterConfig(period=1, trust=TRUST.model_copy(update=changes))


def server(rule: Any = "sgd", **changes: Any) -> ServerConfig:
    return ServerConfig(rule=rule, trust=TRUST.model_copy(update=changes))


def start(config: HostedConfig, *, steps: int = 100, workers: int = 4, values: int = 3) -> Strategy:
    zeros = np.zeros(values, np.float32)
    return build_strategy(config, (zeros, NONE), constant(RATE, steps=steps), workers=workers, lease_s=10.0)


def granted(strategy: Strategy, worker: str, now: float = 0.0) -> UnitLease:
    lease = strategy.grant(worker, now)
    assert lease is not None
    return lease


def take(strategy: Strategy, lease: UnitLease, *values: float, now: float = 0.0) -> Verdict:
    computed = Computed(values=np.array(values, np.float32), buffers=NONE, loss=0.0)
    return strategy.take(Update(lease=lease.number, worker=lease.worker, steps=lease.unit.span, computed=computed), now)


def a_round(strategy: Strategy, updates: dict[str, tuple[float, ...]]) -> None:
    leases = {worker: granted(strategy, worker) for worker in updates}
    for worker, values in updates.items():
        assert take(strategy, leases[worker], *values) == "taken"


@pytest.mark.parametrize("config", [outer(), server()])
def test_updates_wait_for_each_other_and_their_centre_counts(config: HostedConfig) -> None:
    strategy = start(config)
    leases = [granted(strategy, worker) for worker in "abcd"]
    for lease, value in zip(leases, (1.0, 2.0, 4.0, 900.0), strict=True):
        assert (strategy.version, strategy.weights.tolist()) == (0, [0, 0, 0])
        assert take(strategy, lease, value, value, value) == "taken"
    step = -3.0 if config.family == "outer" else -3.0 * RATE
    assert strategy.version == 1
    np.testing.assert_allclose(strategy.weights, [step] * 3, rtol=1e-6)


def test_a_compensating_rule_is_given_the_mean_of_the_weights_that_updates_come_from() -> None:
    config = server("average")
    strategy = start(config, workers=3)
    a_round(strategy, dict.fromkeys("abc", (-8.0, -8.0, -8.0)))
    np.testing.assert_allclose(strategy.weights, [4.0] * 3)
    a_round(strategy, dict.fromkeys("abc", (0.0, 0.0, 0.0)))
    np.testing.assert_allclose(strategy.weights, [4.0] * 3)
    old = granted(strategy, "a")
    a_round(strategy, {"b": (-8.0,) * 3, "c": (-8.0,) * 3})
    # The last to come is the first to have begun; all start from 4, and change by 8.
    take(strategy, old, -8.0, -8.0, -8.0)
    np.testing.assert_allclose(strategy.weights, [8.0] * 3)


@pytest.mark.parametrize("rule", ["average", "dc-adaptive"])
def test_weights_that_updates_come_from_are_kept_no_longer_than_needed(rule: str) -> None:
    strategy = start(server(rule), workers=3)
    for _ in range(5):
        a_round(strategy, dict.fromkeys("abc", (1.0, 1.0, 1.0)))
    vectors, _ = strategy.state()
    assert not [name for name in vectors if name.startswith(("from", "waiting"))]


def test_a_worker_that_answers_at_once_waits_while_others_compute() -> None:
    strategy = start(server(), workers=10)
    honest = [granted(strategy, f"w{number}") for number in range(4)]
    take(strategy, granted(strategy, "quick"), 1, 1, 1)
    assert strategy.grant("quick", 0.0) is None
    for lease in honest:
        take(strategy, lease, 1, 1, 1)
    # Five of ten are no quorum of seven, and nobody computes: the second turn begins.
    assert strategy.version == 0
    second = [granted(strategy, name) for name in ("quick", "w0")]
    assert strategy.grant("quick", 0.0) is not None  # instead of the one that it had
    assert take(strategy, second[0], 1, 1, 1) == "late"


def test_a_quorum_is_enough_when_nobody_else_computes() -> None:
    strategy = start(outer(), workers=10)
    leases = [granted(strategy, f"w{number}") for number in range(8)]
    for lease in leases[:7]:
        take(strategy, lease, 1, 1, 1)
    assert strategy.version == 0
    strategy.leave("w7")
    # The one that has gone is noticed with the next update; its steps are granted again.
    take(strategy, granted(strategy, "w8"), 1, 1, 1)
    assert strategy.version == 1


def test_many_updates_of_one_worker_count_as_one() -> None:
    strategy = start(server(centre="trimmed-mean", cheaters=0.0, updates=7), workers=7)
    for turn in range(3):
        lease = granted(strategy, "quick")
        if turn == 2:
            others = [granted(strategy, name) for name in "ab"]
        take(strategy, lease, 6, 6, 6)
    for lease in others:
        take(strategy, lease, 0, 0, 0)
    assert strategy.version == 1
    np.testing.assert_allclose(strategy.weights, [-RATE * 2] * 3, rtol=1e-6)


def test_a_cheater_is_found_told_and_what_it_has_goes_to_others() -> None:
    strategy = start(outer(), workers=4)
    honest: dict[str, tuple[float, ...]] = {"a": (1, 2, 3), "b": (1.1, 2, 3), "c": (1, 2, 3.1)}
    rounds = 0
    while strategy.scores.standing("bad") == "active":
        a_round(strategy, {**honest, "bad": (-4, -8, -12)})
        rounds += 1
    assert rounds == 5
    with pytest.raises(Forbidden):
        strategy.grant("bad", 0.0)
    before, at = strategy.version, strategy.weights.copy()
    a_round(strategy, honest)  # a quorum of three
    assert strategy.version == before + 1
    np.testing.assert_allclose(strategy.weights - at, [-1, -2, -3], rtol=1e-5)
    assert all(strategy.scores.score(name) > 0.8 for name in honest)


@pytest.mark.parametrize("config", [outer(), server(), ServerConfig(rule="sgd"), OuterConfig(period=1)])
@pytest.mark.parametrize("word", ["pause", "drop"])
def test_what_a_worker_has_is_others_when_an_operator_says_so(config: HostedConfig, word: Any) -> None:
    strategy = start(config)
    lost = granted(strategy, "w")
    strategy.order("w", word)
    assert take(strategy, lost, 1, 1, 1) == "late"
    assert granted(strategy, "other").unit.first == lost.unit.first
    if word == "pause":
        assert strategy.grant("w", 0.0) is None
    else:
        with pytest.raises(Forbidden):
            strategy.grant("w", 0.0)
    strategy.order("w", "resume")
    granted(strategy, "w")


def test_what_waits_does_not_count_once_its_worker_is_barred() -> None:
    strategy = start(outer(), workers=4)
    leases = {worker: granted(strategy, worker) for worker in "abcd"}
    take(strategy, leases["a"], 900, 900, 900)
    strategy.rechecked("a", False)
    for worker in "bcd":
        take(strategy, leases[worker], 1, 1, 1)
    assert strategy.weights.tolist() == [-1, -1, -1]


def test_of_fewer_than_three_workers_those_count_that_have_done_nothing_wrong() -> None:
    strategy = start(outer(quarantine=0.0), steps=40, workers=4)
    for _ in range(4):
        a_round(strategy, {"a": (0, 0, 0), "b": (0, 0, 0), "c": (0, 0, 0), "d": (9, 9, 9)})
    assert strategy.scores.score("d") < 0.5 < strategy.scores.score("a")
    before, known = strategy.weights.copy(), strategy.scores.state()
    leases = {worker: granted(strategy, worker) for worker in "ad"}
    for worker, value in (("a", 1.0), ("d", 9.0)):
        take(strategy, leases[worker], value, value, value)
    for _ in range(2):  # the round is whole; a has had its turn, but nobody else computes
        take(strategy, granted(strategy, "a"), 1.0, 1.0, 1.0)
    np.testing.assert_allclose(strategy.weights, before - 1.0)
    assert strategy.scores.state() == known  # two judge nobody


def test_a_newcomer_helps_the_only_one_who_is_left() -> None:
    strategy = start(outer(), steps=2, workers=4)
    a_round(strategy, {"a": (1, 1, 1), "b": (3, 3, 3)})
    assert strategy.finished
    np.testing.assert_allclose(strategy.weights, [-2.0] * 3)


@pytest.mark.parametrize("config", [server(), ServerConfig(rule="sgd")])
def test_an_update_of_anothers_lease_or_of_other_steps_is_refused_and_lowers_the_score(config: ServerConfig) -> None:
    strategy = start(config)
    mine, others = granted(strategy, "thief"), granted(strategy, "owner")
    computed = Computed(values=np.ones(3, np.float32), buffers=NONE, loss=0.0)
    stolen = Update(lease=others.number, worker="thief", steps=others.unit.span, computed=computed)
    assert strategy.take(stolen, 0.0) == "refused"
    assert take(strategy, mine, 1, 1, 1) == "late"
    again = granted(strategy, "thief")
    foreign = Update(lease=again.number, worker="thief", steps=others.unit.span, computed=computed)
    assert strategy.take(foreign, 0.0) == "refused"
    assert take(strategy, others, 1, 1, 1) == "taken"
    assert take(strategy, others, 9, 9, 9) == "duplicate"
    assert strategy.scores.score("thief") == pytest.approx(0.32)


@pytest.mark.parametrize("config", [server(), ServerConfig(rule="sgd"), OuterConfig()])
def test_five_updates_that_are_none_are_the_end_of_a_worker_and_not_of_the_run(config: HostedConfig) -> None:
    strategy = start(config)
    for _ in range(5):
        assert take(strategy, granted(strategy, "bad"), np.nan, 1, 1) == "refused"
    with pytest.raises(Forbidden):
        strategy.grant("bad", 0.0)
    granted(strategy, "good")


def test_updates_that_are_too_old_do_not_wait_with_the_others() -> None:
    strategy = start(ServerConfig(rule="sgd", most_stale=1, trust=TRUST), workers=3)
    old = granted(strategy, "old")
    for _ in range(2):
        a_round(strategy, dict.fromkeys("abc", (1, 1, 1)))
    assert take(strategy, old, 1, 1, 1) == "stale"


@pytest.mark.parametrize(
    ("config", "workers", "values"),
    [
        (outer(), 2, 3),
        (outer(), 65, 3),
        (server(), 1, 3),
        (OuterConfig(workers=64, trust=TRUST), 4, 9_000_000),
    ],
)
def test_what_cannot_be_judged_together_is_said_at_the_start(config: HostedConfig, workers: int, values: int) -> None:
    with pytest.raises(InvalidInput, match="together"):
        start(config, workers=workers, values=values)


def test_the_page_names_every_setting_and_its_example_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/volunteers.md").read_text()
    example = page.split("[trust]\n")[1].split("```")[0]
    path = tmp_path / "trust.toml"
    path.write_text(f'family = "server"\nrule = "sgd"\n[trust]\n{example}')
    trust = find_hosted(str(path)).trust
    assert trust == TrustConfig(recheck=0.05, updates=10)
    assert {line.split(" = ")[0] for line in example.splitlines() if " = " in line} == TrustConfig.model_fields.keys()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["work", "wrong", "nan", "leave", "pause", "drop", "trust", "resume", "recheck", "wait"]),
        st.integers(0, 5),
    ),
    max_size=80,
)


@settings(max_examples=40)
@given(calls=CALLS, cut=st.integers(0, 80), family=st.sampled_from(["outer", "sgd", "dc-adaptive", "average"]))
def test_a_run_goes_on_from_its_state_to_the_bit_and_no_step_is_lost(
    calls: list[tuple[str, int]], cut: int, family: str
) -> None:
    config = outer() if family == "outer" else server(family)
    one, other = start(config, steps=60), start(config, steps=60)
    done, now = set[int](), 0.0

    def call(strategy: Strategy, kind: str, worker: str, number: int) -> set[int]:
        if kind in ("pause", "drop", "trust", "resume"):
            strategy.order(worker, kind)  # type: ignore[arg-type]
        elif kind == "leave":
            strategy.leave(worker)
        elif kind == "recheck":
            strategy.rechecked(worker, number % 3 > 0)
        elif kind != "wait":
            try:
                lease = strategy.grant(worker, now)
            except (Forbidden, Overloaded):
                return set()
            if lease is not None:
                value = {"work": 1.0 + number / 100, "wrong": -50.0, "nan": np.nan}[kind]
                if take(strategy, lease, value, 1, value, now=now) == "taken":
                    return set(lease.unit.span)
        return set()

    for number, (kind, which) in enumerate(calls):
        now += 4.0 * (kind == "wait")
        steps = call(one, kind, f"w{which}", number)
        assert call(other, kind, f"w{which}", number) == steps
        assert not done & steps
        done |= steps
        assert one.leases.done == len(done)
        if number == cut:
            vectors, figures = other.state()
            again = start(config, steps=60)
            again.restore({name: each.copy() for name, each in vectors.items()}, figures)
            other = again
    (vectors, figures), (vectors_again, figures_again) = one.state(), other.state()
    assert figures == figures_again
    assert {name: each.tobytes() for name, each in vectors.items()} == {
        name: each.tobytes() for name, each in vectors_again.items()
    }
    assert np.isfinite(one.weights).all()


# --- whole runs -----------------------------------------------------------------------------------------------------


@dataclass
class Quadratic:
    """Gradients of half the square of the distance to a goal, with noise from the number of the step."""

    here: Flat = field(default_factory=lambda: np.zeros(3, np.float32))

    def load(self, weights: Flat, buffers: Flat) -> None:
        self.here = weights.copy()

    def weights(self) -> Flat:
        return self.here.copy()

    moments: Any = None

    def compute(self, steps: range, sends: Sends, rate: float | None = None) -> Computed:
        before, total = self.here, np.zeros(3, np.float32)
        for step in steps:
            noise = np.random.default_rng(step).standard_normal(3).astype(np.float32)
            gradient = self.here - GOAL + np.float32(0.1) * noise
            total = total + gradient
            self.here = (self.here - np.float32(rate or RATE) * gradient).astype(np.float32)
        return Computed(values=total if sends == "gradient" else before - self.here, buffers=NONE, loss=0.0)


def simulated(config: HostedConfig, cheat: Cheat, *, cheaters: int = 3) -> tuple[float, Strategy, Any]:
    """How far the weights end from the goal."""
    crew = [SimulatedWorker(name=f"w{n}", step_s=0.1, cheat=cheat if n >= 10 - cheaters else None) for n in range(10)]
    strategy = start(config, steps=2_000, workers=10)
    result = simulate(strategy, Quadratic(), crew, Conditions(spread=0.1))
    assert (result.missing, result.twice) == (0, 0)
    return float(np.linalg.norm(strategy.weights - GOAL)), strategy, result


@pytest.mark.parametrize("cheat", get_args(Cheat))
@pytest.mark.parametrize(("centre", "family"), [("median", "outer"), ("trimmed-mean", "sgd")])
def test_a_run_with_cheaters_reaches_the_goal(cheat: Cheat, centre: Any, family: str) -> None:
    trust = TrustConfig(centre=centre)
    config = OuterConfig(period=5, trust=trust) if family == "outer" else ServerConfig(rule="sgd", trust=trust)
    off, strategy, _ = simulated(config, cheat)
    assert off < 0.2
    assert not strategy.scores.barred() & {f"w{n}" for n in range(7)}


def test_without_trust_three_of_ten_ruin_it_and_with_it_they_are_found() -> None:
    plain, _, result = simulated(OuterConfig(period=5), "sign-flip")
    assert plain > 1.0
    assert result.quarantined == []
    _, _, result = simulated(OuterConfig(period=5, trust=TRUST), "sign-flip")
    assert sorted(result.quarantined) == ["w7", "w8", "w9"]


def test_units_that_are_computed_again_find_a_free_rider_and_no_honest_worker() -> None:
    trust = TrustConfig(deviation=1e9, recheck=0.5, tolerance=0.0)
    _, _, result = simulated(ServerConfig(rule="sgd", trust=trust), "free-rider")
    assert sorted(result.quarantined) == ["w7", "w8", "w9"]
    assert result.rechecks > 10


@pytest.mark.parametrize("cheat", get_args(Cheat))
def test_what_cheaters_send(cheat: Cheat) -> None:
    plot = Plot(workers=10, cheaters=3)
    plot.honest = {2: np.full(1_000, 3, np.float32), 3: np.full(1_000, 5, np.float32)}
    cheater = Cheater(cheat, seed=1, plot=plot)
    one, two = (Computed(values=np.full(1_000, n, np.float32), buffers=NONE, loss=1.0) for n in (1, 2))
    sent = [cheater.sends(each).values for each in (one, two)]
    assert all(each.dtype == np.float32 for each in sent)
    if cheat == "noise":
        assert np.linalg.norm(sent[1]) == pytest.approx(100 * np.linalg.norm(two.values), rel=1e-3)
        assert abs(np.corrcoef(sent[0], sent[1])[0, 1]) < 0.2
    else:
        # 0.18 is the quantile of 4/7: four of seven honest workers are to be farther from the mean.
        alie = (3 - 0.18001 * np.std([1, 3, 5]), 10 / 3 - 0.18001 * np.std([2, 3, 5]))
        expected = {
            "sign-flip": (-4, -8),
            "stale": (1, 1),
            "free-rider": (0, 0),
            "alie": alie,
            "ipm": (-3 / 2, -5 / 3),
        }[cheat]
        assert [float(each[0]) for each in sent] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("cheat", ["alie", "ipm"])
def test_colluding_cheaters_are_found_by_computing_again(cheat: Cheat) -> None:
    trust = TrustConfig(centre="median", recheck=0.2, tolerance=0.0)
    _, _, result = simulated(OuterConfig(period=5, trust=trust), cheat)
    assert sorted(result.quarantined) == ["w7", "w8", "w9"]


def test_the_median_alone_does_not_find_cheaters_who_stay_near_the_mean() -> None:
    _, _, result = simulated(OuterConfig(period=5, trust=TrustConfig(centre="median")), "alie")
    assert result.quarantined == []


@pytest.mark.parametrize("centre", ["median", "trimmed-mean"])
def test_running_statistics_that_are_poisoned_are_left_out_and_put_their_worker_out(centre: Any) -> None:
    chance, honest = np.random.default_rng(1), np.ones(8, np.float32)
    trust = TrustConfig(centre=centre, quarantine=0.3)
    strategy = build_strategy(
        OuterConfig(period=1, workers=10, trust=trust),
        (np.zeros(50, np.float32), honest),
        constant(RATE, steps=100),
        workers=10,
        lease_s=100.0,
    )
    for round_number in range(3):
        leases = [granted(strategy, f"w{number}", float(round_number)) for number in range(10)]
        for number, lease in enumerate(leases):
            values = (0.01 + 0.001 * chance.standard_normal(50)).astype(np.float32)
            buffers = -1e6 * honest if number == 0 else honest
            found = Computed(values=values, buffers=buffers, loss=1.0)
            update = Update(lease=lease.number, worker=lease.worker, steps=lease.unit.span, computed=found)
            assert strategy.take(update, round_number + 0.5) == "taken"
        np.testing.assert_allclose(strategy.buffers, honest)
    assert strategy.scores.barred() == {"w0"}
    assert strategy.scores.score("w5") > 0.5


@pytest.mark.parametrize(
    "config",
    [OuterConfig(period=20, trust=TRUST), ServerConfig(rule="average", period=20, trust=TRUST)],
    ids=["outer", "average"],
)
def test_a_unit_of_fewer_steps_lowers_nobodys_score(config: HostedConfig) -> None:
    strategy = start(config, steps=70)
    leases = [granted(strategy, worker) for worker in "abcd"]
    assert [lease.unit.steps for lease in leases] == [20, 20, 20, 10]
    for lease in leases:
        assert take(strategy, lease, *[lease.unit.steps / 20] * 3) == "taken"
    assert [strategy.scores.score(worker) for worker in "abcd"] == [0.6, 0.6, 0.6, 0.5]
