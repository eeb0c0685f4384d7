"""The two ways in which images leave a node: pixels to those that may see them, features to the others.

`FeatureClient` takes `Features` and nothing else, and `PixelClient` takes a `MaySeePixels`, which only `destination`
makes, from a route that asks for no encoding. So there is no call that sends pixels to a node which must not see them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Counter

from encryption.features import Features, features_tensor
from tierkit.errors import UpstreamError
from tierkit.inference.oip_client import InferOptions, OipClient
from tierkit.tensors import Array
from tierkit.types import FeatureForm
from tierkit.wire.events import Sent, read_sent
from tierkit.wire.messages import ENCODED_HEADER, UPSTREAM_HEADER, UPSTREAMS, Encoding, Relay, Upstream
from tierkit.wire.oip import InferRequest, InferResponse, RequestedOutput, Tensor
from tierkit.wire.trace import Trace

__all__ = [
    "PIXELS",
    "RELAY_PREFIX",
    "Call",
    "FeatureClient",
    "MaySeePixels",
    "PixelClient",
    "Reply",
    "TakesFeatures",
    "ThroughRelay",
    "destination",
    "kind_of",
]

PIXELS = "pixels"
"""`Sent.form` of images that went as they are."""

RELAY_PREFIX = "/v1/relay"
"""Path of the route of a node that encodes for others: `RELAY_PREFIX/MODEL/infer`. It takes an inference request with
the upstream node in `UPSTREAM_HEADER`."""

_upload_bytes = Counter(
    "terrace_sent_bytes_total", "Bytes of images sent to upstream nodes, by the form that they had.", ["to", "form"]
)
_uploads = cache(_upload_bytes.labels)  # to find the metric of a label takes longer than to count


class MaySeePixels(Struct, frozen=True, kw_only=True):
    """An upstream node that the scheduler trusts."""

    upstream: Upstream


class TakesFeatures(Struct, frozen=True, kw_only=True):
    """An upstream node that gets features of this encoder."""

    upstream: Upstream
    encoding: Encoding


class ThroughRelay(Struct, frozen=True, kw_only=True):
    """An upstream node that gets features, from a trusted node that gets the pixels."""

    upstream: Upstream
    relay: Relay
    kind: str


def destination(upstream: Upstream) -> MaySeePixels | TakesFeatures | ThroughRelay:
    """Return the form and the way in which images may go to the upstream node of a route."""
    if upstream.encoding is None:
        return MaySeePixels(upstream=upstream)
    if upstream.relay is not None:
        return ThroughRelay(upstream=upstream, relay=upstream.relay, kind=kind_of(upstream.encoding))
    return TakesFeatures(upstream=upstream, encoding=upstream.encoding)


def kind_of(encoding: Encoding) -> str:
    """Return the kind of an encoder, used in messages and metrics."""
    return encoding.name.rpartition(".")[2]


class Call(Struct, frozen=True, kw_only=True):
    """Parts of a request other than the images."""

    outputs: tuple[str, ...]
    request_id: str = ""
    trace: Trace | None = None
    budget_s: float | None = None
    urgent: bool = False

    def options(self, upstream: Upstream, **more: Any) -> InferOptions:
        """The options of a request about an upstream node's network; `more` are further ones."""
        return InferOptions(
            sha256=upstream.sha256,
            reading=upstream.reading,
            budget_s=self.budget_s,
            request_id=self.request_id,
            trace=self.trace,
            urgent=self.urgent,
            **more,
        )


class Reply(Struct, frozen=True, kw_only=True):
    """Answer of an upstream node, with the form in which the images were sent to it."""

    response: InferResponse
    sent: Sent


class FeatureClient:
    """Asks upstream nodes about features. It has no way to send anything else.

    Args:
        client: whose connections it uses.
        node_id: of this node, which has encoded.
    """

    def __init__(self, client: OipClient, node_id: str) -> None:
        self._client = client
        self._node_id = node_id

    async def infer(self, to: TakesFeatures, features: Features, call: Call, *, encode_s: float) -> Reply:
        """Send features and read the answer.

        Raises:
            UpstreamError: the features are from another encoder than the node takes; see also `OipClient.infer`.
            TerraceError: see `OipClient.infer`.
        """
        encoder, wanted = features.encoder, to.encoding
        if (encoder.name, encoder.head.sha256, encoder.tail.sha256) != (wanted.name, wanted.head, wanted.tail):
            raise UpstreamError(f"{to.upstream.node_id} takes features of {wanted.name}, not of {encoder.name}")
        response = await self._client.infer(
            to.upstream.url,
            to.upstream.model,
            _request(await features_tensor(features), call),
            # Floating-point numbers hardly get shorter.
            call.options(to.upstream, token=to.upstream.key, compressed=features.form is FeatureForm.UINT8),
        )
        form = kind_of(wanted)
        _uploads(to.upstream.tier, form).inc(response.request_bytes)
        sent = Sent(form=form, upload_bytes=response.request_bytes, encode_ms=encode_s * 1000, encoded_by=self._node_id)
        return Reply(response=response, sent=sent)


class PixelClient:
    """Asks trusted nodes about images as they are.

    Args:
        client: whose connections it uses.
    """

    def __init__(self, client: OipClient) -> None:
        self._client = client

    async def infer(self, to: MaySeePixels, images: Array, call: Call) -> Reply:
        """Send images, UINT8 `[n, h, w, 3]`, and read the answer. For its errors, see `OipClient.infer`."""
        response = await self._client.infer(
            to.upstream.url,
            to.upstream.model,
            _request(Tensor("images", images), call),
            call.options(to.upstream, token=to.upstream.key),
        )
        _uploads(to.upstream.tier, PIXELS).inc(response.request_bytes)
        return Reply(response=response, sent=Sent(form=PIXELS, upload_bytes=response.request_bytes))

    async def relay(self, to: ThroughRelay, images: Array, call: Call) -> Reply:
        """Send images to the trusted node that encodes them and passes them on, and read the upstream node's answer.

        Raises:
            UpstreamError: the relay does not report that it sent the requested form; see also `OipClient.infer`.
            TerraceError: see `OipClient.infer`.
        """
        passed_on = to.upstream.model_copy(update={"relay": None})
        response = await self._client.infer(
            to.relay.url,
            to.upstream.model,
            _request(Tensor("images", images), call),
            call.options(
                to.upstream,
                token=to.relay.key,
                prefix=RELAY_PREFIX,
                headers={UPSTREAM_HEADER: UPSTREAMS.dump_json((passed_on,)).decode()},
            ),
        )
        _uploads("relay", PIXELS).inc(response.request_bytes)
        try:
            sent = read_sent(response.headers.get(ENCODED_HEADER, ""))
        except ValueError as exc:
            raise UpstreamError(f"{to.relay.node_id} does not report the form that it sent on") from exc
        if (sent.form, sent.encoded_by) != (to.kind, to.relay.node_id):
            raise UpstreamError(
                f"{to.relay.node_id} was to encode {to.kind!r}, and sent on {sent.form!r}, encoded by "
                f"{sent.encoded_by or 'no node'}"
            )
        return Reply(response=response, sent=replace(sent, relay_bytes=response.request_bytes))


def _request(tensor: Tensor, call: Call) -> InferRequest:
    # Without an id in its JSON part, which is then the same for all batches of one size: both sides have it at hand.
    # What tells one request from another is in a header.
    return InferRequest(inputs=(tensor,), outputs=_wanted(call.outputs))


@lru_cache(maxsize=64)
def _wanted(names: tuple[str, ...]) -> tuple[RequestedOutput, ...]:
    return tuple(map(RequestedOutput, names))
