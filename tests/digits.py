"""A data set in the files of MNIST, whose digits can be told at once."""

import struct
from pathlib import Path

import numpy as np

__all__ = ["write_digits"]


def write_digits(root: Path, images: int) -> Path:
    """Write so many training images and 100 test images, whose classes differ in the row that is bright; the folder
    that holds mnist/."""
    (root / "mnist").mkdir()
    for split, count in (("train", images), ("t10k", 100)):
        labels = np.arange(count, dtype=np.uint8) % 10
        pixels = np.random.default_rng(0).integers(0, 60, (count, 28, 28), dtype=np.uint8)
        pixels[np.arange(count), 2 + 2 * labels] += 150
        for kind, content in (
            ("images-idx3", struct.pack(">4I", 0x803, count, 28, 28) + pixels.tobytes()),
            ("labels-idx1", struct.pack(">2I", 0x801, count) + labels.tobytes()),
        ):
            (root / "mnist" / f"{split}-{kind}-ubyte").write_bytes(content)
    return root
