"""A finished run becomes an FP32 file, an INT8 file and an entry of the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from models.atomic import write_atomically
from models.calibration import fit_temperature
from models.data import ImageSet
from models.dataset import Dataset
from models.evaluate import logits_of, score
from models.export.quantize import quantize_onnx
from models.export.to_onnx import export_onnx
from models.held_out import hold_out
from models.manifest import MANIFEST_NAME, Manifest, ModelEntry, load_manifest, merge_entry, save_manifest
from models.session import OnnxModel, load_model
from models.split import FEATURES, Part
from models.training.batches import Statistics
from models.training.checkpoint import Checkpoint, load_checkpoint
from models.training.config import TrainConfig
from models.training.loop import averaged_network
from models.training.networks import count_parameters
from models.training.record import TrainingRecord, load_record, record_name, save_record
from tierkit.errors import DataError, WeightsError
from tierkit.inference.model import Array

__all__ = ["export_run", "quantize_run"]

_CALIBRATION_PER_CLASS = 10
_BATCH = 50
_CUT: tuple[Part, Part] = ("head", "tail")
FP32_NAME = "fp32.onnx"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    folder: Path
    checkpoint: Checkpoint
    config: TrainConfig
    record: TrainingRecord
    before: tuple[TrainingRecord, ...]
    """The runs that its weights come from, latest first."""
    statistics: Statistics
    parameters: int


def export_run(folder: Path, dataset: Dataset) -> Path:
    """Write the averaged weights of a run as `fp32.onnx` into its folder, for images of the data set's size.

    Raises:
        WeightsError: the folder has no checkpoint, or one for another hierarchy than the data set's.
    """
    checkpoint = load_checkpoint(folder / "checkpoint.pt")
    if checkpoint is None:
        raise WeightsError(f"nothing trained in {folder}: no checkpoint.pt")
    network, _, known = averaged_network(checkpoint, dataset.hierarchy)
    path = folder / FP32_NAME
    write_atomically(path, export_onnx(network, known, dataset.size).SerializeToString())
    return path


def quantize_run(
    folder: Path,
    dataset: Dataset,
    weights: Path,
    *,
    records: Path,
    stands_in_for: str | None = None,
    say: Say = lambda _: None,
) -> ModelEntry:
    """Quantise a run's `fp32.onnx`, fit its temperature, measure it on the test set and enter it into the manifest.

    On the way the FP32 head and tail are compared with the whole network on every test image.

    Args:
        folder: the run folder, after `export_run`.
        dataset: the data set that it was trained on.
        weights: the weights folder; its manifest is updated, or begun.
        records: folder that gets copies of the training records and their curves, of the run and of those that its
            weights come from.
        stands_in_for: the network that this one replaces for now, and why.
        say: told what is going on.

    Raises:
        WeightsError: the run was not exported, its parts disagree with the whole, or the manifest there is of another
            hierarchy.
        DataError: images are missing or do not fit.
        SetupError: a file could not be written; the old ones are whole.
    """
    run = _open(folder, dataset)
    source = folder / FP32_NAME
    if not source.is_file():
        raise WeightsError(f"{source} is missing: export the run first")
    floating = onnx.load(source)
    train, test = dataset.read("train"), dataset.read("test")
    if train.fine is None:
        raise DataError("quantisation needs labelled training images")
    split = hold_out(train.fine, run.config.held_out_per_class)
    say("quantising")
    integer = quantize_onnx(floating, run.statistics, train.images[_balanced(train, split.train)])
    content = integer.SerializeToString()
    draft = _draft(run, dataset, test, content, floating, stands_in_for)
    before = load_manifest(weights) if (weights / MANIFEST_NAME).is_file() else None
    if before is not None and before.hierarchy != dataset.hierarchy:
        raise WeightsError(f"{weights} holds networks of hierarchy {before.hierarchy.name!r}; choose another folder")
    # Measured in the run folder: what is being served from the weights folder changes only when all is known.
    write_atomically(folder / draft.file, content)
    say("fitting the temperature on held-out training images")
    model = _load(draft, folder, dataset)
    held_out = train.take(split.held_out)
    labels = held_out.fine if draft.target == "fine" else held_out.coarse
    assert labels is not None
    temperature = fit_temperature(logits_of(model, held_out.images)[0], labels)
    say("measuring on the test set, INT8")
    entry = _measured(draft, model, test, dataset, temperature)
    say("measuring on the test set, FP32")
    entry = _measured_fp32(entry, source, test, dataset)
    _keep_records(run, records)
    write_atomically(weights / entry.file, content)
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
        ),
        weights,
    )
    return entry


def _keep_records(run: _Run, records: Path) -> None:
    for record in (run.record, *run.before):
        name = record.config.name
        save_record(record, records, record_name(name))
        curves = run.folder.parent / name / "curves.png"
        if curves.is_file():
            write_atomically(records / f"{name}.png", curves.read_bytes())


def _open(folder: Path, dataset: Dataset) -> _Run:
    checkpoint = load_checkpoint(folder / "checkpoint.pt")
    if checkpoint is None:
        raise WeightsError(f"nothing trained in {folder}: no checkpoint.pt")
    network, config, known = averaged_network(checkpoint, dataset.hierarchy)
    chain = [load_record(folder)]
    while (name := chain[-1].config.initial) is not None:
        chain.append(load_record(folder.parent / name))
    return _Run(
        folder=folder,
        checkpoint=checkpoint,
        config=config,
        record=chain[0],
        before=tuple(chain[1:]),
        statistics=known,
        parameters=count_parameters(network),
    )


def _balanced(train: ImageSet, indices: np.ndarray) -> np.ndarray:
    assert train.fine is not None
    fine = train.fine[indices]
    picked = [indices[fine == label][:_CALIBRATION_PER_CLASS] for label in np.unique(fine)]
    return np.concatenate(picked)


def _draft(
    run: _Run, dataset: Dataset, test: ImageSet, content: bytes, floating: onnx.ModelProto, stands_in_for: str | None
) -> ModelEntry:
    config, hierarchy = run.config, dataset.hierarchy
    cut = next(value for value in floating.graph.value_info if value.name == FEATURES)
    _, channels, height, width = (dim.dim_value for dim in cut.type.tensor_type.shape.dim)
    return ModelEntry(
        name=config.name,
        tier=config.tier,
        file=f"{config.name}.int8.onnx",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        target=config.target,
        classes=len(hierarchy.fine if config.target == "fine" else hierarchy.coarse),
        input_shape=(test.images.shape[1], test.images.shape[2], 3),
        precision="int8",
        parameters=run.parameters,
        temperature=1.0,
        coarse_accuracy=None,
        fine_accuracy=None,
        test_images=len(test),
        ece_before=0.0,
        ece_after=0.0,
        feature_shape=(channels, height, width),
        head_parameters=_head_parameters(run),
        stands_in_for=stands_in_for,
        training=run.record.facts(record_name(config.name), run.before),
    )


def _head_parameters(run: _Run) -> int:
    network: dict[str, int] = {
        name: value.numel() for name, value in run.checkpoint.averaged.items() if name.startswith("network.")
    }
    first = next(name for name in network if name.endswith(".weight"))
    return network[first] + network.get(first.removesuffix("weight") + "bias", 0)


def _load(entry: ModelEntry, folder: Path, dataset: Dataset, part: Part = "whole") -> OnnxModel:
    labels = dataset.hierarchy.fine if entry.target == "fine" else dataset.hierarchy.coarse
    return load_model(entry, folder, labels=labels, part=part)


def _measured(entry: ModelEntry, model: OnnxModel, test: ImageSet, dataset: Dataset, temperature: float) -> ModelEntry:
    logits, _ = logits_of(model, test.images)
    _, _, before = score(logits, test, dataset.hierarchy, target=entry.target, temperature=1.0)
    coarse, fine, after = score(logits, test, dataset.hierarchy, target=entry.target, temperature=temperature)
    return entry.model_copy(
        update={
            "temperature": temperature,
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
