"""The noise of features: the same for the same image and key, unlike anything else."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from encryption.heads import Encoders
from encryption.noise import KEY_BYTES, draw_noise, job_key
from encryption.serving import NOISE_KEYS, HeadModel
from end_node.settings import EndSettings
from models.manifest import EncoderEntry
from models.split import FEATURES
from tierkit.inference.files import FileDecoder
from tierkit.inference.thread import InferenceThread
from tierkit.tensors import Array
from tierkit.types import FeatureForm
from tierkit.wire.messages import Encoding

PART = {"file": "x.onnx", "size_bytes": 1, "part": "whole"}
ENCODER = EncoderEntry.model_validate(
    {
        "kind": "bottleneck",
        "network": "resnet-34",
        "head": {**PART, "sha256": "a" * 64},
        "tail": {**PART, "sha256": "b" * 64},
        "feature_shape": (3, 5, 5),  # an odd number of values
        "scale": 1 / 7,
        "zero_point": 0,
        "bits": 3,
        "noise": 0.1,
        **dict.fromkeys(("temperature", "test_images", "head_parameters", "parameters"), 1),
        **dict.fromkeys(("fine_accuracy", "coarse_accuracy", "fp32_fine_accuracy"), 0.5),
    }
)
IMAGES = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8)


def keys(seed: int, images: int = len(IMAGES)) -> Array:
    return np.broadcast_to(np.random.default_rng(seed).integers(0, 256, KEY_BYTES, np.uint8), (images, KEY_BYTES))


class Grey:
    """In the place of the head's network: the same features for each image."""

    input_shape = (32, 32, 3)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        return {FEATURES: np.full((len(inputs["images"]), *ENCODER.feature_shape), 0.5, np.float32)}


def head(encoder: EncoderEntry = ENCODER) -> HeadModel:
    grey: Any = Grey()
    return HeadModel(encoder, grey, lambda: grey)


def test_an_image_has_the_same_noise_each_time_wherever_it_stands_and_whatever_stands_beside_it():
    whole = head().run({"images": IMAGES, NOISE_KEYS: keys(1)}, ["uint8", "float32"])
    alone = head().run({"images": IMAGES[7:8], NOISE_KEYS: keys(1, 1)}, ["uint8", "float32"])
    for form in ("uint8", "float32"):
        assert whole[form][7].tobytes() == alone[form][0].tobytes()
    # So whoever averages all that was sent of an image is left with one draw.
    copies = np.stack([draw_noise(ENCODER, IMAGES, keys(1)) for _ in range(20)])
    assert copies.mean(0).std() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("encoder", "key", "pixel"),
    [
        ({}, 2, 0),
        ({}, 1, 1),
        ({"noise": 0.2}, 1, 0),
        ({"head": ENCODER.head.model_copy(update={"sha256": "0" * 64})}, 1, 0),
    ],
    ids=["another key", "one pixel", "another deviation", "another head"],
)
def test_all_else_has_noise_that_is_unlike_it(encoder: dict[str, Any], key: int, pixel: int):
    images = IMAGES.copy()
    images[:, 31, 31, 2] ^= pixel
    one = draw_noise(ENCODER, IMAGES, keys(1)).reshape(-1)
    other = draw_noise(ENCODER.model_copy(update=encoder), images, keys(key)).reshape(-1)
    # The correlation of independent values has a deviation of 1 / sqrt(3000).
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / len(one) ** 0.5


def test_the_noise_is_gaussian_and_the_values_of_an_image_are_independent():
    wide = ENCODER.model_copy(update={"feature_shape": (8, 16, 16)})
    noise = draw_noise(wide, IMAGES, keys(3))
    assert noise.dtype == np.float32
    assert noise.shape == (40, 8, 16, 16)
    values = noise.reshape(len(IMAGES), -1) / 0.1
    n = values.size
    assert abs(values.mean()) < 5 / n**0.5
    assert abs(values.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((values**4).mean() - 3) < 5 * (96 / n) ** 0.5
    for bound, share in ((1, 0.317311), (2, 0.045500), (3, 0.002700)):
        assert (np.abs(values) > bound).mean() == pytest.approx(share, abs=5 * (share / n) ** 0.5)
    half = values.shape[1] // 2
    # Neighbours, the two halves of an image, and images.
    for one, other in (
        (values[:, 1:], values[:, :-1]),
        (values[:, :half], values[:, half:]),
        (values[1:], values[:-1]),
    ):
        for first, second in ((one, other), (one**2, other**2)):
            assert abs(np.corrcoef(first.reshape(-1), second.reshape(-1))[0, 1]) < 5 / one.size**0.5


def test_an_encoder_without_noise_takes_no_key_and_adds_nothing():
    plain = head(ENCODER.model_copy(update={"noise": 0.0, "bits": 8}))
    assert [spec.name for spec in plain.inputs] == ["images"]
    assert set(plain.run({"images": IMAGES}, ["float32"])["float32"].reshape(-1)) == {0.5}


def test_a_jobs_key_follows_from_secret_and_images_alone():
    key = job_key(b"s" * 32, "a" * 64)
    assert key == job_key(b"s" * 32, "a" * 64)
    assert len({key, job_key(b"s" * 32, "b" * 64), job_key(b"t" * 32, "a" * 64)}) == 3
    encoding = Encoding(name=ENCODER.name, head=ENCODER.head.sha256, tail=ENCODER.tail.sha256, noise_key=key)
    assert key not in f"{encoding!r} {encoding}"


async def test_devices_that_were_given_a_key_agree_and_others_have_their_own():
    encoding = Encoding(name=ENCODER.name, head=ENCODER.head.sha256, tail=ENCODER.tail.sha256, form=FeatureForm.FLOAT32)
    given = encoding.model_copy(update={"noise_key": "ab" * KEY_BYTES})
    other = encoding.model_copy(update={"noise_key": "cd" * KEY_BYTES})
    async with AsyncExitStack() as stack:
        devices = [Encoders([head()], EndSettings()) for _ in range(2)]
        for device in devices:
            await stack.enter_async_context(device.running(InferenceThread(), FileDecoder()))

        async def sent(device: Encoders, encoding: Encoding) -> bytes:
            return (await device.encode(IMAGES[:3], encoding, budget_s=5.0)).features.values.tobytes()

        one, two = devices
        assert await sent(one, given) == await sent(two, given) == await sent(two, given)
        assert await sent(one, encoding) == await sent(one, encoding)
        four = [await sent(one, given), await sent(one, other), await sent(one, encoding), await sent(two, encoding)]
        assert len(set(four)) == 4
