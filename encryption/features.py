"""Features on their way: the one type that may be sent to a node which must not see pixels, and its form on the wire.

`Features` come out of an encoder's head (`encryption.heads`) and are checked against the encoder's own facts, so that
nothing else can pass for them. With the tensor travel the encoder's name, the digests of its head and tail, scale, zero
point and levels, and a digest of the values; a receiver that knows any of that otherwise refuses.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from encryption.packing import Quantiser, sends_levels
from models.manifest import EncoderEntry
from models.split import FEATURES
from tierkit.errors import EncoderMismatch, InvalidInput, MalformedMessage
from tierkit.tensors import Array
from tierkit.types import FeatureForm
from tierkit.wire.oip import InferRequest, Tensor

__all__ = ["DTYPES", "FORMS", "Features", "check_features", "facts", "features_tensor", "pack", "unpack"]

DTYPES: dict[FeatureForm, np.dtype[Any]] = {
    FeatureForm.UINT8: np.dtype(np.uint8),
    FeatureForm.FLOAT16: np.dtype(np.float16),
    FeatureForm.FLOAT32: np.dtype(np.float32),
}
FORMS = {dtype: form for form, dtype in DTYPES.items()}
_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """Features of some images, made by an encoder's head.

    Raises:
        ValueError: `values` are not features of this encoder.
    """

    encoder: EncoderEntry
    values: Array
    """`[n, channels, h, w]`, packed by `pack`."""

    def __post_init__(self) -> None:
        if self.values.dtype not in FORMS or self.values.shape[1:] != self.encoder.feature_shape:
            raise ValueError(
                f"{self.values.dtype} {list(self.values.shape)} are not features of {self.encoder.name}, "
                f"{list(self.encoder.feature_shape)}"
            )

    @property
    def form(self) -> FeatureForm:
        return FORMS[self.values.dtype]

    def __len__(self) -> int:
        return len(self.values)


async def features_tensor(features: Features) -> Tensor:
    """The tensor as it is sent, with what a receiver must know of it."""
    values = np.ascontiguousarray(features.values)
    return Tensor(FEATURES, values, {**facts(features.encoder), "sha256": await asyncio.to_thread(_digest, values)})


async def check_features(encoder: EncoderEntry, request: InferRequest) -> None:
    """Check that a request for this encoder's tail, whose shape and type fit, holds unchanged features of this encoder.

    Raises:
        InvalidInput: parameters are missing, or the features hold a value that the encoder cannot give.
        EncoderMismatch: the features are from another encoder, version, scale or zero point.
        MalformedMessage: the values were changed on the way.
    """
    (tensor,) = request.inputs
    values, said = tensor.data, dict(tensor.parameters)
    expected = facts(encoder)
    if missing := [name for name in (*expected, "sha256") if name not in said]:
        raise InvalidInput(
            f"the tensor '{FEATURES}' of '{encoder.name}' needs the parameters {', '.join(missing)}: they identify the "
            "encoder and its version"
        )
    for name, value in expected.items():
        if not _same(value, said[name]):
            raise EncoderMismatch(
                f"the features are of {name} {str(said[name])[:80]}; '{encoder.name}' here has {value}: bring both "
                "sides to one manifest"
            )
    digest = said["sha256"]
    if not isinstance(digest, str) or not hmac.compare_digest(
        digest.encode(), (await asyncio.to_thread(_digest, values)).encode()
    ):
        raise MalformedMessage("the features are not those that were sent: their sha256 is another one")
    if sends_levels(encoder):
        # Before they join a batch with those of others.
        await asyncio.to_thread(unpack, encoder, values)


def pack(encoder: EncoderEntry, features: Array, form: FeatureForm) -> Array:
    """Pack features FP32 `[n, channels, h, w]`, which include the encoder's noise, in the form that is sent. An encoder
    that hides by its few levels sends only these levels, in any type.

    Raises:
        InvalidInput: NaN or infinity among features that are rounded.
    """
    quantiser = Quantiser.of(encoder)
    if form is FeatureForm.UINT8:
        return quantiser.pack(features)
    if sends_levels(encoder):
        features = quantiser.unpack(quantiser.pack(features))
    if form is FeatureForm.FLOAT16:
        features = np.clip(features, -_LARGEST_HALF, _LARGEST_HALF)
    return np.asarray(features, dtype=DTYPES[form])


def unpack(encoder: EncoderEntry, values: Array) -> Array:
    """FP32 features, as the tail takes them, of any form.

    Raises:
        InvalidInput: a value that the encoder cannot have made.
    """
    if values.dtype == np.uint8:
        return Quantiser.of(encoder).unpack(values)
    if sends_levels(encoder):
        return Quantiser.of(encoder).levels_in(values)
    return np.asarray(values, dtype=np.float32)


def facts(encoder: EncoderEntry) -> dict[str, str | int | float]:
    """Return the parameters that travel with features, which a tail's metadata has as well."""
    hiding = {} if encoder.hiding is None else {"hiding": encoder.hiding}
    return {
        **hiding,
        "encoder": encoder.name,
        "head": encoder.head.sha256,
        "tail": encoder.tail.sha256,
        "scale": encoder.scale,
        "zero_point": encoder.zero_point,
        "levels": encoder.levels,
    }


def _same(known: str | float, said: object) -> bool:
    if isinstance(known, str):
        return known == said
    return isinstance(said, int | float) and not isinstance(said, bool) and math.isclose(known, said, rel_tol=1e-12)


def _digest(values: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data).hexdigest()
