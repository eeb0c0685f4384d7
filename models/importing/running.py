"""Runs of an imported network in its original form and in the form to be served, whose answers must agree."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from models.importing.graph import GREY, IMAGES, LOGITS, Signature, fold
from models.importing.labels import LabelPlace
from models.importing.outputs import Ending, Form, form, own_answers
from models.importing.preprocess import Preprocess
from models.importing.reading import first_line
from models.session import import_runtime, open_session, run_session, softmax
from tierkit.errors import DataError, InvalidInput
from tierkit.tensors import Array

__all__ = ["Folded", "Plain", "check_answers_differ", "probes_of", "served"]

_PROBES = 4
_LONGEST_S = 15.0
"""Most seconds for a picture."""
_TOLERANCE = 1e-3
"""Largest change of an answer by preprocessing inside the graph, as a fraction of the largest score."""
_LEAST_DIFFERENCE = 1e-6
"""Smallest difference that counts, as a fraction of the largest score; smaller ones are rounding."""
_PLAIN_COLOURS = [(0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255)]
_BATCH_TOLERANCE = 2e-3
"""Largest change of an answer by the other pictures of a batch, as a fraction of the largest output."""


class Plain:
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

    def tried(self, probes: Array, preprocess: Preprocess, say: Callable[[str], None]) -> Array:
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
        options = import_runtime().RunOptions()
        options.log_severity_level = 4  # what fails is raised, and need not be logged
        limit = threading.Timer(_LONGEST_S * len(images), setattr, (options, "terminate", True))
        limit.daemon = True
        limit.start()
        try:
            (given,) = self._session.run([known.output], {known.input: np.ascontiguousarray(values)}, options)
        except Exception as exc:  # the runtime's own classes
            if options.terminate:
                raise DataError(
                    f"{self._path} takes longer than {_LONGEST_S:g} s for a picture of {preprocess.size[0]} x "
                    f"{preprocess.size[1]}: its graph may hold a loop that does not end"
                ) from exc
            others = f"; it takes batches of {known.batch}" if known.batch not in (None, 1) else ""
            raise DataError(
                f"{self._path} fails on {len(images)} images of {preprocess.size[0]} x {preprocess.size[1]} "
                f"({first_line(exc)}){others}: export it with a dynamic first axis, and for this size"
            ) from exc
        finally:
            limit.cancel()
        answers = np.asarray(given, np.float32).reshape(np.shape(given)[0] if np.ndim(given) else 1, -1)
        if answers.shape != (len(images), 1 if known.single else known.classes):
            raise DataError(
                f"{self._path} gives {list(np.shape(given))} for {len(images)} images and {known.classes} classes"
            )
        if not np.isfinite(answers).all():
            raise DataError(f"{self._path} gives NaN or infinite values for plain pictures")
        return answers


class Folded:
    """The network as it will be served."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._session = open_session(model.SerializeToString(), "the network with its preprocessing inside")

    def run(self, images: Array) -> Array:
        """Logits FP32 `[n, classes]` of UINT8 images."""
        try:
            return run_session(self._session, LOGITS, {IMAGES: images})
        except Exception as exc:  # the runtime's own classes
            raise DataError(f"the network fails while it runs ({first_line(exc)}): no picture may break it") from exc


def _same_answers(one: Array, other: Array) -> bool:
    return bool(np.abs(one - other).max() <= _BATCH_TOLERANCE * max(1.0, float(np.abs(other).max())))


def probes_of(size: tuple[int, int]) -> Array:
    """Random noise of several colours and contrasts, so that an output that is the same for all of it is not a
    coincidence.
    """
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (_PROBES, *size, 3))
    colours = rng.integers(0, 256, (_PROBES, 1, 1, 3))
    share = np.linspace(1, 0.3, _PROBES).reshape(-1, 1, 1, 1)
    return np.asarray(share * noise + (1 - share) * colours).astype(np.uint8)


def check_answers_differ(running: Folded, probes: Array) -> None:
    """Raises InvalidInput if the network gives noise, black, white and plain colours the same scores."""
    colours = np.array(_PLAIN_COLOURS, np.uint8).reshape(-1, 1, 1, 3)
    pictures = np.concatenate([probes, np.broadcast_to(colours, (len(colours), *probes.shape[1:]))])
    scores = np.concatenate([running.run(pictures[at : at + 1]) for at in range(len(pictures))])
    if np.ptp(scores, axis=0).max() <= _LEAST_DIFFERENCE * max(1.0, float(np.abs(scores).max())):
        raise InvalidInput(
            "the network gives every picture the same scores when it gets one at a time. Either it compares the "
            "pictures of a batch with each other, or it does not depend on its input: export it for inference"
        )


def _difference(running: Folded, probes: Array, own: Array, read_as: Form, place: LabelPlace) -> float:
    """Largest change of an answer by the folding: of a score, as a share of the largest one, or of a probability;
    infinite if the answers have another shape."""
    expected = own if place.order is None else own[:, place.order]
    try:
        logits = running.run(probes)
    except Exception:  # the runtime's own classes
        return float("inf")
    if logits.shape != expected.shape:
        return float("inf")
    if read_as == "scores":
        return float(np.abs(logits - expected).max() / max(1.0, float(np.abs(expected).max())))
    return float(np.abs(softmax(logits) - expected).max())


def served(
    file: Path,
    model: onnx.ModelProto,
    known: Signature,
    preprocess: Preprocess,
    end: Ending,
    probes: Array,
    values: Array,
    place: LabelPlace,
    batch: int | None,
) -> tuple[onnx.ModelProto, Form, float]:
    """Return the network with its preprocessing inside, the place of its scores, and the difference of its answers.

    Raises:
        InvalidInput: it is not known where its scores are.
        DataError: its answers differ.
    """
    # What goes into its softmax is tried first; if that is not over the classes, what the network gives counts.
    for tried in dict.fromkeys([end, replace(end, before=())]):
        read_as = form(tried, values, known.classes)
        folded = in_order(fold(model, known, preprocess, read_as=read_as, end=tried, batch=batch), place)
        difference = _difference(Folded(folded), probes, own_answers(values, read_as), read_as, place)
        if difference <= (_TOLERANCE if read_as == "scores" else end.tolerance):
            return folded, read_as, difference
    raise DataError(
        f"{file} answers otherwise once its preprocessing is inside: its answers differ by {difference:.2%} of the "
        "largest one"
    )


def in_order(model: onnx.ModelProto, place: LabelPlace) -> onnx.ModelProto:
    """Reorder the logits to the order of the set's classes."""
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
