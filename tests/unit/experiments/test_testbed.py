"""The answers that stand in for networks which are too slow for their emulated speed."""

from functools import partial
from pathlib import Path

import numpy as np

from encryption.serving import Head, Tail
from experiments.profile import read_profile
from experiments.testbed import Encoding, prepare_networks
from models.data import read_sample
from models.manifest import load_manifest
from models.session import load_encoder, load_model
from tierkit.emulation import Answers
from tierkit.types import EncoderKind, FeatureForm, Tier

IMAGES = read_sample().take(np.arange(6))


def test_a_network_that_serves_features_has_the_answers_to_these_as_well(tmp_path: Path) -> None:
    manifest = load_manifest()
    entry, encoder = manifest.default_for(Tier.CLOUD), manifest.encoder("wrn-16-2.conv1")
    profile = read_profile("paper").with_nodes(end=1, edge=0, cloud=1)
    prepared = prepare_networks(profile, lambda: IMAGES, tmp_path, None, Encoding(kind=EncoderKind.CONV1))
    assert [(network.tier, network.name) for network in prepared] == [
        (Tier.END, "mobilenet-v1-0.5"),
        (Tier.CLOUD, entry.name),
    ]
    path = prepared[-1].answers
    assert path is not None
    tail = Tail(encoder, entry, partial(load_encoder, encoder, entry, "tail"), ())
    # The file is that of network and tail.
    network = load_model(entry)
    answers = Answers.load(path, [tail])
    assert Answers.load(path, [network]).rows == answers.rows
    # As a device encodes them, with its own number of cores and in its own batches.
    head = Head(encoder, entry, partial(load_encoder, encoder, entry, "head", threads=1))
    for batch in (IMAGES.images[:2], IMAGES.images[2:]):
        features = head.run({"images": batch}, [FeatureForm.UINT8])[FeatureForm.UINT8]
        found = answers.look_up(features, ["probabilities"])
        assert found is not None
        expected = tail.run({"features": features}, ["probabilities"])["probabilities"]
        assert np.allclose(found["probabilities"], expected, atol=1e-5)
        whole = answers.look_up(batch, ["probabilities"])
        assert whole is not None
        assert np.allclose(whole["probabilities"], network.run({"images": batch}, ["probabilities"])["probabilities"])
