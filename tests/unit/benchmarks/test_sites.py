"""The simulated fleet of sites, in small, and what is timed of its mapping."""

import pytest

from benchmarks.sites import mapping_costs, site_case
from experiments.scale.world import simulate
from tierkit.types import Scheme, Share


@pytest.mark.parametrize("share", list(Share))
@pytest.mark.parametrize("scheme", [Scheme.MAPPING, Scheme.ADAPTIVE])
@pytest.mark.parametrize("site_jobs", [False, True])
def test_nodes_that_die_lose_nothing_and_send_no_picture_astray(share: Share, scheme: Scheme, site_jobs: bool) -> None:
    found = simulate(
        site_case(scheme, None, 240, site_jobs=site_jobs, share=share, churn_per_minute=30.0, most_deaths=60)
    )
    assert found["deaths"] >= 20
    assert sum(found["answers"].values()) == 240
    assert found["answers"].get("failed", 0) == 0
    assert found["strays"] == 0
    if share is not Share.SITES:
        assert found["visits"] == 0
    if share is Share.NONE:
        assert found["by_tier"]["cloud"] == 0


def test_a_job_of_all_sites_takes_hardly_longer_than_the_best_fixed_assignment() -> None:
    found = simulate(site_case(Scheme.ADAPTIVE, None, 800, site_jobs=False))
    assert found["seconds"] <= 1.05 * found["bound_seconds"]


def test_the_cost_of_a_mapping_is_taken_after_each_change() -> None:
    costs = mapping_costs(sites=3, changes=20)
    assert len(costs["one"]) == 20
    assert len(costs["all"]) == 10
