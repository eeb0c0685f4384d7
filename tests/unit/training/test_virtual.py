"""Runs on virtual time, with gradients that need no network: of half the square of the distance to a goal."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tierkit.errors import Unavailable
from training.strategies.build import build_strategy
from training.strategies.config import STRATEGIES, OuterConfig, Sends, ServerConfig, StrategyConfig
from training.units import Computed, Flat
from training.virtual import Link, Simulated, SimulatedWorker, simulate

GOAL = np.array([1.0, -2.0, 0.5], np.float32)
NONE = np.zeros(0, np.float32)
SIZE = 4 * len(GOAL)
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

    def compute(self, steps: range, sends: Sends) -> Computed:
        before, total = self.here, np.zeros(3, np.float32)
        for step in steps:
            self.steps.append(step)
            gradient = self.here - GOAL
            total = total + gradient
            self.here = self.here - np.float32(RATE) * gradient
        loss = float(np.square(self.here - GOAL).sum() / 2)
        return Computed(values=total if sends == "gradient" else before - self.here, buffers=NONE, loss=loss)


def run(
    config: StrategyConfig,
    workers: list[SimulatedWorker],
    *,
    steps: int = 120,
    serve_s: float = 0.0,
    lease_s: float = 5.0,
) -> tuple[Simulated, Flat, Quadratic]:
    learner = Quadratic()
    strategy = build_strategy(
        config,
        np.zeros(3, np.float32),
        NONE,
        steps=steps,
        rate=lambda step: RATE,
        peak_rate=RATE,
        workers=len(workers),
        lease_s=lease_s,
    )
    result = simulate(strategy, learner, config.sends, workers, serve_s=serve_s)
    assert strategy.finished
    return result, strategy.weights, learner


def machines(count: int, *, step_s: float = 0.1, link: Link | None = None) -> list[SimulatedWorker]:
    return [SimulatedWorker(name=f"w{n}", step_s=step_s, link=link or Link()) for n in range(count)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_reaches_the_goal_with_four_workers(name: str) -> None:
    # AdaGrad's own rate is made for networks.
    config = STRATEGIES[name]
    if config.family == "server" and config.rate is not None:
        config = config.model_copy(update={"rate": 0.5})
    if config.family == "outer":
        config = config.model_copy(update={"local_steps": 5})
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


def test_workers_share_the_steps_until_the_host_is_busy_all_the_time() -> None:
    alone, _, _ = run(ServerConfig(rule="sgd"), machines(1))
    four, _, _ = run(ServerConfig(rule="sgd"), machines(4))
    assert alone.virtual_seconds / four.virtual_seconds == pytest.approx(4)
    crowd, _, _ = run(ServerConfig(rule="sgd"), machines(60), serve_s=0.01)
    assert crowd.virtual_seconds >= 120 * 2 * 0.01


def test_weights_are_as_old_as_there_are_other_workers() -> None:
    result, _, _ = run(ServerConfig(rule="sgd"), machines(8), steps=800, serve_s=0.001)
    assert np.mean(result.staleness) == pytest.approx(7, abs=0.5)


def test_a_slow_worker_delays_rounds_and_not_single_updates() -> None:
    def slowed(config: StrategyConfig) -> float:
        calm, slow = machines(8), [SimulatedWorker(name="slow", step_s=0.4), *machines(7)]
        seconds = [run(config, workers, steps=800)[0].virtual_seconds for workers in (calm, slow)]
        return seconds[1] / seconds[0]

    # 7 of 8 workers at full speed and one at a quarter: 8 / 7.25.
    assert slowed(ServerConfig(rule="sgd")) == pytest.approx(8 / 7.25, rel=0.02)
    assert slowed(OuterConfig(local_steps=10)) == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("config", [ServerConfig(rule="sgd"), OuterConfig(local_steps=5)], ids=lambda each: each.family)
def test_a_run_outlives_its_workers(config: StrategyConfig) -> None:
    workers = machines(4)
    workers[1] = SimulatedWorker(name="leaver", step_s=0.1, leaves_after_s=1.25)
    result, _, learner = run(config, workers, steps=200, lease_s=1.0)
    assert result.faults == 1
    assert sorted(set(learner.steps)) == list(range(200))


def test_a_run_whose_workers_all_die_says_so() -> None:
    with pytest.raises(Unavailable):
        run(ServerConfig(rule="sgd"), [SimulatedWorker(name="leaver", step_s=0.1, leaves_after_s=1.25)])


def test_a_run_is_the_same_when_it_is_repeated() -> None:
    first, weights, _ = run(ServerConfig(rule="dc-adaptive", delay_compensation=2.0), machines(5))
    again, same, _ = run(ServerConfig(rule="dc-adaptive", delay_compensation=2.0), machines(5))
    assert (first, weights.tobytes()) == (again, same.tobytes())


def test_a_push_of_several_steps_sends_less() -> None:
    every, _, _ = run(ServerConfig(rule="sgd"), machines(2))
    fifth, _, learner = run(ServerConfig(rule="sgd", n_fetch=10, n_push=5), machines(2))
    assert (every.bytes_sent, every.bytes_received) == (120 * SIZE, 120 * SIZE)
    assert (fifth.bytes_sent, fifth.bytes_received) == (24 * SIZE, 12 * SIZE)
    assert sorted(learner.steps) == list(range(120))
