"""`terrace models import`: a stranger's ONNX file becomes a network of a model set.

A model set is a folder: manifest, networks, labels, thresholds. Nothing of it changes before all is known to work.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from models.calibration import expected_calibration_error, fit_temperature
from models.folders import Pictures
from models.hierarchy import Hierarchy
from models.importing import first_steps, metadata as onnx_metadata
from models.importing.cut import with_cut
from models.importing.graph import GREY, IMAGES, LOGITS, Signature, class_numbers, fold, signature
from models.importing.int8 import quantised
from models.importing.labels import Place, agreed, names_in_config, names_in_metadata, place_in, read_labels
from models.importing.modelset import check_folder, enter, free_name, hierarchy_of, present
from models.importing.neighbours import (
    CONFIG,
    PROCESSORS,
    check_exclusive,
    neighbour,
    pixels_by_config,
    pixels_by_processor,
    read_json,
)
from models.importing.outputs import Form, ending, form, own_answers
from models.importing.preprocess import Preprocess, PreprocessFacts, assumed, from_toml, joined
from models.importing.reading import first_line, read_onnx
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
from models.session import import_runtime, open_session, run_session, softmax
from models.speed import least_ms_per_image
from tierkit.errors import DataError, InvalidInput, TerraceError
from tierkit.inference.model import Array
from tierkit.types import Tier

__all__ = ["ImportReport", "Wish", "import_network"]

_PROBES = 4
_TOLERANCE = 1e-3
"""Of the largest score: by how much preprocessing inside the graph may change an answer."""
_BATCH_TOLERANCE = 2e-3
"""Of the largest output: by how much the other pictures of a batch may change an answer."""
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
    """What came of it."""

    entry: ModelEntry
    preprocess: Preprocess
    sources: tuple[str, ...]
    """Where the preprocessing is from."""
    ms_per_image: float
    """On one core of this machine, in batches of eight."""
    difference: float
    """Largest change by the folding: of a score, as a share of the largest one, or of a probability."""
    same_answers: float | None = None
    """Share of the calibration pictures that the INT8 form answers as FP32 does."""
    mistake: Mistake | None = None
    assumed: tuple[str, ...] = ()
    """What no source says of the preprocessing, as lines of `preprocess.toml`."""
    one_by_one: bool = False
    """True if the network runs one picture after another."""


def import_network(wish: Wish, say: Say = lambda _: None) -> ImportReport:
    """Enter a network into a model set, which is begun if it is not there.

    Raises:
        InvalidInput: the network is no classifier of these classes, or its preprocessing is unknown or contradicts
            itself.
        DataError: a file is missing, damaged or untrustworthy.
        SetupError: a file cannot be written; the set is as it was.
        MissingExtra: ONNX Runtime is not installed.
    """
    given = None if wish.labels is None else read_labels(wish.labels)
    stated = None if wish.preprocess is None else from_toml(wish.preprocess)
    say(f"reading {wish.file}")
    model = read_onnx(wish.file)
    labels = agreed(given, _class_names(wish, model, say), say)
    before = present(wish.models)
    hierarchy = hierarchy_of(wish.models, before, wish.hierarchy, labels)
    place = place_in(hierarchy, labels, wish.tier, source="the set" if wish.hierarchy is None else str(wish.hierarchy))
    name = free_name(wish.file, wish.tier, before, wish.name)
    check_folder(wish.models)
    known = signature(model, len(labels), layout=None if stated is None else stated.layout)
    sources = _sources(wish, model, known, stated, say)
    preprocess = joined(sources)
    if known.channels not in (None, preprocess.channels):
        raise InvalidInput(
            f"the network takes {known.channels} channels, and colour = {preprocess.colour} is said of it"
        )
    say("comparing the network with and without its preprocessing inside")
    plain = _Plain(model, known, wish.file)
    probes = _probes(preprocess.size)
    values = plain.tried(probes, preprocess, say)
    end = ending(model.graph, known.output)
    if known.half:
        end = replace(end, rounded=True)
    read_as = form(end, values, len(labels))
    if known.single:
        what = "score" if read_as == "scores" else "probability"
        say(f"one output for two classes: it is read as the {what} of {labels[1]!r}, the second one")
    batch = 1 if plain.one_by_one else None
    folded = _in_order(fold(model, known, preprocess, read_as=read_as, end=end, batch=batch), place)
    running = _Folded(folded)
    difference = _difference(running.run(probes), own_answers(values, read_as), read_as, place)
    if difference > (_TOLERANCE if read_as == "scores" else end.tolerance):
        raise DataError(
            f"{wish.file} answers otherwise once its preprocessing is inside: its answers differ by {difference:.2%}. "
            "If it ends with a softmax or sigmoid, it must be over its classes"
        )
    same = None
    if wish.calibrate is not None:
        say("quantising to INT8")
        folded, same = _quantised(folded, running, pictures_in(wish.calibrate, preprocess), say, batch)
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
    """What the file says of it, if anything."""
    said = next((one.value for one in model.metadata_props if one.key.lower() in ("licence", "license")), "")
    said = " ".join(said.split())[:_LONGEST_LICENCE]
    return f"{said} (as the file says)" if said.isprintable() and said else "unknown: ask whoever made the network"


def _class_names(wish: Wish, model: onnx.ModelProto, say: Say) -> dict[str, tuple[str, ...] | None]:
    """What the network's files call its classes.

    Raises:
        InvalidInput: the numbers of its classes are in no order, or its classes do not exclude each other.
        DataError: a file cannot be read.
    """
    numbers = class_numbers(model)
    if any(type(each) is int for each in numbers) and numbers != sorted(numbers):
        raise InvalidInput(
            f"the ZipMap of {wish.file} numbers its outputs {numbers[:10]}: their names are in no clear order"
        )
    config = neighbour(wish.file, CONFIG)
    if config is not None:
        check_exclusive(config)
    return {
        "the ZipMap of the network": tuple(map(str, numbers)) or None,
        "the metadata of the file": names_in_metadata({each.key: each.value for each in model.metadata_props}, say),
        CONFIG: None if config is None else names_in_config(read_json(config)),
    }


def _sources(
    wish: Wish, model: onnx.ModelProto, known: Signature, stated: PreprocessFacts | None, say: Say
) -> dict[str, PreprocessFacts]:
    """What each source says about pixels.

    Raises:
        TerraceError: one is not understood, and `preprocess.toml` leaves something to it.
    """
    readers: dict[str, Callable[[], PreprocessFacts]] = {
        "the metadata of the file": lambda: onnx_metadata.facts_of(
            {each.key: each.value for each in model.metadata_props}
        )
    }
    for file in PROCESSORS:
        if (path := neighbour(wish.file, file)) is not None:
            readers[file] = partial(pixels_by_processor, path)
    if (path := neighbour(wish.file, CONFIG)) is not None:
        readers[CONFIG] = partial(pixels_by_config, path, known.size)
    found = {"the shape of the network's input": _by_shape(known)}
    first = first_steps.facts_of(model.graph, known.input)
    if stated is None or stated.scale is None:
        found["the network's first operators (--preprocess may say otherwise)"] = first
    elif first.scale not in (None, stated.scale):
        say(f"warning: the network's first operators look as if scale = {first.scale:g}, and not {stated.scale:g}")
    for source, read in readers.items():
        try:
            found[source] = read()
        except TerraceError as exc:
            if stated is None or not stated.is_whole:
                raise type(exc)(
                    f"{exc}. To import the network nevertheless, say resize, resize_to, resample, colour, scale, mean "
                    "and std in a preprocess.toml, and give it with --preprocess"
                ) from exc
            say(f"{source} is not followed, as --preprocess says it all: {exc}")
    if wish.preprocess is not None and stated is not None:
        found[wish.preprocess.name] = stated
    return {name: facts for name, facts in found.items() if facts != PreprocessFacts()}


def _by_shape(known: Signature) -> PreprocessFacts:
    """What the type and the shape of the input say: UINT8 is for pixels as they are."""
    facts = PreprocessFacts(
        size=known.size,
        colour="grey" if known.channels == 1 else None,
        layout=known.layout if known.channels else None,  # type: ignore[arg-type]
    )
    if known.element == onnx.TensorProto.UINT8:
        return facts.model_copy(update={"scale": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3})
    return facts


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
        self.one_by_one = False
        """True if each picture must be given to it by itself."""
        self._measures_batches = any(node.op_type.startswith("DynamicQuantize") for node in model.graph.node)
        """True if it rounds by the range of all values in a batch."""
        open_ended = onnx.ModelProto()
        open_ended.CopyFrom(model)
        graph = open_ended.graph
        for value in graph.input:
            if value.type.tensor_type.shape.dim:
                value.type.tensor_type.shape.dim[0].dim_param = "n"
        del graph.output[:]
        graph.output.append(onnx.ValueInfoProto(name=known.output))
        del graph.value_info[:]
        self._path = path
        self._session = open_session(open_ended.SerializeToString(), str(path))
        self._quiet = import_runtime().RunOptions()
        self._quiet.log_severity_level = 4  # what fails is raised, and need not be logged

    def tried(self, probes: Array, preprocess: Preprocess, say: Say) -> Array:
        """Its outputs for some different pictures, each given by itself. If it does not answer the same for all of them
        at once, it runs one by one from now on.

        Raises:
            DataError: see `run`.
        """
        alone = np.concatenate([self._answers(probes[at : at + 1], preprocess) for at in range(len(probes))])
        if not _same_answers(self._answers(probes[:1], preprocess), alone[:1]):
            raise DataError(f"{self._path} gives the same picture another answer each time: export it for inference")
        try:
            together = self._answers(probes, preprocess)
        except DataError:
            why = "its graph takes no more"
        else:
            if _same_answers(together, alone) and not self._measures_batches:
                return alone
            why = "the other pictures of a batch change its answers"
        self.one_by_one = True
        say(
            f"warning: {self._path} will run one picture at a time, because {why}; with a dynamic first axis it may be "
            "faster"
        )
        return alone

    def run(self, images: Array, preprocess: Preprocess) -> Array:
        """Its output `[n, outputs]` for UINT8 images `[n, height, width, 3]`.

        Raises:
            DataError: it fails, or gives no finite numbers of that shape.
        """
        if not self.one_by_one:
            return self._answers(images, preprocess)
        return np.concatenate([self._answers(images[at : at + 1], preprocess) for at in range(len(images))])

    def _answers(self, images: Array, preprocess: Preprocess) -> Array:
        known = self._known
        values = images[..., ::-1] if preprocess.colour == "bgr" else images
        if preprocess.colour == "grey":
            values = np.floor(images.astype(np.float32) @ np.array(GREY, np.float32).reshape(3, 1) + np.float32(0.5))
        if known.element == onnx.TensorProto.UINT8:
            values = values.astype(np.uint8)
        else:
            factor, offset = (np.array(each, np.float32) for each in preprocess.steps)
            kind = np.float16 if known.element == onnx.TensorProto.FLOAT16 else np.float32
            values = (values.astype(np.float32) * factor + offset).astype(kind)
        if known.layout == "nchw":
            values = values.transpose(0, 3, 1, 2)
        try:
            (given,) = self._session.run([known.output], {known.input: np.ascontiguousarray(values)}, self._quiet)
        except Exception as exc:  # the runtime's own classes
            others = f"; it takes batches of {known.batch}" if known.batch not in (None, 1) else ""
            raise DataError(
                f"{self._path} fails on {len(images)} images of {preprocess.size[0]} x {preprocess.size[1]} "
                f"({first_line(exc)}){others}: export it with a dynamic first axis, and for this size"
            ) from exc
        answers = np.asarray(given, np.float32).reshape(np.shape(given)[0] if np.ndim(given) else 1, -1)
        if answers.shape != (len(images), 1 if known.single else known.classes):
            raise DataError(
                f"{self._path} gives {list(np.shape(given))} for {len(images)} images and {known.classes} classes"
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
        return run_session(self._session, LOGITS, {IMAGES: images})


def _same_answers(one: Array, other: Array) -> bool:
    return bool(np.abs(one - other).max() <= _BATCH_TOLERANCE * max(1.0, float(np.abs(other).max())))


def _probes(size: tuple[int, int]) -> Array:
    """Noise of several colours and contrasts, so that what is the same for all of it is no chance."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (_PROBES, *size, 3))
    colours = rng.integers(0, 256, (_PROBES, 1, 1, 3))
    share = np.linspace(1, 0.3, _PROBES).reshape(-1, 1, 1, 1)
    return np.asarray(share * noise + (1 - share) * colours).astype(np.uint8)


def _difference(logits: Array, own: Array, read_as: Form, place: Place) -> float:
    """Largest change of an answer by the folding: of a score, as a share of the largest one, or of a probability."""
    expected = own if place.order is None else own[:, place.order]
    if read_as == "scores":
        return float(np.abs(logits - expected).max() / max(1.0, float(np.abs(expected).max())))
    return float(np.abs(softmax(logits) - expected).max())


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


def _quantised(
    model: onnx.ModelProto, plain: _Folded, chosen: Pictures, say: Say, batch: int | None
) -> tuple[onnx.ModelProto, float]:
    """The INT8 form, and the share of pictures that it answers as before."""
    pictures, numbers, damage = chosen.take(evenly(len(chosen), _CALIBRATION)).readable(slice(None))
    if warning := left_out(damage, len(numbers), "for the calibration"):
        say(warning)
    integer = quantised(model, pictures, batch)
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
