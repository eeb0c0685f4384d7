"""What is sent: arrays for a model's inputs, random or taken from the bundled sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from models.data import read_sample
from tierkit.errors import InvalidInput
from tierkit.tensors import Array, TensorSpec
from tierkit.wire.oip import DATATYPES

__all__ = ["InputPlan", "make_inputs"]

_PAYLOADS = 16
_PAYLOAD_BYTES = 64 * 2**20
"""Different requests to take turns, so that no server is measured on one cached answer; fewer when they are large."""

_REQUEST_BYTES = 256 * 2**20
_REQUEST_BYTES_AS_JSON = 16 * 2**20
"""Largest tensors of one request. As JSON each number takes up some dozens of bytes while it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPlan:
    """How the requests of a run are made."""

    batch_size: int = 1
    """Images (rows) per request."""
    data: Literal["random", "sample"] = "random"
    """`sample`: the bundled CIFAR-100 test images, for models that take images of their size."""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By input name: the dimensions after the batch, where the model leaves them open."""
    outputs: Sequence[str] = ()
    """Outputs to ask for; none for all."""
    binary_inputs: bool = True
    binary_outputs: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers to add to every request."""
    token: str | None = field(default=None, repr=False)
    """Shown with every request."""
    tls_ca: Path | None = None
    """File with the certificates to trust; None for the public authorities."""
    seed: int = 0
    timeout_s: float = 60.0
    """For each question before the measurement; a server may load its model when the first one comes."""


def make_inputs(specs: Sequence[TensorSpec], plan: InputPlan) -> list[dict[str, Array]]:
    """Up to 16 different sets of inputs by input name, in 64 MiB at most (one set in any case).

    Raises:
        InvalidInput: a shape that is still open or of no input, data that does not fit the model, or more of it than
            can be sent in one request.
        DataError: the sample is not installed.
    """
    if unknown := set(plan.shapes) - {spec.name for spec in specs}:
        names = ", ".join(f"'{spec.name}'" for spec in specs)
        raise InvalidInput(f"--shape names the input '{min(unknown)}', and this model takes {names}")
    shapes = {spec.name: _shape(spec, plan) for spec in specs}
    row_bytes = sum(
        int(np.prod(shape[1:])) * max(1, DATATYPES[spec.datatype].itemsize)
        for spec, shape in zip(specs, shapes.values(), strict=True)
    )
    most = _REQUEST_BYTES if plan.binary_inputs else _REQUEST_BYTES_AS_JSON
    if row_bytes * plan.batch_size > most:
        raise InvalidInput(
            f"a request of {plan.batch_size:,} images would be {row_bytes * plan.batch_size / 2**20:,.0f} MiB; "
            f"at most {most // 2**20} MiB are sent, which {most // row_bytes:,} images fill"
        )
    count = max(1, min(_PAYLOADS, _PAYLOAD_BYTES // max(1, row_bytes * plan.batch_size)))
    if plan.data == "sample":
        return _sample(specs, shapes, plan.batch_size, count)
    random = np.random.default_rng(plan.seed)
    return [{spec.name: _random(random, spec, shapes[spec.name]) for spec in specs} for _ in range(count)]


def _shape(spec: TensorSpec, plan: InputPlan) -> tuple[int, ...]:
    if spec.datatype not in DATATYPES:
        raise InvalidInput(f"input '{spec.name}' is {spec.datatype}, which cannot be sent")
    batched = bool(spec.shape) and spec.shape[0] == -1
    if not batched and plan.batch_size > 1:
        raise InvalidInput(f"input '{spec.name}' is {list(spec.shape)}: it takes no batch of {plan.batch_size}")
    rest = spec.shape[1:] if batched else spec.shape
    given = tuple(plan.shapes.get(spec.name, rest))
    if -1 in given or len(given) != len(rest):
        raise InvalidInput(
            f"input '{spec.name}' is {list(spec.shape)}: say its size with --shape {spec.name}:"
            + ",".join("N" if dim == -1 else str(dim) for dim in rest)
        )
    return (plan.batch_size, *given) if batched else given


def _random(random: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    dtype = DATATYPES[spec.datatype]
    if dtype.kind == "O":
        strings = np.empty(shape, dtype=object)
        strings.reshape(-1)[:] = [random.bytes(8).hex().encode() for _ in range(strings.size)]
        return strings
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        # Below 128 every integer type holds it; pixels use their whole range.
        return random.integers(0, 256 if spec.datatype == "UINT8" else 128, shape, dtype=dtype)
    return random.standard_normal(shape).astype(dtype)


def _sample(
    specs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]], batch_size: int, count: int
) -> list[dict[str, Array]]:
    images = read_sample().images
    wanted = (batch_size, *images.shape[1:])
    if len(specs) != 1 or specs[0].datatype != "UINT8" or shapes[specs[0].name] != wanted:
        raise InvalidInput(
            f"the sample holds UINT8 images {list(images.shape[1:])}, and this model takes "
            + ", ".join(f"'{spec.name}' {spec.datatype} {list(spec.shape[1:])}" for spec in specs)
            + ": use --input-data random"
        )
    rows = np.arange(count * batch_size) % len(images)
    return [{specs[0].name: images[chosen]} for chosen in rows.reshape(count, batch_size)]
