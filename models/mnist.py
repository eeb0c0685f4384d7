"""Reader of MNIST's official files (Y. LeCun, C. Cortes, C. Burges), packed by gzip or not.

A file of the idx format has a magic number, the sizes of its axes (big-endian, four bytes each), and one byte for each
value. What a header says is checked before anything is read by it, and a packed file is unpacked no further than that.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from models.data import ImageSet, Split
from models.hierarchy import Hierarchy
from tierkit.errors import DataError
from tierkit.tensors import Array

__all__ = ["DIGITS", "read_mnist"]

DIGITS = Hierarchy.flat("mnist", [str(digit) for digit in range(10)])

_FOLDER = "mnist"
_PREFIX = {"train": "train", "test": "t10k"}
_SIDE = 28
_MOST = 60_000
"""Images of the training set, which is the larger one."""
_UNPACK = "unpack or download MNIST's files again"


def read_mnist(split: Split, root: Path | None = None) -> ImageSet:
    """Read one split of MNIST: 60,000 training or 10,000 test images of 28 x 28 grey pixels.

    Args:
        split: "train" or "test".
        root: folder that holds `mnist/`.

    Returns:
        Images UINT8 `[n, 28, 28, 1]`; the classes are their own superclasses.

    Raises:
        DataError: `root` is not given, or a file is missing, damaged, or does not fit the other one.
    """
    if root is None:
        raise DataError("no data folder given: set --data or TERRACE_DATA to the folder that holds mnist/")
    stem = root / _FOLDER / _PREFIX[split]
    images = _read_idx(Path(f"{stem}-images-idx3-ubyte"), (_SIDE, _SIDE))
    labels = _read_idx(Path(f"{stem}-labels-idx1-ubyte"), ())
    if len(images) != len(labels):
        raise DataError(
            f"{stem.parent} has {len(images)} images and {len(labels)} labels for {split!r}, which must be as many: "
            f"{_UNPACK}"
        )
    if labels.max() >= len(DIGITS.fine):
        raise DataError(f"{stem.parent} has the label {labels.max()} for {split!r}, which is not a digit: {_UNPACK}")
    fine = labels.astype(np.int64)
    return ImageSet(
        images=images[..., None],
        fine=fine,
        coarse=DIGITS.coarse_labels(fine),
        names=tuple(f"{split}/{index:05d}" for index in range(len(images))),
        hierarchy_name=DIGITS.name,
    )


def _read_idx(path: Path, item: tuple[int, ...]) -> Array:
    """UINT8 `[n, *item]` of the file at `path`, or of that with `.gz` after its name."""
    packed = path.with_name(f"{path.name}.gz")
    found = path if path.is_file() else packed
    try:
        with found.open("rb") if found == path else cast(IO[bytes], gzip.open(found)) as file:
            return _decode_idx(file, item)
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{found} is damaged or another file ({error}): {_UNPACK}") from error
    except OSError as error:
        raise DataError(
            f"cannot read {found} ({error.strerror}): set --data or TERRACE_DATA to the folder that holds mnist/ "
            "with MNIST's four files"
        ) from error


def _decode_idx(file: IO[bytes], item: tuple[int, ...]) -> Array:
    """Raises ValueError for a file that is not an idx file of such items."""
    axes = 1 + len(item)
    magic = 0x0800 + axes  # 8 for bytes, then the number of axes
    head = file.read(4 * (1 + axes))
    if len(head) < 4 * (1 + axes):
        raise ValueError("it ends within its header")
    found, count, *shape = struct.unpack(f">{1 + axes}I", head)
    if found != magic:
        raise ValueError(f"its magic number is {found}, expected {magic}")
    if tuple(shape) != item:
        raise ValueError(f"its images are of {' x '.join(map(str, shape))} pixels, expected {_SIDE} x {_SIDE}")
    if not 1 <= count <= _MOST:
        raise ValueError(f"its header says {count} items, expected 1 to {_MOST}")
    size = count * int(np.prod(item, dtype=int))
    # The end of the file is read too, where gzip has its checksum.
    body = file.read(size + 1)
    if len(body) != size:
        raise ValueError(f"it is {'longer' if len(body) > size else 'shorter'} than its header says")
    return np.frombuffer(bytearray(body), np.uint8).reshape(count, *item)  # of bytes it could not be written to
