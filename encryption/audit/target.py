"""An encoder as an attacker meets it: what arrives above, and what is known of how it came about."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from encryption.features import pack, unpack
from encryption.noise import KEY_BYTES, NOISE
from encryption.packing import sends_levels
from models.export.dequantize import dequantize_onnx
from models.manifest import EncoderEntry
from models.session import OnnxModel
from models.split import FEATURES
from models.training.onnx_network import OnnxNetwork, round_through
from tierkit.errors import InvalidInput
from tierkit.tensors import Array
from tierkit.types import FeatureForm
from tierkit.wire.oip.compression import compress_blocking

__all__ = ["FORMS", "Target"]

FORMS = ("uint8", "float16", "float32")
_BATCH = 250


@dataclass(frozen=True, kw_only=True)
class Target:
    """One encoder in one form."""

    encoder: EncoderEntry
    form: str
    head: OnnxModel
    """Head, computed by the device's own runtime."""
    head_file: bytes
    """ONNX file, given to attackers that have the head or know its plan."""
    seed: int
    _noise: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        if self.encoder.hiding is not None:
            raise InvalidInput(f"{self.encoder.name} hides by {self.encoder.hiding}, which the audit cannot attack")
        object.__setattr__(self, "_noise", np.random.default_rng(self.seed))

    @property
    def rounds(self) -> bool:
        """True if only the encoder's levels are sent."""
        return self.form == "uint8" or sends_levels(self.encoder)

    @cached_property
    def bounds(self) -> tuple[float, float] | None:
        """Lowest and highest value that can arrive; None if features are sent as they are. Travels with them."""
        if not self.rounds:
            return None
        encoder = self.encoder
        return -encoder.zero_point * encoder.scale, (encoder.levels - 1 - encoder.zero_point) * encoder.scale

    @property
    def deviation(self) -> float:
        """Standard deviation of what the device's noise and the rounding add to a feature; for floating-point numbers a
        generous guess, which the rounding within the head needs as well."""
        rounded = self.encoder.scale / 12**0.5 if self.rounds else 0.02 * self.encoder.scale
        return float(np.hypot(rounded, self.encoder.noise))

    def send(self, images: Array) -> Array:
        """Return the features that arrive when the device sends images, UINT8 `[n, h, w, 3]`: FP32 `[n, c, h, w]`, with
        the noise, the precision and the bounds of the form."""
        parts = [images[start : start + _BATCH] for start in range(0, len(images), _BATCH)]
        return np.concatenate([self.transmit(self.head.run({"images": part}, [FEATURES])[FEATURES]) for part in parts])

    def transmit(self, features: Array) -> Array:
        """Return features FP32 `[n, c, h, w]` as they arrive."""
        if self.encoder.noise:
            # Fresh each time, which is more than an attacker gets to see: a device repeats the noise of an image.
            drawn = self._noise.standard_normal(features.shape, dtype=np.float32)
            features = features + drawn * np.float32(self.encoder.noise)
        return unpack(self.encoder, self._pack(features))

    def payload(self, images: Array) -> bytes:
        """Return the bytes that the device sends for a task; UINT8 is compressed."""
        features = self.head.run({"images": images}, [FEATURES])[FEATURES]
        if self.encoder.noise:
            features = NOISE.hide(self.encoder, images, features, np.zeros((len(images), KEY_BYTES), np.uint8))
        packed = self._pack(features).tobytes()
        return compress_blocking(packed) if self.form == "uint8" else packed

    def _pack(self, features: Array) -> Array:
        return pack(self.encoder, features, FeatureForm(self.form))

    def imitate(self, features: Tensor) -> Tensor:
        """The same for an attacker's own features, without the noise, so that gradients pass."""
        if not self.rounds:
            return features
        encoder = self.encoder
        levels = round_through(features / encoder.scale) + encoder.zero_point
        return (torch.clamp(levels, 0, encoder.levels - 1) - encoder.zero_point) * encoder.scale

    def open_head(self) -> OnnxNetwork:
        """The head with its weights."""
        return OnnxNetwork(self.head_file)

    def surrogate(self, seed: int) -> OnnxNetwork:
        """Return a head with the same layers and randomly drawn weights. An attacker that knows only the head's plan
        uses it. Nothing in it is rounded."""
        torch.manual_seed(seed)
        network = OnnxNetwork(dequantize_onnx(self.head_file))
        for layer in network.layers():
            torch.nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                torch.nn.init.zeros_(layer.bias)
        return network
