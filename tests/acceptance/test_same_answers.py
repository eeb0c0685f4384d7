"""What comes out of the fleet is what the networks say: each answer equals that of the same file run directly."""

from collections.abc import Sequence

import numpy as np
import pytest

from models.data import ImageSet, read_sample
from models.manifest import load_manifest
from models.session import load_model
from tierkit.client import Client, ImageResult
from tierkit.tensors import Array
from tierkit.types import Tier

BATCH = 50


def direct(tier: Tier, sample: ImageSet) -> Array:
    """Class per image, in the batches that the scheduler makes."""
    model = load_model(load_manifest().default_for(tier))
    batches = [sample.images[start : start + BATCH] for start in range(0, len(sample), BATCH)]
    return np.concatenate([model.run({"images": batch}, ["logits"])["logits"].argmax(-1) for batch in batches])


@pytest.fixture(scope="module")
def sample() -> ImageSet:
    return read_sample().take(np.arange(600))


@pytest.fixture(scope="module")
def results(fleet_url: str, sample: ImageSet) -> Sequence[ImageResult]:
    with Client(fleet_url) as client:
        job = client.wait(client.submit(sample.images, scheme="mapping", batch_size=BATCH), budget_s=50)
        return list(client.results(job))


def test_coarse_answers(results: Sequence[ImageResult], sample: ImageSet) -> None:
    assert [result.coarse.index for result in results if result.coarse] == direct(Tier.END, sample).tolist()


@pytest.mark.parametrize("tier", [Tier.EDGE, Tier.CLOUD])
def test_fine_answers(results: Sequence[ImageResult], sample: ImageSet, tier: Tier) -> None:
    expected = direct(tier, sample)
    given = {result.index: result.fine.index for result in results if result.fine and result.fine.tier is tier}
    assert len(given) >= BATCH, f"the {tier} has done nothing"
    assert given == {index: int(expected[index]) for index in given}


def test_both_upper_tiers_have_done_it_all(results: Sequence[ImageResult], sample: ImageSet) -> None:
    assert sum(result.fine is not None for result in results) == len(sample)
