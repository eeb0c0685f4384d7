"""Accuracy, calibration and speed of a loaded network on labelled images."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models.calibration import expected_calibration_error
from models.folders import Images, Labelled
from models.hierarchy import Hierarchy
from models.session import softmax
from tierkit.errors import DataError
from tierkit.inference.model import Model
from tierkit.tensors import Array

__all__ = ["Evaluation", "evaluate", "logits_of", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Accuracy and speed of a network on labelled images."""

    images: int
    coarse_accuracy: float
    fine_accuracy: float | None
    """None for a coarse network."""
    ece: float
    """Expected calibration error of the network's own labels at its temperature."""
    ms_per_image: float
    """Median over the batches of the run time of a batch, by its number of images."""


def logits_of(
    model: Model, images: Images, *, batch_size: int = 50, report: Callable[[int], None] = lambda _: None
) -> tuple[Array, float]:
    """Logits FP32 `[n, classes]` of UINT8 images `[n, h, w, 3]`, and the median milliseconds per image.

    Args:
        report: called with the number of images of each finished batch.
    """
    parts: list[Array] = []
    pace: list[float] = []
    for start in range(0, len(images), batch_size):
        chunk = images[start : start + batch_size]
        begun = time.perf_counter()
        parts.append(model.run({"images": chunk}, ["logits"])["logits"])
        pace.append((time.perf_counter() - begun) * 1e3 / len(chunk))
        report(len(chunk))
    return np.concatenate(parts), float(np.median(pace))


def score(
    logits: Array, data: Labelled, hierarchy: Hierarchy, *, target: str, temperature: float
) -> tuple[float, float | None, float]:
    """Coarse accuracy, fine accuracy (None for a coarse network) and expected calibration error.

    A fine network's coarse answer is the superclass with the largest sum of calibrated probabilities.

    Raises:
        DataError: the images have no labels, or the logits another number of classes than the hierarchy.
    """
    if data.fine is None or data.coarse is None:
        raise DataError("an evaluation needs labelled images")
    probabilities = softmax(logits, temperature)
    if target == "coarse":
        if logits.shape[1] != len(hierarchy.coarse):
            raise DataError(
                f"hierarchy {hierarchy.name!r} has {len(hierarchy.coarse)} superclasses, the model {logits.shape[1]}"
            )
        accuracy = float(np.mean(probabilities.argmax(axis=1) == data.coarse))
        return accuracy, None, expected_calibration_error(probabilities, data.coarse)
    coarse = hierarchy.coarse_probabilities(probabilities).argmax(axis=1)
    return (
        float(np.mean(coarse == data.coarse)),
        float(np.mean(probabilities.argmax(axis=1) == data.fine)),
        expected_calibration_error(probabilities, data.fine),
    )


def evaluate(
    model: Model,
    data: Labelled,
    hierarchy: Hierarchy,
    *,
    target: str,
    temperature: float,
    batch_size: int = 50,
    report: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Run a whole network over `data`.

    Raises:
        DataError: size of the images, labels or number of classes do not fit.
    """
    want = model.inputs[0]
    if not want.accepts(data.images[:1]):
        raise DataError(f"{model.name} takes images {want.shape[1:]}, the data set has {data.images.shape[1:]}")
    # The first run allocates; it is not part of the speed.
    model.run({"images": data.images[:batch_size]}, ["logits"])
    logits, pace = logits_of(model, data.images, batch_size=batch_size, report=report)
    coarse, fine, ece = score(logits, data, hierarchy, target=target, temperature=temperature)
    return Evaluation(images=len(data), coarse_accuracy=coarse, fine_accuracy=fine, ece=ece, ms_per_image=pace)
