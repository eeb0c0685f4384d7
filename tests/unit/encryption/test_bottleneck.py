"""The learned encoders that ship: answers, payload and size, without torch."""

import numpy as np
import pytest

from encryption.packing import Quantiser
from models.data import read_sample
from models.manifest import EncoderEntry, load_manifest
from models.session import load_encoder
from models.split import FEATURES
from tierkit.types import EncoderKind


@pytest.fixture(params=["resnet-34.bottleneck", "wrn-16-4.bottleneck"])
def encoder(request: pytest.FixtureRequest) -> EncoderEntry:
    learned = load_manifest().encoder(request.param)
    assert learned.kind is EncoderKind.BOTTLENECK
    return learned


def test_head_noise_packing_and_tail_answer_as_well_as_the_manifest_says(encoder: EncoderEntry):
    network = load_manifest().entry(encoder.network)
    head, tail = (load_encoder(encoder, network, side) for side in ("head", "tail"))
    quantiser = Quantiser.of(encoder)
    draw = np.random.default_rng(0)
    sample = read_sample()
    features = head.run({"images": sample.images}, [FEATURES])[FEATURES]
    assert features.shape[1:] == encoder.feature_shape
    assert 0 <= features.min() <= features.max() <= (encoder.levels - 1) * encoder.scale + 1e-6
    noise = draw.standard_normal(features.shape, dtype=np.float32) * np.float32(encoder.noise)
    packed = quantiser.pack(features + noise)
    right = tail.run({FEATURES: quantiser.unpack(packed)}, ["logits"])["logits"].argmax(axis=1) == sample.fine
    # 1,000 images: four standard deviations are six points.
    assert right.mean() == pytest.approx(encoder.fine_accuracy, abs=0.06)
    assert packed[0].nbytes <= 1024, "without any coding"
    assert set(np.unique(packed)) == set(range(encoder.levels)), "no level is wasted"


def test_the_manifest_names_the_upper_network_and_the_training(encoder: EncoderEntry):
    assert encoder.training is not None
    assert encoder.head.part == encoder.tail.part == "whole"
    assert encoder.head_parameters < encoder.parameters
