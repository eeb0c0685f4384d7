"""`terrace up --models`: which services get the set."""

from pathlib import Path

import pytest

from terrace.commands.up import with_models
from tests.model_sets import colour_network, colour_set
from tierkit.errors import SetupError
from tierkit.fleet import FleetPlan, ServicePlan, local_plan
from tierkit.types import Tier


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return colour_set(folder / "set", {"end": colour_network(folder / "net.onnx")})


def sets_of(plan: FleetPlan) -> dict[str, str | None]:
    return {service.name: service.settings.get("models") for service in plan.services}


def test_nodes_get_their_networks_from_the_scheduler_and_follow_its_releases(models: Path) -> None:
    plan = local_plan({Tier.END: 2})
    assert sets_of(with_models(plan, models, follow=True)) == {"scheduler": str(models), "end-1": None, "end-2": None}
    assert sets_of(with_models(plan, models)) == dict.fromkeys(("scheduler", "end-1", "end-2"), str(models))
    assert with_models(plan, None, follow=True) == plan


def test_a_node_that_names_a_set_keeps_it(models: Path) -> None:
    plan = local_plan({Tier.END: 1}, node={"models": "/srv/other"})
    assert sets_of(with_models(plan, models, follow=True)) == {"scheduler": str(models), "end-1": "/srv/other"}


def test_nodes_on_a_machine_without_a_scheduler_get_the_set(models: Path) -> None:
    plan = FleetPlan(services=(ServicePlan(name="end-1", kind="end", settings={}),), scheduler_url="http://hub:8070")
    assert sets_of(with_models(plan, models, follow=True)) == {"end-1": str(models)}


def test_a_set_that_does_not_do_for_a_node_is_refused(models: Path) -> None:
    with pytest.raises(SetupError, match="--cloud 0"):
        with_models(local_plan({Tier.END: 1, Tier.CLOUD: 1}), models, follow=True)
