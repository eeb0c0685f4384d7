"""Asking another node for an inference, in the Open Inference Protocol."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tierkit.errors import InvalidInput, UpstreamError
from tierkit.http.client import ask, authorization, calling, read_at_most
from tierkit.http.errors import refusal_of
from tierkit.wire.messages import BUDGET_HEADER, INTERACTIVE, PRIORITY_HEADER, REQUEST_ID_HEADER
from tierkit.wire.oip import (
    BINARY_HEADER,
    InferRequest,
    InferResponse,
    Limits,
    Timing,
    decode_response,
    encode_request,
    parse_header_length,
)
from tierkit.wire.oip.compression import ZSTD, compress
from tierkit.wire.trace import Trace

__all__ = ["InferOptions", "ModelMetadata", "OipClient", "TensorMetadata"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_REFUSAL_BYTES = 64 * 1024
"""Bytes of an error answer that are read."""

_PREFIX = "/v2/models"

_MAX_METADATA_BYTES = 1024**2
"""Most bytes of a server's metadata of a model."""

_ROW_BYTES = 256 * 1024
"""Bytes of the answer about one image: 64 thousand probabilities in FP32."""

# No number has more digits than whom the answer is passed on to takes (`tierkit.wire.events`).
_TIMING = re.compile(r'queue;dur=(\d{1,9}\.\d{3}), infer;dur=(\d{1,9}\.\d{3});desc="([1-9]\d{0,8})"', re.ASCII)


class TensorMetadata(msgspec.Struct, frozen=True):
    """An input or output, as a server describes it. Whether the shape has a batch axis is the server's to say."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(msgspec.Struct, frozen=True):
    """A model, as a server describes it."""

    platform: str | None = None
    inputs: tuple[TensorMetadata, ...] | None = None
    outputs: tuple[TensorMetadata, ...] | None = None
    parameters: dict[str, Any] | None = None


class _ServerMetadata(msgspec.Struct):
    extensions: tuple[str, ...] = ()


class InferOptions(Struct, frozen=True, kw_only=True):
    """Options of one inference request."""

    sha256: str | None = None
    """Version of the model that must answer, as Terrace's nodes name it; None for any."""
    budget_s: float | None = None
    """Seconds for the whole exchange. They are sent along, so that the node can refuse what it cannot do in time."""
    request_id: str = ""
    """Sent along; "" for none."""
    trace: Trace | None = None
    """Trace that the request belongs to; sent along."""
    urgent: bool = False
    """True if it overtakes the requests that wait there."""
    token: str = ""
    """Token that the node asks for; "" for none."""
    compressed: bool = False
    """True to compress the request; only Terrace's nodes read that."""
    binary: bool = True
    """True to send the inputs as binary; else as JSON, which every server reads. The request itself names the form of
    the outputs."""
    prefix: str = _PREFIX
    """Prefix of the route."""
    reading: str = ""
    """`ModelOffer.reading` of that version; "" if its node chooses among several that differ in nothing else."""
    headers: Mapping[str, str] = {}
    """Further headers."""

    @property
    def version_path(self) -> str:
        """Part of the path that names the version, on the routes of the protocol."""
        if self.sha256 is None or self.prefix != _PREFIX:
            return ""
        return f"/versions/{self.sha256}{self.reading and '.'}{self.reading}"


_DEFAULTS = InferOptions()


class OipClient:
    """Inference requests to any server of the protocol, over connections that `http` keeps open.

    The caller owns `http`, closes it, and chooses its pool. Its timeouts apply in addition to the budget of each call.

    Args:
        limits: limits of answers.
        row_bytes: most bytes of the binary answer about one image.
    """

    def __init__(
        self, http: aiohttp.ClientSession, *, limits: Limits | None = None, row_bytes: int = _ROW_BYTES
    ) -> None:
        self._http = http
        self._limits = limits or Limits()
        self._row_bytes = row_bytes

    async def speaks_binary(self, url: str, *, budget_s: float, token: str = "") -> bool:
        """True if a server declares binary tensors. See `metadata` for arguments and errors."""
        said = await self._get(url, "/v2", budget_s=budget_s, token=token)
        return "binary_tensor_data" in _read(url, said, _ServerMetadata).extensions

    async def metadata(self, url: str, model: str, *, budget_s: float, token: str = "") -> ModelMetadata:
        """Metadata of a model, from its server.

        Args:
            url, model: see `infer`; budget_s, token: see `InferOptions`.

        Raises:
            UpstreamUnavailable, UpstreamTimeout, UpstreamError: see `infer`.
        """
        said = await self._get(url, f"/v2/models/{quote(model, safe='')}", budget_s=budget_s, token=token)
        return _read(url, said, ModelMetadata)

    async def check_ready(self, url: str, model: str, *, budget_s: float, token: str = "") -> None:
        """Raise where a server does not say that a model is ready; arguments and errors as for `metadata`."""
        await self._get(url, f"/v2/models/{quote(model, safe='')}/ready", budget_s=budget_s, token=token)

    async def _get(self, url: str, path: str, *, budget_s: float, token: str) -> bytes:
        headers = authorization(token)
        async with calling(url, budget_s=budget_s), ask(self._http, "GET", url + path, headers=headers) as answer:
            body = await read_at_most(answer, _MAX_METADATA_BYTES)
        if answer.status != 200:
            raise refusal_of(url, answer.status, body[:_MAX_REFUSAL_BYTES], answer.headers.get("Retry-After"))
        return body

    async def infer(
        self,
        url: str,
        model: str,
        request: InferRequest,
        options: InferOptions = _DEFAULTS,
    ) -> InferResponse:
        """Send one request and read its answer; binary tensors are not copied here.

        Args:
            url: URL of the node, such as http://127.0.0.1:7401.
            model: name of the model there.
            request: the batch; names the outputs wanted.

        Raises:
            UpstreamUnavailable: no connection, or it broke, or the node takes no work now (503).
            UpstreamTimeout: no answer within the budget, or the node said so (504).
            UpstreamError: any other refusal, or an answer that does not fit this request.
        """
        budget_s, sha256 = options.budget_s, options.sha256
        chunks, own = encode_request(request, binary=options.binary)
        own |= options.headers
        if budget_s is not None:
            own[BUDGET_HEADER] = f"{max(0.0, budget_s) * 1000:.3f}"
        if options.request_id:
            own[REQUEST_ID_HEADER] = options.request_id
        if options.trace is not None:
            own |= options.trace.headers
        if options.urgent:
            own[PRIORITY_HEADER] = INTERACTIVE
        own |= authorization(options.token)
        if options.compressed:
            chunks = [await compress(b"".join(chunks))]
            own |= {"Content-Encoding": ZSTD, "Content-Length": str(len(chunks[0]))}
        target = f"{url}{options.prefix}/{quote(model, safe='')}{options.version_path}/infer"
        rows = len(request.inputs[0].data)
        limit_bytes = min(self._limits.max_body_bytes, self._limits.max_json_bytes + rows * self._row_bytes)
        async with calling(url, budget_s=budget_s), ask(self._http, "POST", target, chunks, own) as answer:
            # One byte more, which tells an answer that is too long.
            body = await read_at_most(answer, limit_bytes + 1 if answer.status == 200 else _MAX_REFUSAL_BYTES)
        fields = answer.headers
        if answer.status != 200:
            raise refusal_of(url, answer.status, body, fields.get("Retry-After"))
        if len(body) > limit_bytes:
            raise UpstreamError(f"{url} answers with more than {limit_bytes} bytes")
        try:
            response = decode_response(body, parse_header_length(fields.get(BINARY_HEADER)), limits=self._limits)
        except InvalidInput as exc:
            raise UpstreamError(f"{url} gave an answer that cannot be read: {exc}") from exc
        except Exception as exc:  # a bug of ours, which only this node's answers bring about
            log.exception("an answer cannot be read", extra={"url": url})
            raise UpstreamError(f"{url} gave an answer that cannot be read: {type(exc).__name__}") from exc
        if response.model_name != model:
            answered = response.model_name[:120]
            raise UpstreamError(f"{url} was asked for the model {model!r} and answered with {answered!r}")
        if sha256 is not None and response.model_version != sha256:
            answered = response.model_version[:64]
            raise UpstreamError(f"{url} was asked for {model!r} of sha256 {sha256} and answered with {answered!r}")
        for wanted in request.outputs:
            data = response.output(wanted.name)
            if data is None or len(data) != rows:
                found = "no such output" if data is None else f"{len(data)} rows"
                raise UpstreamError(f"{url} was asked for '{wanted.name}' of {rows} images and answered with {found}")
        timing = _timing(fields.get("Server-Timing", ""))
        return replace(response, timing=timing, request_bytes=sum(map(len, chunks)), headers=fields)


def _read(url: str, body: bytes, form: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise UpstreamError(f"{url} describes itself in a way that cannot be read: {exc}") from exc


def _timing(header: str) -> Timing | None:
    """The times that a Terrace node reports; None if the header is missing or has another form."""
    found = _TIMING.fullmatch(header)
    if found is None:
        return None
    queue_ms, compute_ms, images = found.groups()
    return Timing(queue_s=float(queue_ms) / 1000, compute_s=float(compute_ms) / 1000, batch_images=int(images))
