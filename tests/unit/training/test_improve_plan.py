"""The strategy of a run on kept pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.own_networks import CONFIG, network, own
from tierkit.errors import InvalidInput, SetupError
from training.improve.plan import IMPROVE, Plan, fitted_to, read_plan, write_plan
from training.strategies.config import OuterConfig
from training.strategies.finding import HOSTED


@pytest.mark.parametrize(("devices", "together"), [(3, 3), (64, 64), (1_000, 64)])
def test_a_round_has_as_many_devices_as_can_be_judged_together(devices: int, together: int) -> None:
    strategy, found = fitted_to(IMPROVE, devices)
    assert isinstance(strategy, OuterConfig)
    assert (found, strategy.workers) == (together, together)
    assert strategy.once


@pytest.mark.parametrize("devices", [1, 2])
def test_few_devices_need_a_strategy_that_trusts_them(devices: int) -> None:
    with pytest.raises(InvalidInput, match="fedavg"):
        fitted_to(IMPROVE, devices)
    assert fitted_to(HOSTED["fedavg"], devices)[1] == devices


@pytest.mark.parametrize("name", ["lbfgs", "tournament"])
def test_a_strategy_that_needs_the_images_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        fitted_to(HOSTED[name], 3)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = Plan(own=own(network()), network=CONFIG)
    with pytest.raises(SetupError):
        read_plan(tmp_path)
    write_plan(tmp_path, plan, network())
    assert read_plan(tmp_path) == (plan, network())
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(SetupError):
        read_plan(tmp_path)
