"""A measure of change between pictures: the mean difference of two small grey versions."""

from __future__ import annotations

import io

import numpy as np

from tierkit.tensors import Array

__all__ = ["GREY_SIDE", "ChangeFilter", "grey_of_file"]

GREY_SIDE = 32
_MAX_PIXELS = 8192 * 8192


class ChangeFilter:
    """Tells pictures that differ from the last one that passed.

    Args:
        least: mean difference of brightness, as a share of the whole range. 0: every picture passes.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._last: Array | None = None

    @property
    def active(self) -> bool:
        """False if every picture passes."""
        return self._least > 0

    def differs(self, grey: Array | None) -> bool:
        """True if the picture passes.

        Args:
            grey: UINT8 `[32, 32]`; None for a picture that cannot be read, which passes.
        """
        if grey is None:
            return True
        now = grey.astype(np.int16)
        if self._last is not None and np.abs(now - self._last).mean() / 255.0 < self._least:
            return False
        self._last = now
        return True


def grey_of_file(content: bytes) -> Array | None:
    """The small grey version of a picture file, UINT8 `[32, 32]`; None if it cannot be read."""
    from PIL import Image  # the reader of a video does without

    try:
        with Image.open(io.BytesIO(content)) as picture:
            if picture.width * picture.height > _MAX_PIXELS:
                return None
            picture.draft("L", (GREY_SIDE * 2, GREY_SIDE * 2))
            small = picture.convert("L").resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None
    return np.asarray(small)
