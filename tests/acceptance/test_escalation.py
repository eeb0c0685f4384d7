"""Images go up one by one: each answer of a fleet is that of the networks run directly with the same thresholds."""

import csv
import io
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

from models.data import ImageSet, read_sample
from models.escalation import load_tuning, margin
from models.manifest import load_manifest
from models.session import OnnxModel, load_model
from tierkit.client import Client, CoarseResults, FineResults
from tierkit.errors import InvalidInput
from tierkit.tensors import Array
from tierkit.types import Tier

BATCH = 50


@dataclass(frozen=True)
class Direct:
    """The three networks, called without any service."""

    models: dict[Tier, OnnxModel]

    def probabilities(self, tier: Tier, images: Array) -> Array:
        return self.models[tier].run({"images": images}, ["probabilities"])["probabilities"]

    def route(self, images: Array, thresholds: dict[Tier, float]) -> list[tuple[Tier, int]]:
        """Who answers each image what, in the tasks that the scheduler makes. `thresholds`: of the margin below which
        an image leaves a tier; a tier without one is left by all."""
        answers: list[tuple[Tier, int]] = []
        for start in range(0, len(images), BATCH):
            here = images[start : start + BATCH]
            final: dict[int, tuple[Tier, int]] = {}
            going = np.arange(len(here))
            for tier in Tier:
                if not len(going):
                    break
                found = self.probabilities(tier, here[going])
                final |= {int(at): (tier, int(label)) for at, label in zip(going, found.argmax(1), strict=True)}
                if tier in thresholds:
                    going = going[margin(found) < thresholds[tier]]
            answers += [final[at] for at in range(len(here))]
        return answers


@pytest.fixture(scope="module")
def direct() -> Direct:
    manifest = load_manifest()
    return Direct({tier: load_model(manifest.default_for(tier)) for tier in Tier})


@pytest.fixture(scope="module")
def sample() -> ImageSet:
    return read_sample().take(np.arange(200))


@pytest.mark.parametrize(
    ("lowest", "asked"),
    [("edge", {"escalate": "budget"}), ("end", {"escalate": "threshold", "escalate_accuracy": 1})],
)
def test_each_answer_is_that_of_the_networks(
    fleet_url: str, sample: ImageSet, direct: Direct, lowest: str, asked: dict[str, str | float]
) -> None:
    tuning = load_tuning()

    def below(lower: Tier, upper: Tier) -> float:
        gate = tuning.gate(lower, upper)
        point = gate.for_budget(0.5) if asked["escalate"] == "budget" else gate.for_accuracy(1)
        return point.below

    thresholds = {Tier.EDGE: below(Tier.EDGE, Tier.CLOUD)}
    if lowest == "end":
        thresholds[Tier.END] = below(Tier.END, Tier.EDGE)
    expected = direct.route(sample.images, thresholds)
    with Client(fleet_url) as client:
        submitted = client.submit(
            sample.images,
            labels=sample.fine,
            scheme="mapping",
            escalate_from=lowest,
            batch_size=BATCH,
            **asked,  # type: ignore[arg-type]
        )
        job = client.wait(submitted, budget_s=50)
        results = list(client.results(job))
        rows = list(csv.DictReader(io.StringIO(httpx.get(f"{fleet_url}/v1/jobs/{job.id}/results?format=csv").text)))

    given = []
    for result in results:
        assert result.coarse is not None
        given.append((result.answered_by, (result.fine or result.coarse).index))
        assert result.fallback is None
        assert result.not_escalated == (result.answered_by is not Tier.CLOUD)
        assert (result.fine is None) == (result.answered_by is Tier.END)
    assert given == expected
    assert [(row["answered_by"], row["not_escalated"]) for row in rows] == [
        (tier, "false" if tier is Tier.CLOUD else "true") for tier, _ in expected
    ]

    tiers = [tier for tier, _ in expected]
    assert job.final_tier == {tier: tiers.count(tier) for tier in Tier if tier in tiers}
    assert job.sent_up == {Tier.EDGE: len(tiers) - tiers.count(Tier.END), Tier.CLOUD: tiers.count(Tier.CLOUD)}
    assert (job.fallback, job.answered_fine) == (0, len(tiers) - tiers.count(Tier.END))
    assert sample.fine is not None
    right = [label == truth for (tier, label), truth in zip(expected, sample.fine, strict=True) if tier is not Tier.END]
    assert job.fine_accuracy == pytest.approx(np.mean(right))
    assert job.final_coarse_accuracy is not None
    assert [gate["below"] for gate in job.policy["gates"] if "below" in gate] == sorted(
        thresholds.values(), reverse=True
    )


def test_scheme_adaptive_routes_image_by_image_too(fleet_url: str, sample: ImageSet, direct: Direct) -> None:
    below = load_tuning().gate(Tier.EDGE, Tier.CLOUD).for_budget(0.5).below
    with Client(fleet_url) as client:
        job = client.wait(client.submit(sample.images[:BATCH], scheme="adaptive", escalate="budget"), budget_s=50)
        results = list(client.results(job))
    given = [(result.answered_by, result.fine.index) for result in results if result.fine]
    assert given == direct.route(sample.images[:BATCH], {Tier.EDGE: below})


def test_a_few_images_at_once_are_routed_as_well(fleet_url: str, sample: ImageSet) -> None:
    with Client(fleet_url) as client:
        first, last = client.classify(sample.images[:10], scheme="mapping", escalate="budget")
    assert isinstance(first, CoarseResults)
    assert isinstance(last, FineResults)
    assert all(result.answered_by is None for result in first.results)
    assert {result.answered_by for result in last.results} <= {Tier.EDGE, Tier.CLOUD}
    assert all(result.fine is not None for result in last.results)


def test_what_cannot_be_reached_is_refused_and_says_what_can(fleet_url: str, sample: ImageSet) -> None:
    can = load_tuning().gate(Tier.EDGE, Tier.CLOUD).upper_accuracy
    with (
        Client(fleet_url) as client,
        pytest.raises(InvalidInput, match=rf"1\.1 times .* cannot be reached.* {can:.4f}"),
    ):
        client.submit(sample.images[:1], scheme="mapping", escalate="threshold", escalate_accuracy=1.1)
