"""`terrace models import`: a stranger's ONNX file becomes a network of a model set.

A model set is a folder: manifest, networks, labels, thresholds. Nothing of it changes before all is known to work.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from models.calibration import expected_calibration_error, fit_temperature
from models.folders import Pictures
from models.hierarchy import Hierarchy
from models.importing.cut import with_cut
from models.importing.graph import IMAGES, LOGITS, Signature, first_line, fold, read_onnx, signature
from models.importing.int8 import quantised
from models.importing.labels import Place, place_in, read_labels
from models.importing.modelset import check_folder, enter, free_name, hierarchy_of, present
from models.importing.preprocess import (
    Preprocess,
    PreprocessFacts,
    assumed,
    beside,
    from_metadata,
    from_toml,
    joined,
)
from models.importing.validation import Mistake, batches, labelled_in, left_out, likely_mistake, pictures_in
from models.manifest import ModelEntry
from models.session import open_session, softmax
from models.speed import least_ms_per_image
from tierkit.errors import DataError
from tierkit.inference.model import Array
from tierkit.types import Tier

__all__ = ["ImportReport", "Wish", "import_network"]

_PROBES = 3
_TOLERANCE = 1e-3
"""Of the largest logit: by how much preprocessing inside the graph may change an answer."""
_CALIBRATION = 200
_LEAST_FITTED = 50
"""Labelled pictures by which a temperature is fitted; by fewer it would say more of them than of the network."""
_SPEED_BATCH = 8
_LONGEST_LICENCE = 200
_NAME = re.compile(r"[^A-Za-z0-9._-]+")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a user asks for."""

    file: Path
    models: Path
    """The model set."""
    tier: Tier
    labels: Path
    hierarchy: Path | None = None
    preprocess: Path | None = None
    name: str | None = None
    calibrate: Path | None = None
    """Pictures to quantise with; None for FP32."""
    validate: Path | None = None
    """Labelled pictures, in folders by class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What came of it."""

    entry: ModelEntry
    preprocess: Preprocess
    sources: tuple[str, ...]
    """Where the preprocessing is from."""
    ms_per_image: float
    """On one core of this machine, in batches of eight."""
    difference: float
    """Largest change of a logit by the folding, as a share of the largest logit."""
    same_answers: float | None = None
    """Share of the calibration pictures that the INT8 form answers as FP32 does."""
    mistake: Mistake | None = None
    assumed: tuple[str, ...] = ()
    """What no source says of the preprocessing, as lines of `preprocess.toml`."""


def import_network(wish: Wish, say: Say = lambda _: None) -> ImportReport:
    """Enter a network into a model set, which is begun if it is not there.

    Raises:
        InvalidInput: the network is no classifier of these classes, or its preprocessing is unknown or contradicts
            itself.
        DataError: a file is missing, damaged or untrustworthy.
        SetupError: a file cannot be written; the set is as it was.
        MissingExtra: ONNX Runtime is not installed.
    """
    labels = read_labels(wish.labels)
    before = present(wish.models)
    hierarchy = hierarchy_of(wish.models, before, wish.hierarchy, labels)
    place = place_in(hierarchy, labels, wish.tier, source="the set" if wish.hierarchy is None else str(wish.hierarchy))
    name = free_name(wish.file, wish.tier, before, wish.name)
    check_folder(wish.models)
    say(f"reading {wish.file}")
    model = read_onnx(wish.file)
    stated = None if wish.preprocess is None else from_toml(wish.preprocess)
    known = signature(model, len(labels), layout=None if stated is None else stated.layout)
    sources = _sources(wish, model, known, stated)
    preprocess = joined(sources)
    say("comparing the network with and without its preprocessing inside")
    plain = _Plain(model, known, wish.file)
    probes = np.random.default_rng(0).integers(0, 256, (_PROBES, *preprocess.size, 3), dtype=np.uint8)
    expected = plain.run(probes, preprocess)
    probabilities = _are_probabilities(expected)
    folded = _in_order(fold(model, known, preprocess, probabilities=probabilities), place)
    running = _Folded(folded)
    answers = running.run(probes)
    if probabilities:
        expected = np.log(np.maximum(expected, 1e-12))
    if place.order is not None:
        expected = expected[:, place.order]
    difference = float(np.abs(answers - expected).max() / max(1.0, float(np.abs(expected).max())))
    if difference > _TOLERANCE:
        raise DataError(
            f"{wish.file} answers otherwise once its preprocessing is inside: logits differ by {difference:.2%} of the "
            "largest one"
        )
    same = None
    if wish.calibrate is not None:
        say("quantising to INT8")
        folded, same = _quantised(folded, running, pictures_in(wish.calibrate, preprocess), say)
        running = _Folded(folded)
    folded, cut = with_cut(folded, probes)
    running = _Folded(folded)
    say("measuring speed")
    pace = least_ms_per_image(running.run, probes, _SPEED_BATCH)
    content = folded.SerializeToString()
    entry = ModelEntry(
        name=name,
        tier=wish.tier.value,
        file=f"{name}.onnx",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        target=place.target,
        classes=len(labels),
        input_shape=(*preprocess.size, 3),
        resize=preprocess.resize,
        resize_to=preprocess.resize_to if preprocess.resize == "shortest-side" else None,
        precision=_precision(folded),
        parameters=_parameters(model),
        temperature=1.0,
        coarse_accuracy=None,
        fine_accuracy=None,
        test_images=0,
        ece_before=None,
        ece_after=None,
        feature_shape=None if cut is None else cut.shape,
        head_parameters=None if cut is None else cut.head_parameters,
        training=None,
        licence=_licence(model),
    )
    mistake = None
    if wish.validate is not None:
        say(f"measuring accuracy on the pictures in {wish.validate}")
        pictures, truth = labelled_in(wish.validate, hierarchy, place.target, preprocess)
        logits, pictures, truth = _answered(running, pictures, truth, say)
        entry = _measured(entry, logits, truth, hierarchy)
        order = list(place.order) if place.order is not None else list(range(len(labels)))
        mistake = likely_mistake(lambda images, other: plain.run(images, other)[:, order], pictures, truth, preprocess)
    entry = enter(entry, content, hierarchy, wish.models)
    return ImportReport(
        entry=entry,
        preprocess=preprocess,
        sources=tuple(sources),
        ms_per_image=pace,
        difference=difference,
        same_answers=same,
        mistake=mistake,
        assumed=assumed(sources, preprocess),
    )


# --- names and classes ------------------------------------------------------------------------------------------------


def _licence(model: onnx.ModelProto) -> str:
    """What the file says of it, if anything."""
    said = next((one.value for one in model.metadata_props if one.key.lower() in ("licence", "license")), "")
    said = " ".join(said.split())[:_LONGEST_LICENCE]
    return f"{said} (as the file says)" if said.isprintable() and said else "unknown: ask whoever made the network"


def _sources(
    wish: Wish, model: onnx.ModelProto, known: Signature, stated: PreprocessFacts | None
) -> dict[str, PreprocessFacts]:
    found = {
        "the shape of the network's input": PreprocessFacts(size=known.size),
        "the metadata of the file": from_metadata({each.key: each.value for each in model.metadata_props}),
        **beside(wish.file),
    }
    if wish.preprocess is not None and stated is not None:
        found[wish.preprocess.name] = stated
    return {name: facts for name, facts in found.items() if facts != PreprocessFacts()}


_BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
_WEIGHTS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, *_BYTES)


def _weights(model: onnx.ModelProto, kinds: tuple[int, ...]) -> int:
    return sum(int(np.prod(each.dims)) for each in model.graph.initializer if each.data_type in kinds)


def _parameters(model: onnx.ModelProto) -> int:
    return max(1, _weights(model, _WEIGHTS))


def _precision(model: onnx.ModelProto) -> Literal["int8", "fp32"]:
    """That of most weights."""
    return "int8" if 2 * _weights(model, _BYTES) > _weights(model, _WEIGHTS) else "fp32"


# --- running ----------------------------------------------------------------------------------------------------------


class _Plain:
    """The network as it came, with the preprocessing done before it."""

    def __init__(self, model: onnx.ModelProto, known: Signature, path: Path) -> None:
        self._known = known
        open_ended = onnx.ModelProto()
        open_ended.CopyFrom(model)
        for value in (*open_ended.graph.input, *open_ended.graph.output):
            if value.type.tensor_type.shape.dim:
                value.type.tensor_type.shape.dim[0].dim_param = "n"
        del open_ended.graph.value_info[:]
        self._path = path
        self._session = open_session(open_ended.SerializeToString(), str(path))

    def run(self, images: Array, preprocess: Preprocess) -> Array:
        """Its output `[n, classes]` for UINT8 images `[n, height, width, 3]`.

        Raises:
            DataError: it fails, takes no batches, or gives no finite numbers of that shape.
        """
        known = self._known
        values = images[..., ::-1] if preprocess.colour == "bgr" else images
        if known.element != onnx.TensorProto.UINT8:
            factor, offset = (np.array(each, np.float32) for each in preprocess.steps)
            kind = np.float16 if known.element == onnx.TensorProto.FLOAT16 else np.float32
            values = (values.astype(np.float32) * factor + offset).astype(kind)
        if known.layout == "nchw":
            values = values.transpose(0, 3, 1, 2)
        try:
            (given,) = self._session.run([known.output], {known.input: np.ascontiguousarray(values)})
        except Exception as exc:  # the runtime's own classes
            raise DataError(
                f"{self._path} fails on a batch of {len(images)} images of {preprocess.size[0]} x {preprocess.size[1]} "
                f"({first_line(exc)}): export it with a dynamic first axis, and for this size"
            ) from exc
        answers = np.asarray(given, np.float32).reshape(len(given), -1)
        if answers.shape != (len(images), known.classes):
            raise DataError(
                f"{self._path} gives {list(given.shape)} for {len(images)} images and {known.classes} classes"
            )
        if not np.isfinite(answers).all():
            raise DataError(f"{self._path} gives values that are no numbers (NaN or infinite) for plain pictures")
        return answers


class _Folded:
    """The network as it will be served."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._session = open_session(model.SerializeToString(), "the network with its preprocessing inside")

    def run(self, images: Array) -> Array:
        """Logits FP32 `[n, classes]` of UINT8 images."""
        (logits,) = self._session.run([LOGITS], {IMAGES: images})
        return np.asarray(logits)


def _are_probabilities(answers: Array) -> bool:
    return bool((answers >= 0).all() and np.allclose(answers.sum(axis=1), 1, atol=1e-3))


def _in_order(model: onnx.ModelProto, place: Place) -> onnx.ModelProto:
    """With the logits in the order of the set's classes."""
    if place.order is None:
        return model
    last = model.graph.node[-1]
    last.output[0] = "logits/as-given"
    order = onnx.numpy_helper.from_array(np.array(place.order, np.int64), "logits/order")
    model.graph.initializer.append(order)
    model.graph.node.append(
        onnx.helper.make_node("Gather", ["logits/as-given", "logits/order"], [LOGITS], name="logits/order", axis=1)
    )
    return model


def _quantised(model: onnx.ModelProto, plain: _Folded, chosen: Pictures, say: Say) -> tuple[onnx.ModelProto, float]:
    """The INT8 form, and the share of pictures that it answers as before."""
    step = max(1, len(chosen) // _CALIBRATION)
    pictures, numbers, damage = chosen.readable(slice(0, step * _CALIBRATION, step))
    if warning := left_out(damage, len(numbers), "for the calibration"):
        say(warning)
    integer = quantised(model, pictures)
    running = _Folded(integer)
    same = [
        (running.run(part).argmax(axis=1) == plain.run(part).argmax(axis=1)).mean()
        for part in np.array_split(pictures, max(1, len(pictures) // 25))
    ]
    return integer, float(np.mean(same))


def _answered(running: _Folded, chosen: Pictures, labels: Array, say: Say) -> tuple[Array, Pictures, Array]:
    """Logits of the pictures that can be read, these, and their labels."""
    logits: list[Array] = []
    kept: list[int] = []
    damage: list[str] = []
    for pixels, numbers, wrong in batches(chosen):
        if numbers:
            logits.append(running.run(pixels))
        kept += numbers
        damage += wrong
    if warning := left_out(damage, len(kept), "for the validation"):
        say(warning)
    return np.concatenate(logits), chosen.take(kept), labels[kept]


def _measured(entry: ModelEntry, logits: Array, labels: Array, hierarchy: Hierarchy) -> ModelEntry:
    """With the accuracy on labelled pictures; a temperature is fitted on one half, and stands if it does the other
    good."""
    shuffled = np.random.default_rng(0).permutation(len(labels))
    fitted, judged = shuffled[::2], shuffled[1::2] if len(shuffled) > 1 else shuffled
    temperature = fit_temperature(logits[fitted], labels[fitted]) if len(labels) >= _LEAST_FITTED else 1.0
    before, after = (
        expected_calibration_error(softmax(logits[judged], each), labels[judged]) for each in (1.0, temperature)
    )
    if after > before:  # what was fitted does not hold for others
        temperature, after = 1.0, before
    correct = float(np.mean(logits.argmax(axis=1) == labels))
    if entry.target == "fine":
        coarse = hierarchy.coarse_probabilities(softmax(logits, temperature)).argmax(axis=1)
        coarse_accuracy = float(np.mean(coarse == hierarchy.coarse_labels(labels)))
    else:
        coarse_accuracy = correct
    return entry.model_copy(
        update={
            "temperature": temperature,
            "coarse_accuracy": coarse_accuracy,
            "fine_accuracy": correct if entry.target == "fine" else None,
            "test_images": len(labels),
            "ece_before": before,
            "ece_after": after,
        }
    )
