"""Head and tail of each encoder, loaded by what the manifest says of them."""

import numpy as np

from models.data import read_sample
from models.manifest import load_manifest
from models.session import load_encoder, load_model


def test_head_and_tail_give_the_answers_of_the_network():
    manifest = load_manifest()
    images = read_sample().images[:100]
    assert manifest.encoders
    for encoder in manifest.encoders:
        network = manifest.entry(encoder.network)
        head, tail = (load_encoder(encoder, network, side) for side in ("head", "tail"))
        assert (head.name, tail.name) == (f"{encoder.name}-head", encoder.name)
        assert (head.sha256, tail.sha256) == (encoder.head.sha256, encoder.tail.sha256)
        features = head.run({"images": images}, ["features"])
        assert features["features"].shape == (100, *encoder.feature_shape), encoder.name
        joined = tail.run(features, ["logits", "probabilities"])
        np.testing.assert_allclose(joined["probabilities"].sum(axis=1), 1, rtol=1e-5)
        if encoder.kind == "conv1":
            whole = load_model(network).run({"images": images}, ["logits"])["logits"]
            assert np.mean(whole.argmax(1) == joined["logits"].argmax(1)) >= 0.97, encoder.name
