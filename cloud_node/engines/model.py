"""A network that is computed elsewhere: the manifest describes it, and an engine computes its logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from cloud_node.settings import CloudSettings
from models.manifest import EncoderEntry, Manifest, ModelEntry
from models.serving import decode_of
from models.session import facts_of, softmax
from tierkit.errors import InvalidAnswer
from tierkit.tensors import Array, TensorSpec

__all__ = ["Computes", "EngineModel", "WholeNetworks", "cut"]

_LEAST_PIECE = 4
"""Least images of a piece: fewer are not worth a separate request."""


class Computes(Protocol):
    """The part of an engine that models use, on the inference thread."""

    @property
    def replicas(self) -> int:
        """Number of pieces that it computes side by side now."""
        ...

    def compute(self, model: str, pieces: Sequence[Array]) -> Sequence[Array]:
        """Return the logits of each piece of a batch. Blocks until they are there, at most for the longest time of a
        batch.

        Raises:
            UpstreamUnavailable, UpstreamTimeout, UpstreamError: the engine cannot compute them.
        """
        ...


class EngineModel:
    """Implements `tierkit.inference.model.Model`, with the labels and the temperature of the manifest.

    Args:
        entry: the network's entry in the manifest.
        takes: its only input.
        labels: class names.
        platform: name of the program that computes it, in the words of the protocol.
        engine: computes it.
        most_images: most images in one request to the engine.
    """

    def __init__(
        self,
        entry: ModelEntry,
        takes: TensorSpec,
        labels: Sequence[str],
        *,
        platform: str,
        engine: Computes,
        most_images: int,
    ) -> None:
        self._entry = entry
        self._takes = takes
        self._labels = labels
        self._platform = platform
        self._engine = engine
        self._most_images = most_images

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def platform(self) -> str:
        return self._platform

    @property
    def sha256(self) -> str:
        return self._entry.sha256

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return (self._takes,)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        shape = (-1, len(self._labels))
        return tuple(TensorSpec(name=name, datatype="FP32", shape=shape) for name in ("logits", "probabilities"))

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        return {"logits": self._labels, "probabilities": self._labels}

    @property
    def parameters(self) -> Mapping[str, str | int | float | bool]:
        return facts_of(self._entry)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """See `tierkit.inference.model.Model.run`.

        Raises:
            UpstreamUnavailable, UpstreamTimeout, UpstreamError: see `Computes.compute`.
            InvalidAnswer: the engine's answer is not the logits of these images.
        """
        images = inputs[self._takes.name]
        ends = cut(len(images), most=self._most_images, ways=self._engine.replicas)
        logits = np.concatenate(self._engine.compute(self.name, [images[a:b] for a, b in pairwise(ends)]))
        if logits.shape != (len(images), len(self._labels)) or not np.isfinite(logits).all():
            raise InvalidAnswer(f"the answer holds no {len(self._labels)} numbers for each of {len(images)} images")
        computed = {"logits": logits, "probabilities": softmax(logits, self._entry.temperature)}
        return {name: computed[name] for name in outputs}


class WholeNetworks:
    """Implements `encryption.loading.Loader` for an engine that computes from images, and takes no features."""

    def __init__(self, settings: CloudSettings, manifest: Manifest, engine: Computes) -> None:
        self._settings, self._manifest, self._engine = settings, manifest, engine

    async def network(self, entry: ModelEntry) -> EngineModel:
        """See `encryption.loading.Loader`."""
        decode = decode_of(self._manifest, entry)
        takes = TensorSpec(name="images", datatype="UINT8", shape=(-1, *entry.input_shape), decode=decode)
        return EngineModel(
            entry,
            takes,
            self._manifest.labels(entry),
            platform=self._settings.engine,
            engine=self._engine,
            most_images=self._settings.max_batch_size,
        )

    async def tail(self, encoder: EncoderEntry) -> None:
        """See `encryption.loading.Loader`."""


def cut(images: int, *, most: int, ways: int) -> list[int]:
    """Return the positions at which a batch is cut into even pieces, from 0 to `images`.

    Args:
        images: images in the batch, at least 1.
        most: most images in a piece.
        ways: pieces that are computed side by side; a batch is cut into as many if it is large enough.
    """
    pieces = max(-(-images // most), min(ways, images // _LEAST_PIECE), 1)
    return [images * number // pieces for number in range(pieces + 1)]
