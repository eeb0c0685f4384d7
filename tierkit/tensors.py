"""Tensors: arrays in memory, and their specification in the Open Inference Protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

__all__ = ["Array", "Decode", "TensorSpec"]

Array = NDArray[Any]

Decode = Callable[[bytes, threading.Event], Array]
"""Turns the file of a picture into a row of a tensor, and stops early once the event is set. Raises InvalidInput if the
file is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, Open Inference Protocol datatype ("UINT8", "FP32", ...) and shape of a tensor. -1 is the batch axis, which
    always comes first."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    also: tuple[str, ...] = ()
    """Other datatypes that an input may have."""
    decode: Decode | None = field(default=None, compare=False)
    """Set for an input that may also be a tensor of files, BYTES `[n]`."""

    def accepts(self, array: Array) -> bool:
        """True if `array` has this shape; any batch size fits."""
        return len(array.shape) == len(self.shape) and all(
            want in (-1, have) for want, have in zip(self.shape, array.shape, strict=True)
        )
