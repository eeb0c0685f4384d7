"""`terrace models import`: a stranger's ONNX file becomes a network of a model set.

A model set is a folder: manifest, networks, labels, thresholds. Nothing of it changes before all is known to work.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from models.calibration import expected_calibration_error, fit_temperature
from models.costs import costs_of
from models.folders import Pictures
from models.hierarchy import Hierarchy
from models.importing.cut import with_cut
from models.importing.first_steps import check_clear
from models.importing.graph import signature
from models.importing.int8 import quantised
from models.importing.labels import agreed, place_in, read_labels
from models.importing.modelset import check_folder, enter, free_name, hierarchy_of, present
from models.importing.outputs import ending, own_answers
from models.importing.preprocess import Preprocess, assumed, from_toml, joined
from models.importing.reading import read_onnx
from models.importing.running import Folded, Plain, check_answers_differ, probes_of, served
from models.importing.sources import class_names_of, pixels_said
from models.importing.validation import (
    Mistake,
    batches,
    evenly,
    labelled_in,
    left_out,
    likely_mistake,
    pictures_in,
)
from models.manifest import ModelEntry
from models.session import softmax
from models.speed import least_ms_per_image
from tierkit.errors import InvalidInput
from tierkit.tensors import Array
from tierkit.types import Tier

__all__ = ["ImportReport", "Wish", "import_network"]

_CALIBRATION = 200
_LEAST_FITTED = 50
"""Labelled pictures by which a temperature is fitted; by fewer it would say more of them than of the network."""
_SPEED_BATCH = 8
_LONGEST_LICENCE = 200
_NAME = re.compile(r"[^A-Za-z0-9._-]+")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A user's request to import a network."""

    file: Path
    models: Path
    """The model set."""
    tier: Tier
    labels: Path | None = None
    """Class names; None for those that the network's files have."""
    hierarchy: Path | None = None
    preprocess: Path | None = None
    name: str | None = None
    calibrate: Path | None = None
    """Pictures to quantise with; None for FP32."""
    validate: Path | None = None
    """Labelled pictures, in folders by class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """Result of an import."""

    entry: ModelEntry
    preprocess: Preprocess
    sources: tuple[str, ...]
    """Sources of the preprocessing facts."""
    ms_per_image: float
    """Milliseconds per image on one core of this machine, in batches of eight."""
    difference: float
    """Largest change by the folding: of a score, as a share of the largest one, or of a probability."""
    same_answers: float | None = None
    """Share of the calibration pictures that the INT8 form answers as FP32 does."""
    mistake: Mistake | None = None
    assumed: tuple[str, ...] = ()
    """Preprocessing that no source describes, as lines of `preprocess.toml`."""
    one_by_one: bool = False
    """True if the network runs one picture after another."""


def import_network(wish: Wish, say: Say = lambda _: None) -> ImportReport:
    """Enter a network into a model set. The set is created if it does not exist.

    Raises:
        InvalidInput: the network is not a classifier of these classes, or its preprocessing is unknown or contradicts
            itself.
        DataError: a file is missing, damaged or untrustworthy.
        SetupError: a file cannot be written; the set is as it was.
        MissingExtra: ONNX Runtime is not installed.
    """
    given = None if wish.labels is None else read_labels(wish.labels)
    stated = None if wish.preprocess is None else from_toml(wish.preprocess)
    say(f"reading {wish.file}")
    model = read_onnx(wish.file)
    labels = agreed(given, class_names_of(wish.file, model, say), say)
    before = present(wish.models)
    hierarchy = hierarchy_of(wish.models, before, wish.hierarchy, labels)
    place = place_in(hierarchy, labels, wish.tier, source="the set" if wish.hierarchy is None else str(wish.hierarchy))
    name = free_name(wish.file, wish.tier, before, wish.name)
    check_folder(wish.models)
    known = signature(model, len(labels), layout=None if stated is None else stated.layout)
    toml = None if wish.preprocess is None or stated is None else (wish.preprocess.name, stated)
    sources = pixels_said(wish.file, model, known, toml, say)
    preprocess = joined(sources)
    if known.channels not in (None, preprocess.channels):
        raise InvalidInput(
            f"the network takes {known.channels} channels, and colour = {preprocess.colour} is said of it"
        )
    say("comparing the network with and without its preprocessing inside")
    plain = Plain(model, known, wish.file)
    probes = probes_of(preprocess.size)
    values = plain.tried(probes, preprocess, say)
    check_clear(model.graph, known.input, sources)
    end = ending(model.graph, known.output)
    if known.half:
        end = replace(end, rounded=True)
    batch = 1 if plain.one_by_one else None
    folded, read_as, difference = served(wish.file, model, known, preprocess, end, probes, values, place, batch)
    running = Folded(folded)
    check_answers_differ(running, probes)
    if known.single:
        what = "score" if read_as == "scores" else "probability"
        say(f"one output for two classes: it is read as the {what} of {labels[1]!r}, the second one")
    same = None
    if wish.calibrate is not None:
        say("quantising to INT8")
        folded, same = _quantised(folded, running, pictures_in(wish.calibrate, preprocess), say, batch)
        running = Folded(folded)
    folded, cut = with_cut(folded, probes)
    running = Folded(folded)
    say("measuring speed")
    pace = least_ms_per_image(running.run, probes, _SPEED_BATCH)
    content = folded.SerializeToString()
    entry = ModelEntry(
        name=name,
        tier=wish.tier.value,
        file=f"{name}.onnx",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        costs=costs_of(content, str(wish.file)),
        target=place.target,
        classes=len(labels),
        input_shape=(*preprocess.size, 3),
        resize=preprocess.resize,
        resize_to=preprocess.resize_to,
        resample=preprocess.resample,
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
        mistake = likely_mistake(
            lambda images, other: own_answers(plain.run(images, other), read_as)[:, order], pictures, truth, preprocess
        )
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
        one_by_one=plain.one_by_one,
    )


# --- names and classes ------------------------------------------------------------------------------------------------


def _licence(model: onnx.ModelProto) -> str:
    """Licence that the file's metadata names, if any."""
    said = next((one.value for one in model.metadata_props if one.key.lower() in ("licence", "license")), "")
    said = " ".join(said.split())[:_LONGEST_LICENCE]
    return f"{said} (as the file says)" if said.isprintable() and said else "unknown: ask whoever made the network"


_BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
_WEIGHTS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, *_BYTES)


def _weights(model: onnx.ModelProto, kinds: tuple[int, ...]) -> int:
    return sum(int(np.prod(each.dims)) for each in model.graph.initializer if each.data_type in kinds)


def _parameters(model: onnx.ModelProto) -> int:
    return max(1, _weights(model, _WEIGHTS))


def _precision(model: onnx.ModelProto) -> Literal["int8", "fp32"]:
    """Precision of most weights."""
    return "int8" if 2 * _weights(model, _BYTES) > _weights(model, _WEIGHTS) else "fp32"


# --- running ----------------------------------------------------------------------------------------------------------


def _quantised(
    model: onnx.ModelProto, plain: Folded, chosen: Pictures, say: Say, batch: int | None
) -> tuple[onnx.ModelProto, float]:
    """The INT8 form, and the share of pictures that it answers as before."""
    pictures, numbers, damage = chosen.take(evenly(len(chosen), _CALIBRATION)).readable(slice(None))
    if warning := left_out(damage, len(numbers), "for the calibration"):
        say(warning)
    integer = quantised(model, pictures, batch)
    running = Folded(integer)
    same = [
        (running.run(part).argmax(axis=1) == plain.run(part).argmax(axis=1)).mean()
        for part in np.array_split(pictures, max(1, len(pictures) // 25))
    ]
    return integer, float(np.mean(same))


def _answered(running: Folded, chosen: Pictures, labels: Array, say: Say) -> tuple[Array, Pictures, Array]:
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
    """Add the accuracy on labelled pictures. A temperature is fitted on one half, and kept if it improves the other
    half.
    """
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
