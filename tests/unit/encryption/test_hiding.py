"""The step of a package between an encoder's head and the wire."""

from typing import Any

import numpy as np
import pytest

from cloud_node.engines.oip import OipEngine
from cloud_node.settings import CloudSettings
from encryption.features import Features, check_features, features_tensor
from encryption.hiding import hiding_of
from encryption.noise import NOISE
from encryption.serving import HeadModel, TailModel
from models.manifest import EncoderEntry, load_manifest
from models.split import FEATURES
from tests.extension_package.terrace_example.encoders import REVERSED
from tierkit.errors import EncoderMismatch, InvalidInput
from tierkit.extensions import BUILT_IN
from tierkit.tensors import Array
from tierkit.wire.oip import InferRequest

FILE = {"file": "net.onnx", "sha256": "ab" * 32, "size_bytes": 1, "part": "whole"}
PLAIN = EncoderEntry.model_validate(
    {
        "kind": "bottleneck",
        "network": "net",
        "head": FILE,
        "tail": FILE,
        "feature_shape": (12, 2, 2),
        "scale": 1 / 7,
        "zero_point": 0,
        "bits": 3,
        **dict.fromkeys(("temperature", "test_images", "head_parameters", "parameters"), 1),
        **dict.fromkeys(("fine_accuracy", "coarse_accuracy", "fp32_fine_accuracy"), 0.5),
    }
)
HIDDEN = PLAIN.model_copy(update={"hiding": "reversed"})
IMAGES = np.zeros((2, 8, 8, 3), np.uint8)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        BUILT_IN["terrace.encoders"], "reversed", "tests.extension_package.terrace_example.encoders:REVERSED"
    )


class Ramp:
    """A head that gives each channel its number of levels; a tail that shows what it gets."""

    input_shape = (8, 8, 3)
    classes = 2
    got: Array

    def run(self, inputs: Any, outputs: Any) -> dict[str, Array]:
        if FEATURES in inputs:
            self.got = inputs[FEATURES]
            return {"logits": np.zeros((len(self.got), 2), np.float32)}
        channels, height, width = PLAIN.feature_shape
        levels = (np.arange(channels) % PLAIN.levels - PLAIN.zero_point) * np.float32(PLAIN.scale)
        shape = (len(inputs["images"]), channels, height, width)
        return {FEATURES: np.broadcast_to(levels[:, None, None], shape).astype(np.float32)}


def head(encoder: EncoderEntry) -> HeadModel:
    network: Any = Ramp()
    return HeadModel(encoder, network, lambda: network)


def test_what_is_sent_is_hidden_and_the_tail_gets_it_restored(installed: None) -> None:
    plain, hidden = (head(each).run({"images": IMAGES}, ["uint8"])["uint8"] for each in (PLAIN, HIDDEN))
    assert np.array_equal(hidden, plain[:, ::-1])
    assert not np.array_equal(hidden, plain)
    ramp: Any = Ramp()
    TailModel(HIDDEN, ramp, lambda: ramp, ()).run({FEATURES: hidden}, ["logits"])
    assert np.allclose(ramp.got, ramp.run({"images": IMAGES}, ())[FEATURES], atol=PLAIN.scale / 100)


def test_without_its_package_nothing_is_made_of_an_encoder() -> None:
    for make in (head, hiding_of):
        with pytest.raises(InvalidInput, match=r"terrace\.encoders has no 'reversed' here; known: noise"):
            make(HIDDEN)


def test_noise_is_the_hiding_of_an_encoder_with_noise() -> None:
    assert hiding_of(PLAIN) is None
    assert hiding_of(PLAIN.model_copy(update={"noise": 0.1})) is NOISE


def test_a_hiding_replaces_the_noise(installed: None) -> None:
    assert hiding_of(HIDDEN.model_copy(update={"noise": 0.1})) is REVERSED


async def test_features_with_another_hiding_are_refused() -> None:
    values = np.zeros((1, *PLAIN.feature_shape), np.uint8)
    for sender, receiver in ((PLAIN, HIDDEN), (HIDDEN, HIDDEN.model_copy(update={"hiding": "other"}))):
        tensor = await features_tensor(Features(encoder=sender, values=values))
        request = InferRequest(inputs=(tensor,))
        with pytest.raises((EncoderMismatch, InvalidInput), match="hiding"):
            await check_features(receiver, request)


def test_a_manifest_without_a_hiding_stays_as_it_was() -> None:
    assert "hiding" not in PLAIN.model_dump(mode="json")
    assert HIDDEN.model_dump(mode="json")["hiding"] == "reversed"


async def test_a_server_of_the_protocol_gets_no_features_that_a_package_has_hidden() -> None:
    engine = OipEngine(CloudSettings(engine="oip", upstream="http://127.0.0.1:9"), load_manifest())
    assert await engine.tail(HIDDEN) is None
