"""Features on their way: the one type that may be sent to a node which must not see pixels, and its form on the wire.

`Features` come out of an encoder's head (`encryption.heads`) and are checked against the encoder's own facts, so that
nothing else is taken for them. With the tensor travel the encoder's name, the digests of its head and tail, scale, zero
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
    """What an encoder's head made of some images.

    Raises:
        ValueError: `values` are no features of this encoder.
    """

    encoder: EncoderEntry
    values: Array
    """`[n, channels, h, w]`, as `pack` writes them."""

    def __post_init__(self) -> None:
        if self.values.dtype not in FORMS or self.values.shape[1:] != self.encoder.feature_shape:
            raise ValueError(
                f"{self.values.dtype} {list(self.values.shape)} are no features of {self.encoder.name}, "
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
    """True if a request for this encoder's tail, whose shape and type fit, holds what its sender has sent.

    Raises:
        InvalidInput: it does not say what the features are, or they hold a value that the encoder cannot give.
        EncoderMismatch: they are of another encoder, version, scale or zero point.
        MalformedMessage: the values are not those that were sent.
    """
    (tensor,) = request.inputs
    values, said = tensor.data, dict(tensor.parameters)
    expected = facts(encoder)
    if missing := [name for name in (*expected, "sha256") if name not in said]:
        raise InvalidInput(
            f"the tensor '{FEATURES}' of '{encoder.name}' needs the parameters {', '.join(missing)}: they say which "
            "encoder made it, and how"
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
    """What is sent of features FP32 `[n, channels, h, w]`, the encoder's noise added. An encoder that hides by its few
    levels sends nothing but these, in any type.

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
    """What travels with features, and what a tail says of itself, by parameter."""
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
