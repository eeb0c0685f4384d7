"""The pixel values that a network expects, as far as its first operators show them.

If a network divides by 255 or subtracts a mean itself, this must not be done to its pixels before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx

from models.importing.following import BYTES, SUMS, PixelTensor, followed
from models.importing.preprocess import PreprocessFacts
from tierkit.errors import InvalidInput

__all__ = ["check_clear", "facts_of"]

_ORDINARY = (
    *("Conv", "MatMul", "Gemm", "Pool", "Reshape", "Flatten", "Reduce", "SpaceToDepth", "ReorderInput"),
    *("Quantize", "Einsum", "Concat"),
)
"""Parts of the names of operators with which networks begin that take values of any scale."""
_BYTES_FACTOR = 1 / BYTES
"""A smaller factor is for values of 0 to 255."""
_LEAST_MEAN = 0.1
"""Lower bound for the mean of values of 0 to 1; values with a smaller mean have been shifted."""
_IMAGENET = np.array([0.485, 0.456, 0.406])


@dataclass(frozen=True, slots=True)
class _Seen:
    facts: PreprocessFacts
    unclear: str | None = None
    """The operator that changes values in a way that is not understood."""
    reorders: bool = False
    """True if it changes the order of the colours, and nothing shows from which one."""


def facts_of(graph: onnx.GraphProto, taken: str) -> PreprocessFacts:
    """Facts about the network's input from its first operators; none if they do not scale or shift it, or do so by
    unclear values.
    """
    return _seen(graph, taken).facts


def check_clear(graph: onnx.GraphProto, taken: str, sources: Mapping[str, PreprocessFacts]) -> None:
    """Raises InvalidInput if the first operators change values or colours, and the form of the input is unknown."""
    said = {name for facts in sources.values() for name in facts.model_dump(exclude_none=True)}
    seen = _seen(graph, taken)
    if seen.unclear and not said & {"scale", "mean"}:
        raise InvalidInput(
            f"the network begins with {seen.unclear}, which is not understood, and its value range is unknown: "
            "set scale, mean and std in a preprocess.toml, and give it with --preprocess"
        )
    if "colour" not in said and (seen.reorders or seen.facts.colour == "bgr"):
        raise InvalidInput(
            "the network's first operators depend on the order of the colours, which is unknown: "
            'set colour = "rgb" or "bgr" in a preprocess.toml, and give it with --preprocess'
        )


def _seen(graph: onnx.GraphProto, taken: str) -> _Seen:
    ends = followed(graph, taken)
    judged = [(_judged(pixels, kind), pixels) for pixels, kind in ends]
    clear = [(scale, pixels) for scale, pixels in judged if isinstance(scale, float)]
    unclear = next((scale for scale, _ in judged if isinstance(scale, str)), None)
    orders = [_colour(pixels) for _, pixels in judged]
    colour = next((each for each in orders if each is not None and each != "reordered"), None)
    reorders = colour is None and "reordered" in orders
    if len({scale for scale, _ in clear}) != 1:
        return _Seen(PreprocessFacts(colour=colour), unclear or (clear[0][1].by if clear else None), reorders)
    facts = PreprocessFacts(scale=clear[0][0], mean=(0.0,) * 3, std=(1.0,) * 3, colour=colour)
    return _Seen(facts, None, reorders)


def _judged(pixels: PixelTensor, kind: str) -> float | str | None:
    """Divisor of the pixels (1 or 255), the operator that is not understood, or None for values that are taken
    unchanged.
    """
    unchanged = (pixels.factor == 1).all() and (pixels.offset == 0).all() and np.isnan(pixels.limit)
    if pixels.by is None or (unchanged and pixels.by in SUMS):
        return None if any(part in kind for part in _ORDINARY) else kind
    with np.errstate(all="ignore"):
        factor, mean = np.abs(pixels.factor), -pixels.offset / pixels.factor
    if not (np.isfinite(factor).all() and np.isfinite(mean).all()):
        return pixels.by
    if (factor <= _BYTES_FACTOR).all() or (mean > BYTES).all() or pixels.limit > BYTES:
        return 1.0
    if ((factor >= 1).all() and (mean > _LEAST_MEAN).all() and (mean <= 1).all()) or np.isclose(pixels.limit, 1):
        return 255.0
    return pixels.by


def _colour(pixels: PixelTensor) -> Literal["rgb", "bgr", "reordered"] | None:
    """rgb or bgr if ImageNet's mean shows it, "reordered" if nothing does and the colours change places."""
    source = pixels.source.ravel().astype(int).tolist()
    if source == [0, 1, 2]:
        swapped = False
    elif source == [2, 1, 0]:
        swapped = True
    else:
        return None if source == [0, 1, 2] * (len(source) // 3) or set(source) == {0} else "reordered"
    with np.errstate(all="ignore"):
        mean = (-pixels.offset / pixels.factor).ravel()
    mean = mean / 255 if (mean > BYTES).all() else mean
    if np.allclose(mean, _IMAGENET, atol=0.01, rtol=0):
        return "bgr" if swapped else None
    if np.allclose(mean, _IMAGENET[::-1], atol=0.01, rtol=0):
        return "rgb" if swapped else "bgr"
    return "reordered" if swapped else None
