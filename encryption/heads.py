"""The heads that a node runs to send features instead of pixels."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
from prometheus_client import Counter

from encryption.features import Features
from encryption.noise import KEY_BYTES
from encryption.serving import NOISE_KEYS, HeadModel
from tierkit.errors import EncoderMismatch, InvalidInput, NotFound
from tierkit.inference.files import FileDecoder, are_files
from tierkit.inference.model import Model
from tierkit.inference.runner import ModelRunner
from tierkit.inference.thread import InferenceThread
from tierkit.settings import NodeSettings
from tierkit.tensors import Array
from tierkit.wire.messages import EncoderOffer, Encoding

__all__ = ["Encoded", "Encoders"]

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


class Encoders:
    """Heads, each behind a queue of its own on the node's inference thread.

    Implements `tierkit.inference.node.HeldEncoders`.

    Args:
        heads: whose files are there; each is loaded when the first images are to be encoded with it.
        settings: of the node.
        substitute: what computes in the place of a head.
    """

    def __init__(
        self, heads: Sequence[HeadModel], settings: NodeSettings, substitute: Callable[[Model], Model] | None = None
    ) -> None:
        self._substitute = substitute
        self._heads = {head.encoder.name: head for head in heads}
        self._settings = settings
        self._runners: dict[str, ModelRunner] = {}
        self._noise_key = secrets.token_bytes(KEY_BYTES)

    @property
    def offers(self) -> tuple[EncoderOffer, ...]:
        return tuple(
            EncoderOffer(name=head.encoder.name, head=head.encoder.head.sha256, tail=head.encoder.tail.sha256)
            for head in self._heads.values()
        )

    @asynccontextmanager
    async def running(self, thread: InferenceThread, files: FileDecoder) -> AsyncIterator[None]:
        settings, self._files = self._settings, files
        async with AsyncExitStack() as stack:
            for head in self._heads.values():
                runner = ModelRunner(
                    self._substitute(head) if self._substitute else head,
                    max_batch_size=settings.batch_images,
                    max_queue_images=settings.max_queue_images,
                    thread=thread,
                )
                self._runners[head.encoder.name] = await stack.enter_async_context(runner)
            yield

    async def encode(self, images: Array, encoding: Encoding, *, budget_s: float | None) -> Encoded:
        """Features of some images, UINT8 `[n, h, w, 3]` or files `[n]`. Their noise, where the encoder adds some, is
        keyed as the task says, else with a key that this process has drawn.

        Heads go before all other work of the node's inference thread: they are short, and while one waits for the
        coarse answers of the tasks behind it, the upstream node has nothing to do.

        Raises:
            NotFound: there is no such encoder here.
            EncoderMismatch: it is here in another version.
            InvalidInput: a file cannot be read.
            TerraceError: as `ModelRunner.infer`.
        """
        head = self._heads.get(encoding.name)
        if head is None:
            raise NotFound(f"this node has no encoder '{encoding.name}', and sends no pixels in its place")
        encoder = head.encoder
        if (encoder.head.sha256, encoder.tail.sha256) != (encoding.head, encoding.tail):
            raise EncoderMismatch(
                f"the encoder '{encoder.name}' of this node is of another version than the one asked for: bring both "
                "sides to one manifest"
            )
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
        result = await self._runners[encoder.name].infer(inputs, [encoding.form], budget_s=budget_s, urgent=True)
        encode_s = result.compute_s * len(images) / result.batch_images
        _encoded_images.labels(encoder.name).inc(len(images))
        _encode_seconds.labels(encoder.name).inc(encode_s)
        features = Features(encoder=encoder, values=result.outputs[encoding.form])
        return Encoded(features=features, encode_s=encode_s)
