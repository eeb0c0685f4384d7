"""The classification extension: the best classes of an output as text, instead of its numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierkit.errors import InvalidInput
from tierkit.tensors import Array

__all__ = ["best_classes"]


def best_classes(name: str, scores: Array, top: int, labels: Sequence[str] = ()) -> Array:
    """Return the `top` best classes of each row, best first; of equal scores, the lower index comes first.

    Args:
        name: name of the output in the error message.
        scores: [n, classes], any number type.
        top: at least 1; more than there are classes gives all of them.
        labels: class names; empty if the model has none for this output.

    Returns:
        [n, min(top, classes)] of bytes objects "value:index[:label]", as Triton writes them.

    Raises:
        InvalidInput: the output has no class axis.
    """
    if scores.ndim != 2:
        raise InvalidInput(f"output '{name}' of shape {list(scores.shape)} has no class axis to classify along")
    top = min(top, scores.shape[1])
    order = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :top]
    texts = np.empty(order.shape, dtype=object)
    for row, indices in enumerate(order.tolist()):
        for rank, index in enumerate(indices):
            text = f"{scores[row, index]:f}:{index}"
            texts[row, rank] = (f"{text}:{labels[index]}" if labels else text).encode()
    return texts
