"""A finished run becomes an FP32 file, an INT8 file and an entry of the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
from torch import nn

from models.calibration import fit_temperature
from models.costs import costs_of
from models.data import ImageSet, Split, in_colours
from models.dataset import Dataset
from models.evaluate import logits_of, score
from models.export import FP32_NAME
from models.export.quantize import calibration_images, quantize_onnx
from models.export.to_onnx import export_onnx
from models.manifest import (
    MANIFEST_NAME,
    Manifest,
    ModelEntry,
    begin_weights,
    load_manifest,
    merge_entry,
    save_manifest,
    weights_folder,
)
from models.session import OnnxModel, load_model
from models.split import FEATURES, Part
from models.training.batches import Statistics
from models.training.checkpoint import load_checkpoint, load_own
from models.training.learner import averaged_network
from models.training.networks import count_parameters
from models.training.networks.predicted import PredictedLinear
from models.training.record import TrainingRecord, read_records, save_record, unfinished
from tierkit.atomic import write_atomically, write_new
from tierkit.errors import WeightsError
from tierkit.tensors import Array

__all__ = ["export_run", "quantize_run"]

_BATCH = 50
_CUT: tuple[Part, Part] = ("head", "tail")
Say = Callable[[str], None]


def export_run(folder: Path, dataset: Dataset, say: Say = lambda _: None) -> Path:
    """Write the averaged weights of a run to `fp32.onnx` in its folder, with the image size of the data set.

    Args:
        say: is called with a message if the run is not finished.

    Raises:
        WeightsError: the folder has no checkpoint, or its checkpoint has another hierarchy than the data set.
    """
    network, _, known = averaged_network(load_checkpoint(folder, dataset.hierarchy))
    if what := unfinished(folder):
        say(what)
    return _export(network, known, folder, dataset)[1]


def _export(network: nn.Module, known: Statistics, folder: Path, dataset: Dataset) -> tuple[onnx.ModelProto, Path]:
    model, path = export_onnx(network, known, dataset.size), folder / FP32_NAME
    write_atomically(path, model.SerializeToString())
    return model, path


def quantize_run(
    folder: Path,
    dataset: Dataset,
    weights: Path,
    *,
    records: Path,
    gpu: bool = False,
    own_name: bool = True,
    say: Say = lambda _: None,
) -> ModelEntry:
    """Export a run, quantise it, fit its temperature, measure it on the test set and enter it into the manifest.

    The FP32 head and tail are also compared with the whole network on every test image.

    Args:
        folder: the run folder.
        dataset: the data set that it was trained on.
        weights: the weights folder, whose manifest is updated; a new folder starts as a copy of the bundled one if the
            hierarchies are the same, else empty.
        records: folder that gets copies of the training records and curves of this run and of the runs that its weights
            come from.
        gpu: True if nodes with a GPU serve it by default.
        own_name: True if the folder must have the name of its run.
        say: is called with progress messages.

    Raises:
        WeightsError: there is no fitting checkpoint, the run has another name than its folder, the network's parts
            disagree with the whole, or the manifest there has another hierarchy.
        DataError: images are missing or do not fit.
        SetupError: a file could not be written; the old ones are whole.
    """
    network, config, known = averaged_network((load_own if own_name else load_checkpoint)(folder, dataset.hierarchy))
    made = read_records(TrainingRecord, folder)
    if what := unfinished(folder):
        say(what)
    floating, source = _export(network, known, folder, dataset)
    train, test = (in_colours(dataset.read(split), 3) for split in get_args(Split))
    examples, held_out = calibration_images(train, config.held_out_per_class)
    say("quantising")
    content = quantize_onnx(floating, known, examples).SerializeToString()
    draft = _draft(network, made, dataset, content, floating, gpu)
    before = None
    if (weights / MANIFEST_NAME).is_file() or dataset.hierarchy == load_manifest().hierarchy:
        before = begin_weights(weights, weights_folder())
    if before is not None:
        before.check_hierarchy(dataset.hierarchy)
    # Measured in the run folder: what is being served from the weights folder changes only when all is known.
    write_atomically(folder / draft.file, content)
    say("fitting the temperature on held-out training images")
    model = _load(draft, folder, dataset)
    labels = held_out.fine if draft.target == "fine" else held_out.coarse
    assert labels is not None
    temperature = fit_temperature(logits_of(model, held_out.images)[0], labels)
    say("measuring on the test set, INT8")
    entry = _measured(draft, model, test, dataset, temperature)
    say("measuring on the test set, FP32")
    entry = _measured_fp32(entry, source, test, dataset)
    _keep_records(made, folder, records)
    entry = entry.model_copy(update={"file": write_new(weights, entry.file, content)})
    save_manifest(
        Manifest(
            hierarchy=dataset.hierarchy.content(),
            data_source=dataset.source,
            models=merge_entry(before.models if before else (), entry),
            # What was cut from the network's old file does not fit the new one.
            encoders=tuple(
                encoder
                for encoder in (before.encoders if before else ())
                if encoder.network != entry.name or encoder.tail.part == "whole"
            ),
            tuned=before.tuned_without(entry.name) if before else (),
        ),
        weights,
    )
    return entry


def _keep_records(made: Sequence[TrainingRecord], folder: Path, records: Path) -> None:
    for record in made:
        name = record.config.name
        save_record(record, records, f"{name}.json")
        curves = (folder if record is made[0] else folder.parent / name) / "curves.png"
        if curves.is_file():
            write_atomically(records / f"{name}.png", curves.read_bytes())


def _draft(
    network: nn.Module,
    made: Sequence[TrainingRecord],
    dataset: Dataset,
    content: bytes,
    floating: onnx.ModelProto,
    gpu: bool,
) -> ModelEntry:
    """The entry before anything was measured."""
    config = made[0].config
    cut = next(value for value in floating.graph.value_info if value.name == FEATURES)
    _, channels, height, width = (dim.dim_value for dim in cut.type.tensor_type.shape.dim)
    return ModelEntry(
        name=config.name,
        tier=config.tier,
        file=f"{config.name}.int8.onnx",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        costs=costs_of(content, config.name),
        target=config.target,
        classes=len(dataset.hierarchy.labels(config.target)),
        input_shape=(*dataset.size, 3),
        precision="int8",
        parameters=count_parameters(network),
        temperature=1.0,
        coarse_accuracy=None,
        fine_accuracy=None,
        test_images=1,
        ece_before=0.0,
        ece_after=0.0,
        feature_shape=(channels, height, width),
        head_parameters=count_parameters(
            next(each for each in network.modules() if isinstance(each, nn.Conv2d | nn.Linear | PredictedLinear))
        ),
        gpu=gpu,
        training=made[0].facts(made[1:]),
    )


def _load(entry: ModelEntry, folder: Path, dataset: Dataset, part: Part = "whole") -> OnnxModel:
    return load_model(entry, folder, labels=dataset.hierarchy.labels(entry.target), part=part)


def _measured(entry: ModelEntry, model: OnnxModel, test: ImageSet, dataset: Dataset, temperature: float) -> ModelEntry:
    logits, _ = logits_of(model, test.images)
    _, _, before = score(logits, test, dataset.hierarchy, target=entry.target, temperature=1.0)
    coarse, fine, after = score(logits, test, dataset.hierarchy, target=entry.target, temperature=temperature)
    return entry.model_copy(
        update={
            "temperature": temperature,
            "test_images": len(test),
            "coarse_accuracy": coarse,
            "fine_accuracy": fine,
            "ece_before": before,
            "ece_after": after,
        }
    )


def _measured_fp32(entry: ModelEntry, source: Path, test: ImageSet, dataset: Dataset) -> ModelEntry:
    floating = entry.with_file(source, precision="fp32")
    logits, _ = logits_of(_load(floating, source.parent, dataset), test.images)
    head, tail = (_load(floating, source.parent, dataset, part) for part in _CUT)
    _check_cut(head, tail, test.images, logits)
    coarse, fine, _ = score(logits, test, dataset.hierarchy, target=entry.target, temperature=entry.temperature)
    return entry.model_copy(update={"fp32_coarse_accuracy": coarse, "fp32_fine_accuracy": fine})


def _check_cut(head: OnnxModel, tail: OnnxModel, images: Array, expected: Array) -> None:
    joined = np.concatenate(
        [
            tail.run(head.run({"images": images[start : start + _BATCH]}, [FEATURES]), ["logits"])["logits"]
            for start in range(0, len(images), _BATCH)
        ]
    )
    largest = np.abs(expected).max()
    if np.abs(joined - expected).max() > 1e-5 * largest or (joined.argmax(1) != expected.argmax(1)).any():
        raise WeightsError(f"head and tail of {head.entry.file} do not give the answers of the whole network")
