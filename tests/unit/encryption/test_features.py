"""What travels with features, and what a receiver refuses."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from encryption.features import Features, check_features, features_tensor, pack, unpack
from encryption.sending import FeatureClient, MaySeePixels, PixelClient, TakesFeatures, ThroughRelay, destination
from models.manifest import EncoderEntry
from tierkit.errors import EncoderMismatch, InvalidInput, MalformedMessage, UpstreamError
from tierkit.inference.oip_client import OipClient
from tierkit.types import FeatureForm, Tier
from tierkit.wire.messages import Encoding, Upstream
from tierkit.wire.oip import InferRequest, Tensor, decode_request, encode_request, parse_header_length


def encoder_entry(name: str, shape: tuple[int, int, int]) -> EncoderEntry:
    part = {"file": "x.onnx", "sha256": "a" * 64, "size_bytes": 1, "part": "whole"}
    facts = {"temperature": 1.0, "test_images": 1, "head_parameters": 1, "parameters": 2}
    accuracy = {"fine_accuracy": 0.5, "coarse_accuracy": 0.5, "fp32_fine_accuracy": 0.5}
    own = {"kind": "conv1", "network": name, "head": part, "tail": {**part, "sha256": "b" * 64}}
    levels = {"feature_shape": shape, "scale": 0.08848143932866115, "zero_point": 0}
    return EncoderEntry.model_validate({**own, **facts, **accuracy, **levels})


ENCODER, OTHER = encoder_entry("resnet-34", (64, 16, 16)), encoder_entry("wrn-16-4", (16, 32, 32))
UPSTREAM = Upstream(
    node_id="a",
    url="http://127.0.0.1:1",
    tier=Tier.CLOUD,
    model=ENCODER.name,
    sha256=ENCODER.tail.sha256,
    encoding=None,
)
ENCODING = Encoding(name=ENCODER.name, head=ENCODER.head.sha256, tail=ENCODER.tail.sha256)


def some(encoder: EncoderEntry = ENCODER, dtype: str = "uint8", images: int = 2) -> Features:
    values = np.random.default_rng(1).integers(0, 256, (images, *encoder.feature_shape)).astype(dtype)
    return Features(encoder=encoder, values=values)


def over_the_wire(tensor: Tensor) -> InferRequest:
    chunks, headers = encode_request(InferRequest(inputs=(tensor,)))
    length = parse_header_length(headers["Inference-Header-Content-Length"])
    return decode_request(b"".join(bytes(chunk) for chunk in chunks), length)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
async def test_what_was_sent_arrives(dtype: str):
    sent = some(dtype=dtype)
    request = over_the_wire(await features_tensor(sent))
    await check_features(ENCODER, request)
    assert (request.inputs[0].data == sent.values).all()
    assert unpack(ENCODER, request.inputs[0].data).dtype == np.float32
    assert sent.form is FeatureForm(dtype)


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("encoder", "wrn-16-4.conv1", EncoderMismatch, "the features are of encoder wrn-16-4.conv1"),
        ("head", "0" * 64, EncoderMismatch, "the features are of head 000"),
        ("tail", "0" * 64, EncoderMismatch, "the features are of tail 000"),
        ("scale", 0.1, EncoderMismatch, r"the features are of scale 0.1; 'resnet-34.conv1' here has 0.08"),
        ("scale", "0.0884814393286611", EncoderMismatch, "scale"),
        ("zero_point", 1, EncoderMismatch, "zero_point 1"),
        ("zero_point", False, EncoderMismatch, "zero_point"),
        ("levels", 16, EncoderMismatch, "levels 16"),
        ("sha256", "0" * 64, MalformedMessage, "not those that were sent"),
        ("sha256", 7, MalformedMessage, "not those that were sent"),
        ("head", None, InvalidInput, "needs the parameters head"),
        ("scale", None, InvalidInput, "needs the parameters scale"),
        ("sha256", None, InvalidInput, "needs the parameters sha256"),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
async def test_a_mismatch_is_told_and_never_computed(
    dtype: str, name: str, value: object, error: type[Exception], words: str
):
    tensor = await features_tensor(some(dtype=dtype))
    said: dict[str, Any] = {**tensor.parameters, name: value}
    if value is None:
        del said[name]
    with pytest.raises(error, match=words):
        await check_features(ENCODER, over_the_wire(replace(tensor, parameters=said)))


async def test_changed_values_are_noticed():
    tensor = await features_tensor(some())
    changed = tensor.data.copy()
    changed[1, 2, 3, 4] ^= 1
    with pytest.raises(MalformedMessage, match="not those that were sent"):
        await check_features(ENCODER, over_the_wire(replace(tensor, data=changed)))


HIDING = [ENCODER.model_copy(update={"bits": 3, "zero_point": 2}), ENCODER.model_copy(update={"noise": 0.1})]


@pytest.mark.parametrize("encoder", HIDING)
@pytest.mark.parametrize("form", list(FeatureForm))
async def test_an_encoder_that_hides_by_its_levels_sends_nothing_but_them(encoder: EncoderEntry, form: FeatureForm):
    reach = 3 * encoder.levels * encoder.scale
    made = np.random.default_rng(1).uniform(-reach, reach, (2, *encoder.feature_shape)).astype(np.float32)
    sent = pack(encoder, made, form)
    assert len(np.unique(sent)) == encoder.levels
    request = over_the_wire(await features_tensor(Features(encoder=encoder, values=sent)))
    await check_features(encoder, request)
    # The tail gets the same, whatever was sent.
    assert (unpack(encoder, sent) == unpack(encoder, pack(encoder, made, FeatureForm.UINT8))).all()


def test_floats_of_the_first_convolution_go_as_they_are():
    made = np.random.default_rng(1).normal(0, 9, (2, *ENCODER.feature_shape)).astype(np.float32)
    assert (unpack(ENCODER, pack(ENCODER, made, FeatureForm.FLOAT32)) == made).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("value", [50.0, -0.5, 0.04, 3e4, 1e30])
async def test_floats_that_are_no_levels_are_refused(dtype: str, value: float):
    values = np.zeros((1, *ENCODER.feature_shape), np.float32)
    values[0, 1, 2, 3] = value
    with np.errstate(over="ignore"):
        tensor = await features_tensor(Features(encoder=HIDING[0], values=values.astype(dtype)))
    with pytest.raises(InvalidInput, match=r"not a level: this encoder has 8, \(q - 2\) \* 0.08.* for q from 0 to 7"):
        await check_features(HIDING[0], InferRequest(inputs=(tensor,)))


def test_a_value_that_is_no_level_is_refused():
    few = ENCODER.model_copy(update={"bits": 2})
    with pytest.raises(InvalidInput, match="is 9; this encoder has 4 levels"):
        unpack(few, np.full((1, *ENCODER.feature_shape), 9, np.uint8))


@pytest.mark.parametrize("values", [np.zeros((1, 32, 32, 3), np.uint8), np.zeros((1, 64, 16, 16), np.int64)])
def test_pixels_and_other_arrays_are_no_features(values: np.ndarray):
    with pytest.raises(ValueError, match=r"are not features of resnet-34\.conv1"):
        Features(encoder=ENCODER, values=values)


def test_a_route_leads_to_the_client_that_may_serve_it():
    relay = {"node_id": "b", "url": "http://127.0.0.1:2"}
    assert isinstance(destination(UPSTREAM), MaySeePixels)
    features = UPSTREAM.model_copy(update={"encoding": ENCODING})
    assert isinstance(destination(features), TakesFeatures)
    relayed = Upstream.model_validate({**features.model_dump(), "relay": relay})
    assert isinstance(destination(relayed), ThroughRelay)


async def test_no_call_sends_pixels_to_a_node_that_takes_features():
    """mypy refuses each of these calls, and complains here if it ever allows one."""
    images = np.zeros((1, 32, 32, 3), np.uint8)
    to = TakesFeatures(upstream=UPSTREAM, encoding=ENCODING)
    client = OipClient(None)  # type: ignore[arg-type]  # nothing is ever sent
    call: object = None
    with pytest.raises(AttributeError):
        await FeatureClient(client, "end-1").infer(to, images, call, encode_s=0)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        await PixelClient(client).infer(to, images, call)  # type: ignore[arg-type]
    with pytest.raises(UpstreamError, match=r"takes features of resnet-34\.conv1, not of wrn-16-4\.conv1"):
        await FeatureClient(client, "end-1").infer(to, some(OTHER), call, encode_s=0)  # type: ignore[arg-type]
