"""The heads that a node runs to send features instead of pixels."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from prometheus_client import Counter

from encryption.features import Features
from encryption.noise import KEY_BYTES
from encryption.serving import NOISE_KEYS, HeadModel, offer_of
from tierkit.errors import EncoderMismatch, InvalidInput, NotFound, Unavailable
from tierkit.inference.files import FileDecoder, are_files
from tierkit.inference.model import Model
from tierkit.inference.runner import ModelRunner
from tierkit.inference.thread import InferenceThread
from tierkit.inference.versions import UseCount
from tierkit.settings import NodeSettings
from tierkit.tensors import Array
from tierkit.wire.messages import EncoderOffer, Encoding

__all__ = ["Encoded", "Encoders"]

_MOST_REMEMBERED = 64

_encoded_images = Counter("terrace_encoded_images_total", "Images that this node has encoded.", ["encoder"])
_encode_seconds = Counter(
    "terrace_encode_seconds_total", "Seconds that this node has spent on encoding images.", ["encoder"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Features, and what they cost."""

    features: Features
    encode_s: float
    """The images' share of the batch that they were encoded in."""


class _Held:
    """A head, and what it runs on."""

    def __init__(self, head: HeadModel, runner: ModelRunner) -> None:
        self.head = head
        self.runner = runner
        self.uses = UseCount()

    async def close(self) -> None:
        """Encode what waits, then give the memory back."""
        await self.uses.ended()
        await self.runner.__aexit__(None, None, None)
        await asyncio.to_thread(self.head.unload)


class Encoders:
    """Heads, each with a queue on the node's inference thread; several versions of an encoder may be held at a time.

    Implements `tierkit.inference.served.HeldEncoders`.

    Args:
        heads: whose files are there; each is loaded when the first images are to be encoded with it.
        settings: of the node.
        substitute: what computes in the place of a head.
    """

    def __init__(
        self, heads: Sequence[Model], settings: NodeSettings, substitute: Callable[[Model], Model] | None = None
    ) -> None:
        self._substitute = substitute
        self._heads = tuple(head for head in heads if isinstance(head, HeadModel))
        """Heads that it starts with."""
        self._settings = settings
        self._held: dict[EncoderOffer, _Held] = {}
        self._offers = tuple(offer_of(head.encoder) for head in self._heads)
        self._gone: deque[EncoderOffer] = deque(maxlen=_MOST_REMEMBERED)
        """Encoders that were held once."""
        self._noise_key = secrets.token_bytes(KEY_BYTES)

    @property
    def offers(self) -> tuple[EncoderOffer, ...]:
        return self._offers

    @asynccontextmanager
    async def running(self, thread: InferenceThread, files: FileDecoder) -> AsyncIterator[None]:
        self._thread, self._files = thread, files
        try:
            await self.hold(self._heads)
            yield
        finally:
            for held in self._held.values():
                await held.runner.__aexit__(None, None, None)

    async def hold(self, heads: Sequence[Model]) -> None:
        """See `tierkit.inference.served.HeldEncoders`."""
        settings = self._settings
        for head in heads:
            assert isinstance(head, HeadModel)
            runner = ModelRunner(
                self._substitute(head) if self._substitute else head,
                max_batch_size=settings.batch_images,
                max_queue_images=settings.max_queue_images,
                thread=self._thread,
            )
            self._held[offer_of(head.encoder)] = _Held(head, await runner.__aenter__())

    def offer(self, offers: Sequence[EncoderOffer]) -> None:
        """See `tierkit.inference.served.HeldEncoders`."""
        self._offers = tuple(offer for offer in dict.fromkeys(offers) if offer in self._held)

    async def drop(self) -> None:
        """See `tierkit.inference.served.HeldEncoders`."""
        for offer in self._held.keys() - set(self._offers):
            self._gone.append(offer)
            await self._held.pop(offer).close()

    async def encode(self, images: Array, encoding: Encoding, *, budget_s: float | None) -> Encoded:
        """Return features of some images, UINT8 `[n, h, w, 3]` or files `[n]`. If the encoder adds noise, its key is
        the task's, or else one that this process has drawn.

        Heads go before all other work of the node's inference thread: they are short, and while one waits for the
        coarse answers of the tasks behind it, the upstream node has nothing to do.

        Raises:
            NotFound: the encoder is not here.
            EncoderMismatch: it is here in another version.
            Unavailable: it is not here any more.
            InvalidInput: a file cannot be read.
            TerraceError: see `ModelRunner.infer`.
        """
        held = self._find(encoding)
        with held.uses:
            return await self._encode(held, images, encoding, budget_s=budget_s)

    def _find(self, encoding: Encoding) -> _Held:
        wanted = EncoderOffer(name=encoding.name, head=encoding.head, tail=encoding.tail)
        held = self._held.get(wanted)
        if held is not None:
            return held
        if wanted in self._gone:
            raise Unavailable(f"this node does not hold this version of the encoder '{encoding.name}' any more")
        if all(offer.name != encoding.name for offer in self._held):
            raise NotFound(f"this node has no encoder '{encoding.name}', and sends no pixels in its place")
        raise EncoderMismatch(
            f"the encoder '{encoding.name}' of this node is of another version than the one asked for: bring both "
            "sides to one manifest"
        )

    async def _encode(self, held: _Held, images: Array, encoding: Encoding, *, budget_s: float | None) -> Encoded:
        head, encoder = held.head, held.head.encoder
        if not head.loaded:
            await asyncio.to_thread(head.load)
        spec = head.inputs[0]
        if are_files(spec, images):
            decoded = await self._files.decode(spec, images)
            if decoded.damaged:
                raise InvalidInput(f"picture {next(iter(decoded.damaged))} cannot be read")
            images = decoded.rows
        inputs = {"images": images}
        if encoder.noise:
            key = bytes.fromhex(encoding.noise_key) or self._noise_key
            inputs[NOISE_KEYS] = np.broadcast_to(np.frombuffer(key, np.uint8), (len(images), KEY_BYTES))
        result = await held.runner.infer(inputs, [encoding.form], budget_s=budget_s, urgent=True)
        encode_s = result.compute_s * len(images) / result.batch_images
        _encoded_images.labels(encoder.name).inc(len(images))
        _encode_seconds.labels(encoder.name).inc(encode_s)
        features = Features(encoder=encoder, values=result.outputs[encoding.form])
        return Encoded(features=features, encode_s=encode_s)
