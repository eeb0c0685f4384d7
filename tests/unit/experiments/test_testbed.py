"""The answers that stand in for networks which are too slow for their emulated speed."""

from functools import partial
from pathlib import Path

import numpy as np

from encryption.serving import HeadModel, TailModel
from experiments.emulation.compute import Answers
from experiments.profile import read_profile
from experiments.testbed import Encoding, Network, measure_networks, plan_fleet, with_answers
from models.data import read_sample
from models.manifest import load_manifest
from models.session import load_encoder, load_model
from tierkit.types import EncoderKind, FeatureForm, Tier

IMAGES = read_sample().take(np.arange(6))


def test_a_network_that_serves_features_has_the_answers_to_these_as_well(tmp_path: Path) -> None:
    manifest = load_manifest()
    entry, encoder = manifest.default_for(Tier.CLOUD), manifest.encoder("wrn-16-4.conv1")
    profile = read_profile("paper").with_nodes(end=1, edge=0, cloud=1)
    encoding = Encoding(kind=EncoderKind.CONV1)
    measured = measure_networks(profile)
    prepared = [with_answers(network, IMAGES.images, tmp_path, encoding) for network in measured]
    assert [(network.tier, network.name) for network in prepared] == [
        (Tier.END, "mobilenet-v1-0.5"),
        (Tier.CLOUD, entry.name),
    ]
    path = prepared[-1].answers
    assert path is not None
    tail = TailModel(encoder, entry, partial(load_encoder, encoder, entry, "tail"), ())
    # The file is that of network and tail.
    network = load_model(entry)
    answers = Answers.load(path, [tail])
    assert Answers.load(path, [network]).rows == answers.rows
    # As a device encodes them, with its own number of cores and in its own batches.
    head = HeadModel(encoder, entry, partial(load_encoder, encoder, entry, "head", threads=1))
    for batch in (IMAGES.images[:2], IMAGES.images[2:]):
        features = head.run({"images": batch}, [FeatureForm.UINT8])[FeatureForm.UINT8]
        found = answers.look_up(features, ["probabilities"])
        assert found is not None
        expected = tail.run({"features": features}, ["probabilities"])["probabilities"]
        assert np.allclose(found["probabilities"], expected, atol=1e-5)
        whole = answers.look_up(batch, ["probabilities"])
        assert whole is not None
        assert np.allclose(whole["probabilities"], network.run({"images": batch}, ["probabilities"])["probabilities"])


def test_every_service_gets_a_port_that_is_free(tmp_path: Path) -> None:
    profile = read_profile("paper").with_nodes(end=2, edge=1, cloud=0)
    networks = [Network(tier=tier, name="x", real_ms_per_image=1.0, emulated_ms_per_image=None) for tier in Tier]
    scheduler, *nodes = plan_fleet(profile, networks, tmp_path).services
    assert scheduler.settings["port"] == "0"
    # The launcher's own choice for nodes is a free port as well, unless their settings name one.
    assert [(node.settings["host"], "port" in node.settings) for node in nodes] == [
        ("127.0.1.1", False),
        ("127.0.1.2", False),
        ("127.0.2.1", False),
    ]
