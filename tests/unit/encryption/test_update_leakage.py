"""Images read back from an update, with and without masking."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from encryption.audit.updates import Judge, Mask, UpdateAudit
from models.dataset import Dataset
from models.training.config import find_config
from tests.digits import write_digits
from training.masking import Masking, masked
from training.units import Computed

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]


def masking(chosen: Masking | None) -> Mask:
    """The masking of a worker."""
    return lambda values, draw: masked(Computed(values=values, buffers=values[:0], loss=0.0), chosen, draw).values


def naming(labels: np.ndarray) -> Judge:
    return lambda images: labels


def test_clipping_hides_nothing_and_noise_hides_an_image(tmp_path: Path) -> None:
    dataset = Dataset.open("mnist", write_digits(tmp_path, 1_200))
    audit = UpdateAudit(find_config("mnist-64-64", None), dataset.read("train"), dataset.hierarchy)
    found = {}
    for noise in (None, 0.0, 0.1):
        mask = masking(None if noise is None else Masking(clip=1.0, noise=noise))
        direct, search = audit.attack(1, mask, steps=4, seed=0)
        assert (direct.name, search.name) == ("first layer", "search")
        assert search.found.shape == direct.originals.shape == (1, 28, 28, 1)
        found[noise] = direct.ssim
        assert direct.recognised(naming(direct.labels)) == 1.0
        assert direct.recognised(naming(direct.labels + np.uint8(1))) == 0.0
    assert found[None] > 0.99  # one image in the clear
    assert found[0.0] == pytest.approx(found[None], abs=0.01)  # a shorter gradient points in the same direction
    assert found[0.1] < 0.5
