"""What is encoded comes back bit for bit and without a copy, or, when a byte is missing or too many, not at all."""

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as npst

from tierkit.errors import MalformedMessage, TooLarge
from tierkit.wire.oip import (
    BINARY_HEADER,
    DATATYPES,
    Chunks,
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

names = st.text(min_size=1, max_size=12)
texts = st.text(max_size=12)
parameters = st.dictionaries(
    st.sampled_from(["priority", "note", "x"]),
    st.one_of(st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False, allow_infinity=False), texts),
    max_size=2,
)
shapes = npst.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4)


def _arrays(datatype: str, finite: bool) -> st.SearchStrategy[np.ndarray]:
    if datatype == "BYTES":
        strings = st.binary(max_size=6) if not finite else st.text(max_size=6).map(str.encode)
        return shapes.flatmap(lambda shape: npst.arrays(object, shape, elements=strings, fill=st.nothing()))
    elements = {"allow_nan": False, "allow_infinity": False} if finite and datatype.startswith("FP") else None
    return npst.arrays(DATATYPES[datatype], shapes, elements=elements)


def tensors(finite: bool) -> st.SearchStrategy[tuple[Tensor, ...]]:
    """One to three tensors of distinct names; `finite`: such as JSON can carry."""
    tensor = st.builds(
        Tensor, names, st.sampled_from(list(DATATYPES)).flatmap(lambda d: _arrays(d, finite)), parameters
    )
    return st.lists(tensor, min_size=1, max_size=3, unique_by=lambda t: t.name).map(tuple)


outputs = st.lists(
    st.builds(
        RequestedOutput,
        names,
        binary=st.none() | st.booleans(),
        classification=st.integers(0, 5),
        parameters=parameters,
    ),
    max_size=2,
    unique_by=lambda o: o.name,
).map(tuple)


def requests(finite: bool = False) -> st.SearchStrategy[InferRequest]:
    return st.builds(
        InferRequest, tensors(finite), outputs, id=texts, parameters=parameters, binary_output=st.booleans()
    )


def responses(finite: bool = False) -> st.SearchStrategy[InferResponse]:
    return st.builds(InferResponse, texts, texts, tensors(finite), id=texts, parameters=parameters)


def joined(chunks: Chunks, headers: dict[str, str]) -> tuple[bytes, int | None]:
    body = b"".join(chunks)
    assert int(headers["Content-Length"]) == len(body)
    return body, parse_header_length(headers.get(BINARY_HEADER))


def assert_same_tensors(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    assert [(t.name, t.datatype, t.data.shape, t.parameters) for t in got] == [
        (t.name, t.datatype, t.data.shape, t.parameters) for t in want
    ]
    for one, other in zip(got, want, strict=True):
        if one.datatype == "BYTES":
            assert one.data.tolist() == other.data.tolist()
        else:
            assert one.data.tobytes() == other.data.tobytes()  # bit for bit: NaN and -0.0 as well


@given(requests())
def test_binary_request(request: InferRequest) -> None:
    back = decode_request(*joined(*encode_request(request)))
    assert_same_tensors(back.inputs, request.inputs)
    assert (back.outputs, back.id, back.parameters) == (request.outputs, request.id, request.parameters)
    assert back.binary_output is request.binary_output


@given(requests(finite=True))
def test_json_request(request: InferRequest) -> None:
    body, header_length = joined(*encode_request(request, binary=False))
    assert header_length is None
    json.loads(body)
    assert_same_tensors(decode_request(body, header_length).inputs, request.inputs)


@given(responses(), st.data())
def test_response_with_some_tensors_as_binary(response: InferResponse, data: st.DataObject) -> None:
    def needs_binary(tensor: Tensor) -> bool:
        if tensor.datatype == "BYTES":
            try:
                return not all(item.decode() is not None for item in tensor.data.flat)
            except UnicodeDecodeError:
                return True
        return tensor.datatype.startswith("FP") and not bool(np.isfinite(tensor.data).all())

    binary = {t.name for t in response.outputs if needs_binary(t) or data.draw(st.booleans())}
    back = decode_response(*joined(*encode_response(response, binary=binary)))
    assert_same_tensors(back.outputs, response.outputs)
    assert (back.model_name, back.model_version, back.id, back.parameters) == (
        response.model_name,
        response.model_version,
        response.id,
        response.parameters,
    )


@given(requests(), st.data())
def test_every_truncation_is_an_error(request: InferRequest, data: st.DataObject) -> None:
    body, header_length = joined(*encode_request(request))
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(MalformedMessage):
        decode_request(body[:cut], header_length)


@given(requests(), st.binary(min_size=1, max_size=9))
def test_bytes_too_many_are_an_error(request: InferRequest, more: bytes) -> None:
    body, header_length = joined(*encode_request(request))
    with pytest.raises(MalformedMessage, match=r"follow the last tensor|its strings"):
        decode_request(body + more, header_length)


def test_tensors_are_views_on_both_sides() -> None:
    pixels = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", pixels),)))
    assert np.shares_memory(np.frombuffer(chunks[1], np.uint8), pixels)

    body = bytearray(b"".join(chunks))
    decoded = decode_request(body, int(headers[BINARY_HEADER])).inputs[0].data
    assert np.shares_memory(decoded, np.frombuffer(body, np.uint8))


def test_every_type_is_read_in_place_because_the_header_is_padded() -> None:
    features = np.linspace(0, 1, 12).reshape(3, 4)
    for name in ("f", "ff", "fff", "ffff", "fffff"):
        chunks, headers = encode_request(InferRequest(inputs=(Tensor(name, features),)))
        body = bytearray(b"".join(chunks))
        decoded = decode_request(body, int(headers[BINARY_HEADER])).inputs[0].data
        assert np.shares_memory(decoded, np.frombuffer(body, np.uint8))


def test_a_tensor_at_an_odd_address_is_copied_to_where_it_can_be_read() -> None:
    head = b'{"inputs":[{"name":"f","shape":[2],"datatype":"FP32","parameters":{"binary_data_size":8}}]}'
    head += b" " * (8 - len(head) % 8 + 1)
    body = head + np.array([1.5, -2.5], "<f4").tobytes()
    decoded = decode_request(bytearray(body), len(head)).inputs[0].data
    assert decoded.flags.aligned
    assert decoded.tolist() == [1.5, -2.5]


def test_requests_with_the_same_json_part_have_their_own_tensors_and_are_checked_each() -> None:
    head = b'{"inputs":[{"name":"x","shape":[2],"datatype":"UINT8","parameters":{"binary_data_size":2}}]}'
    decoded = [decode_request(head + payload, len(head)) for payload in (b"ab", b"cd")]
    assert [request.inputs[0].data.tobytes() for request in decoded] == [b"ab", b"cd"]
    for payload, sentence in ((b"e", "claims 2 bytes where 1 follow"), (b"efg", "1 bytes follow the last tensor")):
        with pytest.raises(MalformedMessage, match=sentence):
            decode_request(head + payload, len(head))
    with pytest.raises(TooLarge, match="at most 0"):
        decode_request(head + b"ab", len(head), limits=Limits(max_tensors=0))


def test_arrays_that_are_not_contiguous_or_big_endian_are_written_in_the_right_order() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4).T
    back = decode_request(*joined(*encode_request(InferRequest(inputs=(Tensor("x", array),)))))
    assert back.inputs[0].data.tolist() == array.tolist()


def test_the_wire_form_is_what_the_protocol_says() -> None:
    request = InferRequest(
        inputs=(Tensor("images", np.zeros((1, 2), np.uint8)),),
        outputs=(RequestedOutput("logits", binary=False), RequestedOutput("probabilities", classification=3)),
        id="7",
    )
    chunks, headers = encode_request(request)
    assert headers["Content-Type"] == "application/octet-stream"
    assert int(headers[BINARY_HEADER]) == len(chunks[0])
    assert json.loads(bytes(chunks[0])) == {
        "id": "7",
        "parameters": {"binary_data_output": True},
        "inputs": [{"name": "images", "shape": [1, 2], "datatype": "UINT8", "parameters": {"binary_data_size": 2}}],
        "outputs": [
            {"name": "logits", "parameters": {"binary_data": False}},
            {"name": "probabilities", "parameters": {"classification": 3}},
        ],
    }


def test_a_request_without_a_word_about_binary_outputs_wants_json() -> None:
    body = b'{"inputs":[{"name":"x","shape":[2,2],"datatype":"INT8","data":[[1,2],[3,4]]}],"outputs":[{"name":"y"}]}'
    request = decode_request(body, None)
    assert request.binary_output is False
    assert request.outputs == (RequestedOutput("y"),)
    assert request.inputs[0].data.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(2, complex), "no datatype"),
        (np.zeros((0, 3), np.float32), "holds nothing"),
        (np.float32(1).reshape(()), "holds nothing"),
        (np.array(["text"], object), "something else than bytes"),
    ],
)
def test_what_the_protocol_cannot_carry_is_refused(array: np.ndarray, says: str) -> None:
    with pytest.raises(MalformedMessage, match=says):
        encode_request(InferRequest(inputs=(Tensor("x", array),)))


@pytest.mark.parametrize("array", [np.array([np.nan]), np.array([np.inf]), np.array([b"\xff"], object)])
def test_what_json_cannot_carry_is_refused(array: np.ndarray) -> None:
    with pytest.raises(MalformedMessage, match="ask for binary"):
        encode_response(InferResponse("m", "1", (Tensor("x", array),)), binary=False)
