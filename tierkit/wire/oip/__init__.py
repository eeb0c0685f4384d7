"""Open Inference Protocol v2 with the binary tensor extension: bytes in, messages out, and back. No I/O.

    chunks, headers = encode_request(InferRequest(inputs=(Tensor("images", pixels),)))
    request = decode_request(body, parse_header_length(headers.get(BINARY_HEADER)))

Tensors are never copied: an encoded message is its JSON header followed by views of the arrays, a decoded tensor is a
view of the body that it came in. The exceptions are tensors written as JSON, BYTES tensors (lists of strings), and a
view that would start at an address its data type cannot be read from.

Decoding any bytes either returns a message whose tensors are exactly what the header says, or raises `MalformedMessage`
or `TooLarge`. https://github.com/kserve/open-inference-protocol and Triton's
`docs/protocol/extension_binary_data.md`, `extension_classification.md` describe the format.
"""

from tierkit.wire.oip.datatypes import DATATYPES
from tierkit.wire.oip.decode import Limits, decode_request, decode_response, parse_header_length
from tierkit.wire.oip.encode import BINARY_HEADER, Chunks, encode_request, encode_response, tensor_bytes
from tierkit.wire.oip.messages import InferRequest, InferResponse, Parameters, RequestedOutput, Tensor, Timing

__all__ = [
    "BINARY_HEADER",
    "DATATYPES",
    "Chunks",
    "InferRequest",
    "InferResponse",
    "Limits",
    "Parameters",
    "RequestedOutput",
    "Tensor",
    "Timing",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
    "parse_header_length",
    "tensor_bytes",
]
