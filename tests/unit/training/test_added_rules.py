"""Strategies of packages: their rules change the weights of a run, survive an interruption, and are checked."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import TypeAdapter

from tests.extension_package.terrace_example.strategies import FedAdam
from tierkit.errors import BrokenExtension, InvalidInput
from tierkit.extensions import BUILT_IN
from training.strategies.build import build_strategy
from training.strategies.config import HostedConfig, OuterConfig, ServerConfig
from training.strategies.finding import find_hosted, find_strategy
from training.strategies.protocol import Strategy
from training.strategies.rules import Moment, StrategyKind, UpdateRule
from training.trust.config import TrustConfig
from training.units import Computed, Flat, Update

EXAMPLE = "tests.extension_package.terrace_example.strategies"
GOAL = np.array([1, -2, 3], np.float32)


class Steep(UpdateRule):
    """Half a step of gradient descent, with the circumstances recorded."""

    seen: ClassVar[list[Moment]] = []

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        self.seen.append(moment)
        weights -= np.float32(0.5) * update


STEEP = StrategyKind(config=ServerConfig(rule="steep"), rule=Steep)
NOT_A_STRATEGY = 5


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "fedadam": f"{EXAMPLE}:FEDADAM",
        "softsync": f"{EXAMPLE}:SOFTSYNC",
        "steep": f"{__name__}:STEEP",
        "adagrad": f"{__name__}:STEEP",
        "number": f"{__name__}:NOT_A_STRATEGY",
    }.items():
        monkeypatch.setitem(BUILT_IN["terrace.strategies"], name, value)
    Steep.seen.clear()


def begun(config: HostedConfig, *, workers: int = 1) -> Strategy:
    learner: Any = SimpleNamespace(
        steps=1_000, config=SimpleNamespace(peak_rate=0.1, momentum=0.9), rate=lambda step: 0.1
    )
    start = np.zeros(3, np.float32), np.zeros(0, np.float32)
    return build_strategy(config, start, learner, workers=workers, lease_s=10.0)


def step(strategy: Strategy, worker: str = "w") -> None:
    lease = strategy.grant(worker, 0.0)
    assert lease is not None
    near = strategy.weights - GOAL
    values = near if strategy.sends == "gradient" else np.float32(0.1) * near
    computed = Computed(values=values, buffers=np.zeros(0, np.float32), loss=0.0)
    assert strategy.take(Update(lease=lease.number, worker=worker, steps=lease.unit.span, computed=computed), 0.0)


def distance(strategy: Strategy) -> float:
    return float(np.linalg.norm(strategy.weights - GOAL))


@pytest.mark.parametrize("name", ["fedadam", "softsync", "steep"])
def test_a_rule_of_a_package_trains(name: str) -> None:
    strategy = begun(find_hosted(name))
    before = distance(strategy)
    for _ in range(100):
        step(strategy)
    assert distance(strategy) < before / 2


@pytest.mark.parametrize("name", ["fedadam", "softsync", "steep"])
def test_an_interrupted_run_continues_to_the_bit(name: str) -> None:
    whole = begun(find_hosted(name))
    for _ in range(10):
        step(whole)
    vectors, figures = whole.state()
    copies = {key: value.copy() for key, value in vectors.items()}
    other = begun(find_hosted(name))
    other.restore(copies, figures)
    for each in (whole, other):
        for _ in range(10):
            step(each)
    assert whole.weights.tobytes() == other.weights.tobytes()


def test_a_rule_gets_its_circumstances() -> None:
    strategy = begun(find_hosted("steep"))
    step(strategy)
    step(strategy)
    first, second = Steep.seen
    assert (first.version, first.steps, first.rate, first.start) == (0, 1, 0.1, None)
    assert second.version == 1


def test_a_rule_gets_the_centre_of_judged_updates() -> None:
    strategy = begun(OuterConfig(rule="fedadam", period=1, trust=TrustConfig()), workers=3)
    for worker in ("a", "b", "c"):
        step(strategy, worker)
    assert strategy.version == 1
    assert distance(strategy) < float(np.linalg.norm(GOAL))


def test_the_configuration_travels_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    config = find_hosted("fedadam")
    content = TypeAdapter(HostedConfig).dump_json(config)
    monkeypatch.delitem(BUILT_IN["terrace.strategies"], "fedadam")
    assert TypeAdapter(HostedConfig).validate_json(content) == config
    with pytest.raises(InvalidInput, match=r"no rule 'fedadam' of the family outer here; there are momentum\."):
        begun(config)


def test_a_configuration_without_a_package_can_be_read_by_older_workers() -> None:
    for config in (OuterConfig(), ServerConfig(rule="sgd")):
        assert not {"options", "pushes"} & config.model_dump().keys()
    assert "rule" not in OuterConfig().model_dump()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('family = "outer"\nrule = "fedadam"\noptions = { first = 1.5 }', "does not take these options: first and"),
        ('family = "outer"\nrule = "fedadam"\noptions = { speed = 1.5 }', "does not take these options: .*speed"),
        ('family = "outer"\nrule = "fedadam"\noptions = { First = 0.5 }', "options"),
        ('family = "outer"\nrule = "fedadam"\noptions = { first = "high" }', "options.first is 'high'"),
        ('family = "outer"\nrule = "fedadam"\nmomentum = 0.9', "momentum and nesterov are for the rule momentum"),
        ('family = "outer"\noptions = { first = 0.5 }', "options are for rules of packages"),
        ('rule = "sgd"\noptions = { first = 0.5 }', "options and pushes are for rules of packages"),
        ('rule = "sgd"\npushes = "change"', "options and pushes are for rules of packages"),
        ('rule = "fedadam"', 'needs family = "outer"'),
        ('family = "outer"\nrule = "softsync"', 'needs family = "server"'),
        ('family = "outer"\nrule = "diloco"', "'diloco' is the name of a strategy that has no rule"),
        ('family = "outer"\nrule = "no-such"', "no rule 'no-such' of the family outer here; there are momentum."),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(Exception, match=error):
        find_strategy(str(file))


def test_a_file_gives_the_rule_other_numbers(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('family = "outer"\nrule = "fedadam"\nperiod = 2\noptions = { rate = 0.5 }')
    assert find_strategy(str(file)) == OuterConfig(rule="fedadam", period=2, options={"rate": 0.5})


def test_what_is_not_a_strategy_is_named() -> None:
    with pytest.raises(BrokenExtension, match="'number' of a package is int, not a configuration"):
        find_strategy("number")
    with pytest.raises(BrokenExtension, match="'adagrad' of a package has the name of a rule of Terrace"):
        find_strategy("adagrad")


def test_a_rule_that_fails_when_it_is_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FedAdam, **options: float) -> None:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(FedAdam, "__init__", fail)
    with pytest.raises(BrokenExtension, match="'fedadam' of a package fails: RuntimeError: no GPU"):
        begun(find_hosted("fedadam"))
