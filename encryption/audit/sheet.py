"""The contact sheet: pictures, and what each attack made of them, row by row."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tierkit.atomic import write_atomically
from tierkit.tensors import Array

__all__ = ["Strip", "draw_sheet"]

_SIDE, _GAP, _MARGIN, _TEXT = 64, 2, 260, 15

Strip = tuple[str, Array]
"""Text at the left, with lines separated by line feeds, and images UINT8 `[n, h, w, 3]`."""


def draw_sheet(strips: Sequence[Strip], path: Path) -> None:
    """Write a PNG with one row of images for each strip.

    Raises:
        SetupError: it could not be written.
    """
    columns = max(len(images) for _, images in strips)
    size = (_MARGIN + columns * (_SIDE + _GAP), len(strips) * (_SIDE + _GAP))
    page = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(_TEXT)
    for row, (label, images) in enumerate(strips):
        top = row * (_SIDE + _GAP)
        pen.multiline_text((6, top + 4), label, fill="black", font=font, spacing=3)
        for column, pixels in enumerate(images):
            picture = Image.fromarray(np.ascontiguousarray(pixels)).resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
            page.paste(picture, (_MARGIN + column * (_SIDE + _GAP), top))
    buffer = io.BytesIO()
    page.save(buffer, format="png", optimize=True)
    write_atomically(path, buffer.getvalue())
