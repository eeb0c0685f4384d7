"""The protocol's datatype names, and the numpy types that carry them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierkit.errors import MalformedMessage
from tierkit.tensors import Array

__all__ = ["BYTES", "DATATYPES", "datatype_of", "dtype_of"]

BYTES = "BYTES"
"""Datatype of strings: an array of Python `bytes` objects (dtype object) here."""

DATATYPES: dict[str, np.dtype[Any]] = {
    # The wire is little-endian on every machine.
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    BYTES: np.dtype("O"),
}

_NAMES = {dtype: name for name, dtype in DATATYPES.items()}


def dtype_of(datatype: str) -> np.dtype[Any]:
    """The numpy type of a protocol datatype.

    Raises:
        MalformedMessage: there is none (BF16 among them: numpy has no such type).
    """
    dtype = DATATYPES.get(datatype)
    if dtype is None:
        raise MalformedMessage(f"datatype {datatype!r} is not supported; one of {', '.join(DATATYPES)}")
    return dtype


def datatype_of(array: Array) -> str:
    """The protocol datatype of an array, of any byte order.

    Raises:
        MalformedMessage: the protocol has no such datatype.
    """
    name = _NAMES.get(array.dtype) or _NAMES.get(array.dtype.newbyteorder("<"))
    if name is None:
        raise MalformedMessage(f"the protocol has no datatype for numpy's {array.dtype}")
    return name
