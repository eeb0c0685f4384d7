"""Features as they stand on the wire, rounded to a few levels. Pure, arrays in and out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.manifest import EncoderEntry
from tierkit.errors import InvalidInput
from tierkit.tensors import Array

__all__ = ["Quantiser", "sends_levels"]


def sends_levels(encoder: EncoderEntry) -> bool:
    """True if its features are rounded to levels in every form, because the rounding is part of what hides the picture
    and of what its tail was trained on: where noise is added, or where there are fewer levels than UINT8 has. Else the
    rounding only saves bytes, and floating-point numbers go without it."""
    return bool(encoder.noise) or encoder.levels < 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiser:
    """Rounds features to `levels` values: `q = clip(round(x / scale) + zero_point, 0, levels - 1)`."""

    scale: float
    zero_point: int
    levels: int = 256

    @classmethod
    def of(cls, encoder: EncoderEntry) -> Quantiser:
        """Return the quantiser that the manifest defines for an encoder."""
        return cls(scale=encoder.scale, zero_point=encoder.zero_point, levels=encoder.levels)

    @classmethod
    def for_range(cls, low: float, high: float, *, levels: int = 256) -> Quantiser:
        """Return the finest quantiser that covers `low` to `high`; zero is always exactly one of its levels.

        Raises:
            ValueError: the range is empty or not finite.
        """
        low, high = min(low, 0.0), max(high, 0.0)
        if not (np.isfinite(low) and np.isfinite(high)) or low == high:
            raise ValueError(f"features between {low} and {high} have no range to divide into levels")
        scale = (high - low) / (levels - 1)
        return cls(scale=scale, zero_point=round(-low / scale), levels=levels)

    def pack(self, features: Array) -> Array:
        """Features FP32 `[n, c, h, w]` as UINT8 of the same shape.

        Raises:
            InvalidInput: NaN or infinity among them.
        """
        levels = np.divide(features, np.float32(self.scale), dtype=np.float32)
        if not np.isfinite(levels).all():
            raise InvalidInput("the features hold NaN or infinity: the encoder does not fit these images")
        np.rint(levels, out=levels)
        levels += np.float32(self.zero_point)
        np.clip(levels, 0, self.levels - 1, out=levels)
        return levels.astype(np.uint8)

    def unpack(self, packed: Array) -> Array:
        """Return the FP32 features that the tail gets, from UINT8 features of any shape.

        Raises:
            InvalidInput: a value that is not a level.
        """
        if self.levels < 256 and packed.size and int(packed.max()) >= self.levels:
            raise InvalidInput(f"a packed feature is {int(packed.max())}; this encoder has {self.levels} levels")
        table = (np.arange(256, dtype=np.float32) - np.float32(self.zero_point)) * np.float32(self.scale)
        return np.asarray(table[packed])

    def levels_in(self, features: Array) -> Array:
        """Return the levels, FP32, that features FP16 or FP32 of any shape stand for.

        Raises:
            InvalidInput: a value that is not a level, in the precision of its type.
        """
        beyond = np.array([-1 - self.zero_point, self.levels - self.zero_point], np.float32) * np.float32(self.scale)
        near = self.unpack(self.pack(np.clip(features.astype(np.float32), *beyond)))
        off = np.abs(near.astype(features.dtype).astype(np.float32) - features.astype(np.float32))
        if not (off <= self.scale / 1000).all():
            wrong = float(features[off > self.scale / 1000][0])
            raise InvalidInput(
                f"a feature is {wrong:g}, which is not a level: this encoder has {self.levels}, "
                f"(q - {self.zero_point}) * {self.scale:g} for q from 0 to {self.levels - 1}"
            )
        return near
