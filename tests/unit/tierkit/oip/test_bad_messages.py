"""No bytes get past the decoder but whole messages, and nothing but a named error comes out otherwise."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from tierkit.errors import InvalidInput, MalformedMessage, TooLarge
from tierkit.tensors import TensorSpec
from tierkit.wire.oip import (
    BINARY_HEADER,
    InferRequest,
    InferResponse,
    Limits,
    RequestedOutput,
    Tensor,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    parse_header_length,
)

PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 12)
MESSAGE = InferRequest(
    inputs=(Tensor("images", PIXELS), Tensor("scale", np.array([0.5, 2.0], np.float32), {"note": "x"})),
    outputs=(RequestedOutput("logits", binary=True),),
    id="a",
)


def encoded(request: InferRequest) -> tuple[bytes, int]:
    chunks, headers = encode_request(request)
    return b"".join(chunks), int(headers[BINARY_HEADER])


BODY, HEADER_LENGTH = encoded(MESSAGE)


def test_every_truncation_of_one_message_is_an_error() -> None:
    for cut in range(len(BODY)):
        with pytest.raises(MalformedMessage):
            decode_request(BODY[:cut], HEADER_LENGTH)


@given(st.integers(0, len(BODY) - 1), st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_a_whole_message(position: int, value: int) -> None:
    body = bytearray(BODY)
    body[position] = value
    with suppress(InvalidInput):
        assert_whole(decode_request(body, HEADER_LENGTH).inputs)


@given(st.integers(-5, len(BODY) + 100))
def test_a_lie_about_the_header_is_an_error(length: int) -> None:
    # A few bytes less than the truth cut only the blanks that pad the JSON: then the tensors would be shifted,
    # and there are bytes too many.
    if length != HEADER_LENGTH:
        with pytest.raises(MalformedMessage):
            decode_request(BODY, length)


@given(st.binary(max_size=200), st.none() | st.integers(-1, 220))
@example(b"[" * 100_000, None)
@example(b'{"inputs":' * 5_000, None)
@example(b"\xff\xfe{}", None)
@example(b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[' + b"9" * 5000 + b"]}]}", None)
@example(b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[' + b"9" * 400 + b"]}]}", None)
@example(b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1e400]}]}', None)
@example(b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP16","data":[70000]}]}', None)
@example(b'{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["\\ud800"]}]}', None)
def test_any_bytes_are_an_error(body: bytes, header_length: int | None) -> None:
    for decode in (decode_request, decode_response):
        with pytest.raises(InvalidInput):
            decode(body, header_length)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


HEAD = json.loads(BODY[:HEADER_LENGTH])
JSON_HEAD = json.loads(b"".join(encode_request(MESSAGE, binary=False)[0]))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["FP32", "BYTES"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@given(st.booleans(), st.data(), anything)
def test_any_value_at_any_place_of_the_header_is_an_error_or_a_whole_message(
    binary: bool, data: st.DataObject, value: Any
) -> None:
    head = copy.deepcopy(HEAD if binary else JSON_HEAD)
    *outer, last = data.draw(st.sampled_from([path for path in paths(head) if path]))
    place = head
    for key in outer:
        place = place[key]
    place[last] = value
    text = json.dumps(head).encode()
    body, header_length = (text + BODY[HEADER_LENGTH:], len(text)) if binary else (text, None)
    with suppress(InvalidInput):
        assert_whole(decode_request(body, header_length).inputs)


def assert_whole(tensors: tuple[Tensor, ...]) -> None:
    assert tensors
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    for tensor in tensors:
        assert tensor.data.size == math.prod(tensor.data.shape) > 0
        tensor.data.copy()  # reads every element


def head_with(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]}
    return {"inputs": [{key: value for key, value in (tensor | changes).items() if value is not ...}]}


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ([], "got `array`"),
        ({}, "missing required field `inputs`"),
        ({"inputs": []}, r"length >= 1 .*inputs"),
        ({"inputs": [1]}, r"inputs\[0\]"),
        ({"inputs": head_with()["inputs"] * 2}, "'x' stands twice"),
        ({**head_with(), "outputs": [{"name": "y"}, {"name": "y"}]}, "'y' stands twice"),
        ({**head_with(), "outputs": [{"name": "y", "parameters": {"classification": -1}}]}, "classification"),
        ({**head_with(), "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "binary_data: Expected `bool"),
        ({**head_with(), "parameters": {"binary_data_output": "yes"}}, "binary_data_output: Expected `bool"),
        ({**head_with(), "parameters": {"sequence_id": 7}}, "'sequence_id': sequences are not supported"),
        ({**head_with(), "parameters": {"sequence_start": True}}, "sequences are not supported"),
        (
            {**head_with(), "outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]},
            "output 'y' has the parameter 'shared_memory_region'",
        ),
        ({**head_with(), "parameters": {"deep": {}}}, r"\$\.parameters"),
        ({**head_with(), "id": 7}, r"\$\.id"),
        (head_with(name=...), "missing required field `name`"),
        (head_with(name=""), r"inputs\[0\]\.name"),
        (head_with(name="x" * 300), r"inputs\[0\]\.name"),
        (head_with(shape=...), "missing required field `shape`"),
        (head_with(shape=[]), r"inputs\[0\]\.shape"),
        (head_with(shape=[1] * 17), r"inputs\[0\]\.shape"),
        (head_with(shape=[0]), r"shape\[0\]|shape\[\.\.\.\]"),
        (head_with(shape=[[1]]), "got `array`.*shape"),
        (head_with(shape=[-2]), "Expected `int`.*shape"),
        (head_with(shape=[2.0]), "Expected `int`.*shape"),
        (head_with(shape=[True, 2]), "Expected `int`.*shape"),
        (head_with(shape=[2**63]), "Expected `int`.*shape"),
        (head_with(shape=[2**62, 2**62, 2**62]), r"data are \[2\], and its shape says"),
        (head_with(datatype=...), "missing required field `datatype`"),
        (head_with(datatype="BF16"), "'BF16' is not supported"),
        (head_with(data=...), "either 'data' or"),
        (head_with(parameters={"binary_data_size": 8}), "either 'data' or"),
        (head_with(data=..., parameters={"binary_data_size": -1}), "binary_data_size: Expected `int` >= 0"),
        (head_with(data=..., parameters={"binary_data_size": True}), "binary_data_size: .*got `bool`"),
        (head_with(data=..., parameters={"binary_data_size": "8"}), "binary_data_size: .*got `str`"),
        (head_with(parameters={"shared_memory_region": "r"}), "tensors in shared memory are not supported"),
        (head_with(data=..., parameters={"binary_data_size": 8}), "claims 8 bytes where 0 follow"),
        (head_with(data=3), "'x' .*Expected `array`, got `int`"),
        (head_with(data=[1]), r"data are \[1\], and its shape says \[2\]"),
        (head_with(data=[1, "2"]), "FP32.*got `str`"),
        (head_with(data=[1, None]), "FP32.*got `null`"),
        (head_with(data=[1, True]), "FP32.*got `bool`"),
        (head_with(data=[1, 1e39]), "too large for FP32"),
        (head_with(data=[1, 10**400]), "FP32.*out of range"),
        (head_with(datatype="UINT8", data=[1, 256]), "UINT8.*<= 255"),
        (head_with(datatype="UINT8", data=[1, -1]), "UINT8.*>= 0"),
        (head_with(datatype="INT32", data=[1, 1.5]), "INT32.*got `float`"),
        (head_with(datatype="UINT64", data=[1, 2**64]), "too large for UINT64"),
        (head_with(datatype="INT64", data=[1, 2**63]), "INT64"),
        (head_with(datatype="BOOL", data=[1, 0]), "BOOL.*got `int`"),
        (head_with(datatype="BYTES", data=[1, 0]), "BYTES.*got `int`"),
        (head_with(datatype="BYTES", shape=[2, 2], data=[["a", "b"], ["c"]]), "its shape says"),
        (head_with(shape=[2, 2], data=[[1, 2], [3]]), "not nested as its shape"),
        (head_with(shape=[2, 2], data=[[1, 2], 3]), "Expected `array`, got `int`"),
        (head_with(shape=[2, 2], data=[[1, 2]]), r"data are \[1, 2\], and its shape says \[2, 2\]"),
        (head_with(shape=[1, 2], data=[[[1], [2]]]), "FP32.*got `array`"),
    ],
)
def test_bad_json_says_what_is_wrong(head: Any, says: str) -> None:
    with pytest.raises(MalformedMessage, match=says):
        decode_request(json.dumps(head).encode(), None)


def test_no_sequence_may_be_asked_for() -> None:
    parameters = {"sequence_id": 0, "sequence_start": False, "shared_memory_offset": 0}
    assert decode_request(json.dumps({**head_with(), "parameters": parameters}).encode(), None).inputs[0].name == "x"


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'{"a":[1]},'])
def test_lists_and_objects_are_counted_before_they_are_read(piece: bytes) -> None:
    body = b'{"inputs":[' + piece * 40_000 + b"1]}"
    with pytest.raises(TooLarge, match="more than 32768 lists and objects"):
        decode_request(body, None)


def test_numbers_are_counted_before_they_are_read() -> None:
    with pytest.raises(TooLarge, match="more than 200000 numbers"):
        decode_request(b'{"inputs":[' + b"1," * 200_001 + b"1]}", None)


@pytest.mark.parametrize("nested", [False, True])
def test_tens_of_images_as_json_are_read(nested: bool) -> None:
    images = np.random.default_rng(1).integers(0, 256, (30, 32, 32, 3)).astype(np.uint8)
    data = images.tolist() if nested else images.reshape(-1).tolist()
    tensor = {"name": "images", "shape": list(images.shape), "datatype": "UINT8", "data": data}
    request = decode_request(json.dumps({"inputs": [tensor]}).encode(), None)
    assert np.array_equal(request.inputs[0].data, images)


@pytest.mark.parametrize("decode", [decode_request, decode_response])
@pytest.mark.parametrize("depth", [300, 900, 1020, 5000])
@pytest.mark.parametrize("place", ['{"inputs": %s}', '{"outputs": %s}', '{"parameters": %s}', '{"a": %s}', "%s"])
@pytest.mark.parametrize("kind", ['{"a":%s}', "[%s]", '[{"a":%s}]', '{"a":[%s]}'])
def test_json_that_is_nested_deeply_cannot_be_read(
    decode: Callable[[bytes, None], object], depth: int, place: str, kind: str
) -> None:
    before, _, after = kind.partition("%s")
    with pytest.raises(MalformedMessage):
        decode((place % (before * depth + "1" + after * depth)).encode(), None)


WHOLE = json.dumps(head_with()).encode()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"inputs":[{"a":' + b"[" * 20_000 + b"]}", "nested too deeply"),
        (WHOLE + b" \x00\x01", f"trailing characters.*{BINARY_HEADER} must be its length"),
        (WHOLE + b" \xff", f"trailing characters.*{BINARY_HEADER} must be its length"),
        (WHOLE.replace(b"x", b"\xff"), "cannot be read"),
        (b'{"inputs":[}', r"byte 11"),
    ],
)
def test_json_that_cannot_be_read_is_told_in_the_readers_words(text: bytes, says: str) -> None:
    with pytest.raises(MalformedMessage, match=says) as refusal:
        decode_request(text, None)
    assert "sys." not in str(refusal.value)
    assert "recursion" not in str(refusal.value)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_json_are_refused(word: str) -> None:
    body = json.dumps(head_with(data=[1, 2])).replace("[1, 2]", f"[1, {word}]").encode()
    with pytest.raises(MalformedMessage, match="cannot be read"):
        decode_request(body, None)


def test_of_a_key_that_stands_twice_the_last_one_counts_and_is_checked() -> None:
    # All services read JSON with the same parser, so a sender cannot make two of them read it differently.
    tensor = b'{"name":"x","shape":[%d],"shape":[%d],"datatype":"FP32","data":[1]}'
    assert decode_request(b'{"inputs":[' + tensor % (2, 1) + b"]}", None).inputs[0].data.tolist() == [1.0]
    with pytest.raises(MalformedMessage, match="its shape says"):
        decode_request(b'{"inputs":[' + tensor % (1, 2) + b"]}", None)


def binary_message(payload: bytes, **changes: Any) -> tuple[bytes, int]:
    head = head_with(data=..., parameters={"binary_data_size": len(payload)}, **changes)
    text = json.dumps(head).encode()
    return text + payload, len(text)


@pytest.mark.parametrize(
    ("payload", "changes", "says"),
    [
        (b"1234567", {}, "takes 8 bytes, 7 are given"),
        (b"123456789", {}, "takes 8 bytes, 9 are given"),
        (b"12345678", {"shape": [2**61, 8]}, "takes 73786976294838206464 bytes"),
        (b"\x00\x02", {"datatype": "BOOL"}, "0 or 1"),
        (b"\x01\x00\x00\x00a\x09", {"datatype": "BYTES"}, "longer than the tensor"),
        (b"\xff\xff\xff\xffa", {"datatype": "BYTES"}, "longer than the tensor"),
        (b"\x01\x00\x00\x00a", {"datatype": "BYTES"}, "not the 2"),
        (b"\x00\x00\x00\x00" * 3, {"datatype": "BYTES"}, "not the 2"),
    ],
)
def test_bad_binary_says_what_is_wrong(payload: bytes, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(MalformedMessage, match=says):
        decode_request(*binary_message(payload, **changes))


def test_limits() -> None:
    with pytest.raises(TooLarge, match="bytes; at most 10 "):
        decode_request(BODY, HEADER_LENGTH, limits=Limits(max_body_bytes=10))
    with pytest.raises(TooLarge, match="of JSON"):
        decode_request(BODY, HEADER_LENGTH, limits=Limits(max_json_bytes=HEADER_LENGTH - 1))
    with pytest.raises(TooLarge, match="2 inputs; at most 1 "):
        decode_request(BODY, HEADER_LENGTH, limits=Limits(max_tensors=1))
    with pytest.raises(TooLarge, match=r"655362 bytes of JSON; at most 655360 .* as binary"):
        decode_request(b'"' + b"a" * 5 * 2**17 + b'"', None)
    with pytest.raises(TooLarge, match="strings"):
        decode_request(*binary_message(b"", datatype="BYTES", shape=[2**20]))
    decode_request(BODY, HEADER_LENGTH, limits=Limits(max_body_bytes=len(BODY), max_json_bytes=HEADER_LENGTH))


@pytest.mark.parametrize("value", ["", "-1", "+1", "1 ", "1_0", "0x1", "1.0", "٣", "9" * 20, "abc"])
def test_header_length_must_be_a_plain_number(value: str) -> None:
    with pytest.raises(MalformedMessage, match=BINARY_HEADER):
        parse_header_length(value)


def test_header_length_of_a_json_body_is_absent() -> None:
    assert parse_header_length(None) is None
    assert parse_header_length("120") == 120


IMAGES = TensorSpec(name="images", datatype="UINT8", shape=(-1, 2, 2, 3))


def test_a_raw_body_is_the_only_input() -> None:
    request = decode_request(bytes(range(24)), 0, raw_input=IMAGES)
    assert request.inputs[0].name == "images"
    assert request.inputs[0].data.tolist() == np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3).tolist()
    assert request.binary_output


@pytest.mark.parametrize("size", [0, 11, 25])
def test_a_raw_body_must_be_whole_rows(size: int) -> None:
    with pytest.raises(MalformedMessage, match="whole number of rows"):
        decode_request(bytes(size), 0, raw_input=IMAGES)


def test_a_raw_body_needs_an_input_that_its_length_determines() -> None:
    with pytest.raises(MalformedMessage, match="cannot be sent raw"):
        decode_request(bytes(24), 0, raw_input=TensorSpec(name="x", datatype="UINT8", shape=(-1, -1)))
    with pytest.raises(TooLarge):
        decode_request(bytes(24), 0, raw_input=IMAGES, limits=Limits(max_body_bytes=23))


def test_responses_are_held_to_the_same_rules() -> None:
    chunks, headers = encode_response(InferResponse("m", "1", (Tensor("y", PIXELS),)))
    body = b"".join(chunks)
    for cut in range(len(body)):
        with pytest.raises(MalformedMessage):
            decode_response(body[:cut], int(headers[BINARY_HEADER]))
