"""What an inference request's headers say before its body is read."""

import pytest

from tierkit.model import TensorSpec
from tierkit.oip_server.request import announced_images

IMAGES = TensorSpec(name="images", datatype="UINT8", shape=(-1, 4, 4, 3))
FEATURES = TensorSpec(name="features", datatype="FP32", shape=(-1, 2, 3))


@pytest.mark.parametrize(
    ("length", "json_length", "spec", "images"),
    [
        (b"240", b"0", IMAGES, 5),
        (b"340", b"100", IMAGES, 5),
        (b"387", b"100", IMAGES, 5),
        (b"340", b"100", FEATURES, 10),
        (b"100", b"100", IMAGES, 1),
        (b"100", b"5000", IMAGES, 1),
        (b"4800", None, IMAGES, 1),  # JSON: a pixel may take from one to thirty bytes
        (None, b"0", IMAGES, 1),
        (b"4800", b"-5", IMAGES, 1),
        (b"4800", b"0", TensorSpec(name="x", datatype="UINT8", shape=(-1, -1, -1)), 1),
    ],
)
def test_announced_images(length: bytes | None, json_length: bytes | None, spec: TensorSpec, images: int) -> None:
    named = {b"content-length": length, b"inference-header-content-length": json_length}
    assert announced_images({name: value for name, value in named.items() if value is not None}, spec) == images
