"""Runs on virtual time, with gradients that need no network: of half the square of the distance to a goal."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pytest

from tests.schedules import constant
from tierkit.errors import InvalidInput, Unavailable
from training.masking import Masking
from training.payloads import Format, pack, packed_bytes, unpack
from training.strategies.build import build_strategy
from training.strategies.config import HostedConfig, OuterConfig, ServerConfig
from training.strategies.finding import HOSTED
from training.trust.config import TrustConfig
from training.units import Computed, Flat, Sends
from training.virtual import Conditions, FaultKind, Link, Simulated, SimulatedWorker, UpdateFault, draw_faults, simulate

GOAL = np.array([1.0, -2.0, 0.5], np.float32)
NONE = np.zeros(0, np.float32)
SIZE = packed_bytes(len(GOAL), 0, "fp32")
RATE = 0.1


@dataclass
class Quadratic:
    """As `FlatLearner`, with no images."""

    here: Flat = field(default_factory=lambda: np.zeros(3, np.float32))
    steps: list[int] = field(default_factory=list)

    def load(self, weights: Flat, buffers: Flat) -> None:
        self.here = weights.copy()

    def weights(self) -> Flat:
        return self.here.copy()

    moments: Any = None

    def measured(self, weights: Flat, buffers: Flat) -> tuple[float, float]:
        return 0.0, float(np.square(weights - GOAL).sum())

    def compute(self, steps: range, sends: Sends, rate: float | None = None) -> Computed:
        before, total = self.here, np.zeros(3, np.float32)
        for step in steps:
            self.steps.append(step)
            gradient = self.here - GOAL
            total = total + gradient
            if sends == "portion":
                continue
            self.here = self.here - np.float32(rate or RATE) * gradient
        loss = float(np.square(self.here - GOAL).sum() / 2)
        return Computed(values=before - self.here if sends == "change" else total, buffers=NONE, loss=loss)


def run(
    config: HostedConfig,
    workers: list[SimulatedWorker],
    *,
    steps: int = 120,
    wire: Format = "fp32",
    serve_s: float = 0.0,
    sync_s: float = 0.0,
    lease_s: float = 5.0,
    faults: Mapping[int, UpdateFault] | None = None,
) -> tuple[Simulated, Flat, Quadratic]:
    learner = Quadratic()
    strategy = build_strategy(
        config,
        (np.zeros(3, np.float32), NONE),
        constant(RATE, steps=steps, epochs=20 if config.family == "batch" else 1),
        workers=len(workers),
        lease_s=lease_s,
    )
    conditions = Conditions(wire=wire, serve_s=serve_s, sync_s=sync_s, faults=faults or {})
    result = simulate(strategy, learner, workers, conditions)
    assert strategy.finished
    return result, strategy.weights, learner


def machines(count: int, *, step_s: float = 0.1, link: Link | None = None) -> list[SimulatedWorker]:
    return [SimulatedWorker(name=f"w{n}", step_s=step_s, link=link or Link()) for n in range(count)]


def test_more_workers_than_a_host_lets_in_can_be_simulated() -> None:
    result, _, _ = run(OuterConfig(period=1), machines(1_100), steps=1_200)
    assert (len(result.spent), result.updates, result.missing) == (1_100, 1_200, 0)


@pytest.mark.parametrize("name", HOSTED)
def test_every_strategy_reaches_the_goal_with_four_workers(name: str) -> None:
    # AdaGrad's own rate is made for networks.
    config = HOSTED[name]
    if config.family == "server" and config.rate is not None:
        config = config.model_copy(update={"rate": 0.5})
    if config.family == "outer":
        config = config.model_copy(update={"period": 5, "inner_rate": None})
    if config.family == "exchange":
        config = config.model_copy(update={"period": 5})
    _, weights, _ = run(config, machines(4), steps=1_000)
    np.testing.assert_allclose(weights, GOAL, atol=0.02)


def test_a_run_takes_what_its_formula_says() -> None:
    link = Link(delay_s=0.01, bytes_per_s=1_200.0)
    result, _, learner = run(ServerConfig(rule="sgd"), machines(1, link=link), steps=10, serve_s=0.002)
    # Ask, be served, fetch, compute, send, be served.
    each = 0.01 + 0.002 + (0.01 + SIZE / 1_200) + 0.1 + (0.01 + SIZE / 1_200) + 0.002
    assert result.virtual_seconds == pytest.approx(10 * each)
    assert (result.bytes_sent, result.bytes_received) == (10 * SIZE, 10 * SIZE)
    assert (result.updates, result.faults, learner.steps) == (10, 0, list(range(10)))
    assert result.spent == {"w0": (result.virtual_seconds, 10)}


def test_workers_share_the_steps_until_the_host_is_busy_all_the_time() -> None:
    alone, _, _ = run(ServerConfig(rule="sgd"), machines(1))
    four, _, _ = run(ServerConfig(rule="sgd"), machines(4))
    assert alone.virtual_seconds / four.virtual_seconds == pytest.approx(4)
    crowd, _, _ = run(ServerConfig(rule="sgd"), machines(60), serve_s=0.01)
    assert crowd.virtual_seconds >= 120 * 2 * 0.01


def test_an_answer_waits_until_the_disk_has_what_came_before_it() -> None:
    alone, _, _ = run(ServerConfig(rule="sgd"), machines(1), steps=10, sync_s=0.05)
    assert alone.virtual_seconds == pytest.approx(10 * 0.1 + 9 * 0.05)
    # An update of the other comes half-way: its own is kept after it, and the weights for the first one wait for both.
    two = [SimulatedWorker(name="a", step_s=0.1), SimulatedWorker(name="b", step_s=0.12)]
    result, _, _ = run(ServerConfig(rule="sgd"), two, steps=4, sync_s=0.04)
    # a: 0.1, kept until 0.14; b: 0.12, kept until 0.18; a's request of 0.14 comes as that begins, and waits for it.
    assert [result.spent[name][0] for name in "ab"] == pytest.approx([0.28, 0.30])


def test_updates_that_come_meanwhile_are_kept_together() -> None:
    crowd, _, _ = run(ServerConfig(rule="sgd"), machines(60), sync_s=0.05)
    # Two of each worker: the first of all alone, the others with each other.
    assert crowd.virtual_seconds == pytest.approx(0.1 + 2 * 0.05 + 0.1)


def test_weights_are_as_old_as_there_are_other_workers() -> None:
    result, _, _ = run(ServerConfig(rule="sgd"), machines(8), steps=800, serve_s=0.001)
    assert result.staleness == pytest.approx(7, abs=0.5)


def test_a_slow_worker_delays_rounds_and_not_single_updates() -> None:
    def slowed(config: HostedConfig) -> float:
        calm, slow = machines(8), [SimulatedWorker(name="slow", step_s=0.4), *machines(7)]
        seconds = [run(config, workers, steps=800)[0].virtual_seconds for workers in (calm, slow)]
        return seconds[1] / seconds[0]

    # 7 of 8 workers at full speed and one at a quarter: 8 / 7.25.
    assert slowed(ServerConfig(rule="sgd")) == pytest.approx(8 / 7.25, rel=0.02)
    assert slowed(OuterConfig(period=10, quorum=1.0)) == pytest.approx(4, rel=0.02)


def test_a_round_takes_what_its_formula_says() -> None:
    link, serve_s = Link(delay_s=0.004, bytes_per_s=1_200.0), 0.002
    crew = [*machines(7, link=link), SimulatedWorker(name="slow", step_s=0.4, link=link)]
    result, _, _ = run(OuterConfig(period=5, quorum=1.0), crew, steps=400, serve_s=serve_s)
    # The others wait for the end of the round and are served one by one; the slow one ends it and comes last.
    each = max(8 * serve_s, link.delay_s + serve_s) + 2 * link.seconds(SIZE) + 5 * 0.4 + serve_s
    assert result.virtual_seconds == pytest.approx(10 * each, rel=0.002)


FAMILIES = [
    ServerConfig(rule="dc-adaptive", delay_compensation=2.0),
    ServerConfig(rule="sgd", period=3),
    OuterConfig(period=5),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda each: f"{each.family}-{each.period}")
@pytest.mark.parametrize("kind", get_args(FaultKind))
def test_faults_lose_no_step_and_apply_none_twice(config: HostedConfig, kind: FaultKind) -> None:
    # A lease has 1 s, and a fault takes up to three times as long: some leases run out.
    drawn = draw_faults(20, updates=600 // config.period, longest_s=3.0, seed=1)
    faults = {number: UpdateFault(kind=kind, seconds=fault.seconds) for number, fault in drawn.items()}
    result, weights, learner = run(config, machines(4), steps=600, lease_s=1.0, faults=faults)
    assert (result.twice, result.missing) == (0, 0)
    assert result.faults >= 20
    assert sorted(set(learner.steps)) == list(range(600))
    np.testing.assert_allclose(weights, GOAL, atol=0.02)
    quiet, _, _ = run(config, machines(4), steps=600, lease_s=1.0)
    assert quiet.updates == result.updates
    if kind == "death":  # what was computed for nothing was not sent
        assert result.bytes_received > quiet.bytes_received
    else:
        assert result.bytes_sent >= quiet.bytes_sent + (0 if kind == "delay" else 20 * (SIZE // 2))


@pytest.mark.parametrize("config", FAMILIES, ids=lambda each: f"{each.family}-{each.period}")
def test_workers_that_come_and_go_lose_no_step(config: HostedConfig) -> None:
    crew = [SimulatedWorker(name=f"w{number}", step_s=0.1, stays_s=2.0) for number in range(4)]
    result, weights, learner = run(config, crew, steps=600, lease_s=1.0)
    calm, _, _ = run(config, machines(4), steps=600, lease_s=1.0)
    assert (result.twice, result.missing, result.updates) == (0, 0, calm.updates)
    assert sorted(set(learner.steps)) == list(range(600))
    np.testing.assert_allclose(weights, GOAL, atol=0.02)
    # Four places for at least 15 s each, and a stay of 2 s.
    assert result.faults > 10
    assert len(result.spent) > 14
    assert result.virtual_seconds > calm.virtual_seconds
    again, same, _ = run(config, crew, steps=600, lease_s=1.0)
    assert (again.virtual_seconds, same.tobytes()) == (result.virtual_seconds, weights.tobytes())


def test_rounds_do_not_wait_for_the_leases_of_those_who_have_left() -> None:
    crew = [SimulatedWorker(name=f"w{number}", step_s=0.5, stays_s=20.0) for number in range(8)]
    config = OuterConfig(period=5)
    seconds = [
        run(each, workers, steps=2_000, lease_s=10.0)[0].virtual_seconds
        for each, workers in (
            (config, crew),
            (config.model_copy(update={"quorum": 1.0}), crew),
            (config, machines(8, step_s=0.5)),
        )
    ]
    assert seconds[0] <= 1.3 * seconds[2]
    assert seconds[1] > 2 * seconds[2]


def test_a_round_ends_without_those_who_are_overdue_when_its_updates_are_judged_as_well() -> None:
    crew = [SimulatedWorker(name=f"w{number}", step_s=0.5, stays_s=20.0) for number in range(8)]
    config = OuterConfig(period=5, trust=TrustConfig())
    stormy, _, _ = run(config, crew, steps=2_000, lease_s=10.0)
    calm, _, _ = run(config, machines(8, step_s=0.5), steps=2_000, lease_s=10.0)
    assert (stormy.twice, stormy.missing, stormy.quarantined) == (0, 0, [])
    assert stormy.virtual_seconds <= 1.4 * calm.virtual_seconds


def test_an_update_that_comes_again_changes_nothing() -> None:
    faults = {number: UpdateFault(kind="duplicate", seconds=0.0) for number in range(100)}
    config = ServerConfig(rule="sgd")
    twice, weights, _ = run(config, machines(1), steps=100, faults=faults)
    once, same, _ = run(config, machines(1), steps=100)
    assert weights.tobytes() == same.tobytes()
    assert (twice.updates, twice.twice, twice.bytes_sent) == (100, 0, 2 * once.bytes_sent)


def test_faults_are_drawn_from_the_seed_each_kind_as_often() -> None:
    drawn = draw_faults(40, updates=100, longest_s=2.0, seed=3)
    assert set(Counter(fault.kind for fault in drawn.values()).values()) == {10}
    assert set(drawn) <= set(range(100))
    assert all(0 <= fault.seconds <= 2.0 for fault in drawn.values())
    assert drawn == draw_faults(40, updates=100, longest_s=2.0, seed=3)
    assert drawn != draw_faults(40, updates=100, longest_s=2.0, seed=4)
    with pytest.raises(InvalidInput):
        draw_faults(11, updates=10, longest_s=1.0, seed=0)


@pytest.mark.parametrize("config", [ServerConfig(rule="sgd"), OuterConfig(period=5)], ids=lambda each: each.family)
def test_a_run_outlives_its_workers(config: HostedConfig) -> None:
    workers = machines(4)
    workers[1] = SimulatedWorker(name="leaver", step_s=0.1, leaves_after_s=1.25)
    result, _, learner = run(config, workers, steps=200, lease_s=1.0)
    assert result.faults == 1
    assert sorted(set(learner.steps)) == list(range(200))


def test_a_run_whose_workers_all_die_says_so() -> None:
    with pytest.raises(Unavailable):
        run(ServerConfig(rule="sgd"), [SimulatedWorker(name="leaver", step_s=0.1, leaves_after_s=1.25)])


def test_a_run_that_diverges_ends_and_says_so() -> None:
    # Each step goes ten times as far as the goal is away.
    config = ServerConfig(rule="sgd", rate=11.0)
    with pytest.raises(InvalidInput, match="learning rate"), np.errstate(over="ignore", invalid="ignore"):
        run(config, machines(2), steps=400)


def test_a_run_is_the_same_when_it_is_repeated() -> None:
    first, weights, _ = run(ServerConfig(rule="dc-adaptive", delay_compensation=2.0), machines(5))
    again, same, _ = run(ServerConfig(rule="dc-adaptive", delay_compensation=2.0), machines(5))
    assert (first, weights.tobytes()) == (again, same.tobytes())


WIRES: tuple[tuple[Format, Format], ...] = (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16"))
"""Of the updates, and of the weights that go with them."""


@pytest.mark.parametrize(("wire", "weights"), WIRES)
def test_bytes_are_those_of_the_formula(wire: Format, weights: Format) -> None:
    link = Link(bytes_per_s=1_000.0)
    config = ServerConfig(rule="sgd", period=2)
    result, _, _ = run(config, machines(1, link=link), steps=40, wire=wire)
    sent, received = packed_bytes(len(GOAL), 0, wire), packed_bytes(len(GOAL), 0, weights)
    assert (result.bytes_sent, result.bytes_received) == (20 * sent, 20 * received)
    assert result.virtual_seconds == pytest.approx(40 * 0.1 + 20 * (sent + received) / 1_000)


@pytest.mark.parametrize(("wire", "weights"), WIRES)
def test_updates_and_weights_are_rounded_as_they_would_be_on_their_way(wire: Format, weights: Format) -> None:
    _, found, _ = run(ServerConfig(rule="sgd"), machines(1), steps=7, wire=wire)
    expected = np.zeros(3, np.float32)
    for _ in range(7):
        there, _ = unpack(pack(expected, NONE, weights), values=3, buffers=0)
        back, _ = unpack(pack(there - GOAL, NONE, wire), values=3, buffers=0)
        expected -= np.float32(RATE) * back
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_short_numbers_reach_the_goal_all_the_same(wire: Format) -> None:
    for config in (ServerConfig(rule="sgd"), OuterConfig(period=5)):
        _, weights, _ = run(config, machines(4), steps=1_000, wire=wire)
        np.testing.assert_allclose(weights, GOAL, rtol=2.0**-7)


def test_diloco_sends_a_fortieth_of_what_sgd_sends() -> None:
    every, _, _ = run(HOSTED["sgd"], machines(4), steps=2_000)
    rounds, _, _ = run(HOSTED["diloco"], machines(4), steps=2_000, lease_s=60.0)
    assert every.bytes_sent == every.bytes_received == 2_000 * SIZE
    assert 0 < rounds.bytes_sent <= every.bytes_sent / 40
    assert 0 < rounds.bytes_received <= every.bytes_received / 40


def test_a_push_of_several_steps_sends_less() -> None:
    every, _, _ = run(ServerConfig(rule="sgd"), machines(2))
    fifth, _, learner = run(ServerConfig(rule="sgd", period=5), machines(2))
    assert (every.bytes_sent, every.bytes_received) == (120 * SIZE, 120 * SIZE)
    assert (fifth.bytes_sent, fifth.bytes_received) == (24 * SIZE, 24 * SIZE)
    assert sorted(learner.steps) == list(range(120))


def test_clipped_updates_move_the_weights_by_no_more_than_that() -> None:
    one = [SimulatedWorker(name="w0", step_s=1.0)]
    config = ServerConfig(rule="sgd", masking=Masking(clip=0.5))
    _, weights, _ = run(config, one, steps=4)
    # The gradient is longer than that all the way, and always points to the goal.
    assert np.linalg.norm(weights) == pytest.approx(4 * RATE * 0.5)
    assert weights / np.linalg.norm(weights) == pytest.approx(GOAL / np.linalg.norm(GOAL))


def test_a_clipped_update_that_is_computed_again_is_the_same() -> None:
    workers = [SimulatedWorker(name=f"w{number}", step_s=1.0) for number in range(3)]
    trust = TrustConfig(recheck=1.0, tolerance=0.0)
    result, _, _ = run(OuterConfig(period=2, masking=Masking(clip=0.01), trust=trust), workers, steps=12)
    assert result.rechecks > 0
    assert result.quarantined == []


def test_noise_is_added_to_what_workers_send() -> None:
    one = [SimulatedWorker(name="w0", step_s=1.0)]
    clean, noisy = (
        run(ServerConfig(rule="sgd", masking=Masking(clip=1.0, noise=noise)), one)[1] for noise in (0.0, 0.5)
    )
    assert not np.allclose(clean, noisy)
    assert np.linalg.norm(noisy - GOAL) < 1.0  # and the run still finds its way
