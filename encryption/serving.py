"""Heads and tails as models that a node runs. Each is loaded when the first request needs it, or at once by `load`.

A device knows many upper networks and sends to one or two; upstream nodes mostly get pixels. So neither pays memory
and start-up time for parts that are not used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from encryption.features import facts, pack, unpack
from encryption.hiding import hiding_of
from encryption.noise import KEY_BYTES
from models.manifest import EncoderEntry, ModelEntry
from models.split import FEATURES
from tierkit.tensors import Array, Decode, TensorSpec
from tierkit.types import FeatureForm
from tierkit.wire.messages import EncoderOffer

__all__ = ["NOISE_KEYS", "HeadModel", "NetworkPart", "TailModel", "offer_of"]

NOISE_KEYS = "noise_keys"
"""Input of a head that adds noise: the key of each image's."""

_WIRE_TYPES = {FeatureForm.UINT8: "UINT8", FeatureForm.FLOAT16: "FP16", FeatureForm.FLOAT32: "FP32"}


class NetworkPart(Protocol):
    """Runs one part of a network."""

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """See `tierkit.inference.model.Model.run`."""
        ...


def offer_of(encoder: EncoderEntry) -> EncoderOffer:
    """Identity of an encoder, as a node offers it."""
    return EncoderOffer(name=encoder.name, head=encoder.head.sha256, tail=encoder.tail.sha256)


class _Part:
    """Args: encoder: the encoder's entry in the manifest. network: the manifest's entry for its network. load: loads
    the network's part.

    Raises:
        InvalidInput, BrokenExtension: see `encryption.hiding.hiding_of`.
    """

    def __init__(self, encoder: EncoderEntry, network: ModelEntry, load: Callable[[], NetworkPart]) -> None:
        self.encoder = encoder
        self.network = network
        self._hiding = hiding_of(encoder)
        self._load = load
        self._loading = threading.Lock()
        self._loaded: NetworkPart | None = None

    def load(self) -> NetworkPart:
        """The part itself, loaded by the first call; blocks meanwhile.

        Raises:
            As `models.session.load_encoder`.
        """
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def unload(self) -> None:
        """Give the memory back, until the next `load`."""
        with self._loading:
            self._loaded = None

    @property
    def loaded(self) -> bool:
        return self._loaded is not None

    @property
    def platform(self) -> str:
        return "onnxruntime_onnx"


class HeadModel(_Part):
    """`images` UINT8 `[n, h, w, 3]` to features as they go over the wire: the outputs `uint8`, `float16` and `float32`,
    each `[n, channels, h, w]`. One that adds noise also takes `noise_keys` UINT8 `[n, KEY_BYTES]`: the tasks of a batch
    have their own. Implements `tierkit.inference.model.Model`.

    Args:
        decode: of images that come as files.
    """

    def __init__(
        self,
        encoder: EncoderEntry,
        network: ModelEntry,
        load: Callable[[], NetworkPart],
        decode: Decode | None = None,
    ) -> None:
        super().__init__(encoder, network, load)
        self._decode = decode

    @property
    def name(self) -> str:
        return f"{self.encoder.name}-head"

    @property
    def sha256(self) -> str:
        return self.encoder.head.sha256

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        images = TensorSpec(name="images", datatype="UINT8", shape=(-1, *self.network.input_shape), decode=self._decode)
        keys = TensorSpec(name=NOISE_KEYS, datatype="UINT8", shape=(-1, KEY_BYTES))
        return (images, keys) if self.encoder.noise else (images,)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        shape = (-1, *self.encoder.feature_shape)
        return tuple(TensorSpec(name=form, datatype=datatype, shape=shape) for form, datatype in _WIRE_TYPES.items())

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        return {}

    @property
    def parameters(self) -> Mapping[str, str | int | float | bool]:
        return {"encoder": self.encoder.name, "parameters": self.encoder.head_parameters}

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        images = inputs["images"]
        features = self.load().run({"images": images}, [FEATURES])[FEATURES]
        if self._hiding is not None:
            features = self._hiding.hide(self.encoder, images, features, inputs.get(NOISE_KEYS))
        return {name: pack(self.encoder, features, FeatureForm(name)) for name in outputs}


class TailModel(_Part):
    """`features` in any of their forms to `logits` and `probabilities` FP32 `[n, classes]`. Implements
    `tierkit.inference.model.Model`.

    Args:
        labels: class names.
    """

    def __init__(
        self, encoder: EncoderEntry, network: ModelEntry, load: Callable[[], NetworkPart], labels: Sequence[str]
    ) -> None:
        super().__init__(encoder, network, load)
        self._labels = labels

    @property
    def name(self) -> str:
        return self.encoder.name

    @property
    def sha256(self) -> str:
        return self.encoder.tail.sha256

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        first, *others = _WIRE_TYPES.values()
        shape = (-1, *self.encoder.feature_shape)
        return (TensorSpec(name=FEATURES, datatype=first, shape=shape, also=tuple(others)),)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        shape = (-1, self.network.classes)
        return tuple(TensorSpec(name=name, datatype="FP32", shape=shape) for name in ("logits", "probabilities"))

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        return {"logits": self._labels, "probabilities": self._labels}

    @property
    def parameters(self) -> Mapping[str, str | int | float | bool]:
        encoder = self.encoder
        return {
            **facts(encoder),
            "temperature": encoder.temperature,
            "fine_accuracy": encoder.fine_accuracy,
            "coarse_accuracy": encoder.coarse_accuracy,
        }

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        features = unpack(self.encoder, inputs[FEATURES])
        if self._hiding is not None:
            features = self._hiding.restore(self.encoder, features)
        return self.load().run({FEATURES: features}, outputs)
