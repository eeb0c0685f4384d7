"""A finished run becomes two INT8 files, head and tail, and an entry of a manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from encryption.packing import Quantiser
from encryption.training.config import BottleneckConfig
from encryption.training.learner import build_parts
from encryption.training.record import EncoderRecord
from models.calibration import fit_temperature
from models.costs import costs_of
from models.dataset import Dataset
from models.evaluate import score
from models.export.quantize import calibration_images, quantize_head, quantize_tail
from models.export.to_onnx import export_head, export_tail
from models.manifest import (
    EncoderEntry,
    ModelEntry,
    PartFile,
    TrainingFacts,
    begin_weights,
    merge_encoder,
    records_folder,
    save_manifest,
    weights_folder,
)
from models.session import OnnxModel, load_encoder
from models.split import FEATURES
from models.training.batches import Statistics
from models.training.checkpoint import load_own
from models.training.learner import load_weights
from models.training.networks import build_network, count_parameters
from models.training.record import read_records, save_record, unfinished
from tierkit.atomic import write_atomically, write_new
from tierkit.tensors import Array
from tierkit.types import EncoderKind

__all__ = ["export_encoder"]

_BATCH = 50
_NOISE_SEED = 0
Say = Callable[[str], None]


def export_encoder(
    folder: Path,
    dataset: Dataset,
    into: Path,
    *,
    noise: float | None = None,
    say: Say = lambda _: None,
) -> EncoderEntry:
    """Write head and tail of a run as INT8 files, measured on the test set, and enter them into a manifest.

    Args:
        folder: the run folder.
        dataset: the data set that it was trained on.
        into: weights folder that has the upper network; if it is missing, it begins as a copy of the bundled one. Its
            folder of records gets copies of the training records: of the run, and of the runs that its weights come
            from.
        noise: noise of the device instead of the configuration's.
        say: called with lines about the progress.

    Raises:
        WeightsError: the folder has no checkpoint, one of a run with another name, or one for another hierarchy than
            the data set's or the manifest's.
        NotFound: the upper network is in no manifest.
        DataError: images are missing or do not fit.
        SetupError: a file could not be written.
    """
    checkpoint = load_own(folder, dataset.hierarchy)
    config = checkpoint.configured(BottleneckConfig)
    made = read_records(EncoderRecord, folder)
    if what := unfinished(folder, EncoderRecord):
        say(what)
    upper = build_network(config.network.kind, len(dataset.hierarchy.fine), config.network.options)
    parts = build_parts(config, upper).eval()
    load_weights(parts, checkpoint.averaged, f"the checkpoint of {config.name!r}")
    statistics = Statistics(**checkpoint.statistics)
    manifest = begin_weights(into, weights_folder())
    network = manifest.entry(config.upper)
    manifest.check_hierarchy(dataset.hierarchy)
    train, test = dataset.read("train"), dataset.read("test")
    examples, held_out = calibration_images(train, config.held_out_per_class)
    levels = config.encoder.levels
    entry = _draft(config, parts, network, made[0].facts(made[1:]), dataset)
    quantiser = Quantiser(scale=entry.scale, zero_point=entry.zero_point, levels=levels)
    if noise is not None:
        entry = entry.model_copy(update={"noise": noise})
    rng = np.random.default_rng(_NOISE_SEED)

    def arriving(features: Array) -> Array:
        noise = rng.standard_normal(features.shape, dtype=np.float32) * np.float32(entry.noise)
        return quantiser.unpack(quantiser.pack(features + noise))

    say("quantising the head")
    floating = export_head(parts["head"], statistics, dataset.size)
    head_file = quantize_head(floating, statistics, examples).SerializeToString()
    entry = entry.model_copy(update={"head": _part(entry.head.file, head_file)})
    # In the run folder: what is being served from the weights folder changes only when all is known.
    write_atomically(folder / entry.head.file, head_file)
    head = load_encoder(entry, network, "head", folder, labels=dataset.hierarchy.fine)
    say("quantising the tail")
    arrived = arriving(_features(head, examples))
    # The tail's own steps are as fine as UINT8 allows, and each level of the packed features is one of them.
    finer = quantiser.scale / (255 // (levels - 1))
    tail_file = quantize_tail(export_tail(parts["tail"], entry.feature_shape), finer, 0, arrived).SerializeToString()
    entry = entry.model_copy(update={"tail": _part(entry.tail.file, tail_file)})
    write_atomically(folder / entry.tail.file, tail_file)
    tail = load_encoder(entry, network, "tail", folder, labels=dataset.hierarchy.fine)
    say("fitting the temperature on held-out training images")
    assert held_out.fine is not None
    temperature = fit_temperature(_logits(tail, arriving(_features(head, held_out.images))), held_out.fine)
    say("measuring on the test set")
    features = _features(head, test.images)
    (coarse, fine), (_, plain_fine) = (
        score(_logits(tail, sent), test, dataset.hierarchy, target="fine", temperature=temperature)[:2]
        for sent in (arriving(features), features)
    )
    entry = entry.model_copy(
        update={
            "temperature": temperature,
            "fine_accuracy": fine,
            "coarse_accuracy": coarse,
            "fp32_fine_accuracy": plain_fine,
            "test_images": len(test),
        }
    )
    for record in made:
        save_record(record, records_folder(into), f"{record.config.name}.json")
    entry = entry.model_copy(
        update={"head": _written(into, entry.head, head_file), "tail": _written(into, entry.tail, tail_file)}
    )
    encoders = merge_encoder(manifest.encoders, entry)
    save_manifest(manifest.model_copy(update={"encoders": encoders}), into)
    return entry


def _features(head: OnnxModel, images: Array) -> Array:
    return np.concatenate(
        [head.run({"images": images[i : i + _BATCH]}, [FEATURES])[FEATURES] for i in range(0, len(images), _BATCH)]
    )


def _logits(tail: OnnxModel, features: Array) -> Array:
    return np.concatenate(
        [tail.run({FEATURES: features[i : i + _BATCH]}, ["logits"])["logits"] for i in range(0, len(features), _BATCH)]
    )


def _draft(
    config: BottleneckConfig,
    parts: nn.ModuleDict,
    network: ModelEntry,
    training: TrainingFacts,
    dataset: Dataset,
) -> EncoderEntry:
    """The entry before anything was measured."""
    with torch.inference_mode():
        shape = tuple(parts["head"](torch.zeros(1, 3, *dataset.size)).shape[1:])
    name = f"{network.name}.{EncoderKind.BOTTLENECK}"
    return EncoderEntry(
        kind=EncoderKind.BOTTLENECK,
        network=network.name,
        head=_part(f"{name}.head.int8.onnx", b"-"),
        tail=_part(f"{name}.tail.int8.onnx", b"-"),
        feature_shape=shape,
        scale=1 / (config.encoder.levels - 1),
        zero_point=0,
        bits=(config.encoder.levels - 1).bit_length(),
        noise=config.encoder.noise,
        temperature=1.0,
        fine_accuracy=0.0,
        coarse_accuracy=0.0,
        fp32_fine_accuracy=0.0,
        test_images=1,
        head_parameters=count_parameters(parts["head"]),
        parameters=count_parameters(parts),
        training=training,
    )


def _written(folder: Path, part: PartFile, content: bytes) -> PartFile:
    return part.model_copy(update={"file": write_new(folder, part.file, content)})


def _part(file: str, content: bytes) -> PartFile:
    return PartFile(
        file=file,
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        costs=costs_of(content, file),
        part="whole",
    )
