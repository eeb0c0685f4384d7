"""The paper's encoder (section 3.5): the upper network's own first convolution, cut off and measured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from encryption.packing import Quantiser
from models.costs import costs_of
from models.dataset import Dataset
from models.evaluate import score
from models.folders import Images, Labelled
from models.held_out import Unseen
from models.manifest import EncoderEntry, Manifest, ModelEntry, PartFile, load_manifest, merge_encoder, save_manifest
from models.session import OnnxModel, load_model, verify_file
from models.split import FEATURES, extract_part
from tierkit.atomic import write_new
from tierkit.errors import InvalidInput
from tierkit.tensors import Array
from tierkit.types import EncoderKind

__all__ = ["add_conv1"]

_BATCH = 50
Report = Callable[[str, int, int], None]
"""`report(what, images done, images in all)`."""


def add_conv1(
    names: list[str],
    folder: Path,
    dataset: Dataset,
    records: Path,
    *,
    threads: int = 1,
    report: Report = lambda what, images, of: None,
) -> list[EncoderEntry]:
    """Cut the first convolution off these networks of a weights folder, and enter it into its manifest as an encoder.

    The range of the UINT8 form comes from the features of images that the network has not seen: the held-out training
    images, or half of the labelled images if the network was imported. Accuracies are measured on the test set, or on
    the other half.

    Args:
        names: names of networks that give fine answers.
        folder: weights folder. Each head becomes a file there; the tails stay in the networks' own files.
        records: folder of the training records, which name the held-out images.

    Raises:
        NotFound: a network that the manifest does not have.
        InvalidInput: one without fine answers, or of another hierarchy than the data set.
        DataError: the images have no labels.
        WeightsError: a network cannot be cut, a file is missing or damaged, or nothing was held out.
        SetupError: a file could not be written.
    """
    manifest = load_manifest(folder)
    manifest.check_hierarchy(dataset.hierarchy)
    networks = [manifest.entry(name) for name in names]
    for network in networks:
        if network.target != "fine":
            raise InvalidInput(f"{network.name!r} gives no fine answers: nothing is sent up to it")
        _ = network.cut
    made = []
    for network in networks:
        unseen = Unseen(dataset, [network], records)
        held_out = unseen.to_choose(network)
        encoder = _make(network, manifest, folder, held_out.images, unseen.to_judge(network), threads, report)
        manifest = manifest.model_copy(update={"encoders": merge_encoder(manifest.encoders, encoder)})
        save_manifest(manifest, folder)
        made.append(encoder)
    return made


def _make(
    network: ModelEntry,
    manifest: Manifest,
    folder: Path,
    held_out: Images,
    test: Labelled,
    threads: int,
    report: Report,
) -> EncoderEntry:
    labels = manifest.labels(network)
    whole = verify_file(network, folder).read_bytes()
    content = extract_part(whole, "head")
    head = load_model(network, folder, part="head", threads=threads, labels=labels)
    tail = load_model(network, folder, part="tail", threads=threads, labels=labels)
    quantiser = _measure_range(head, tail, held_out, lambda done: report(f"{network.name}: range", done, len(held_out)))
    fp32, uint8 = [], []
    for batch in _batches(test.images):
        features = head.run({"images": batch}, [FEATURES])[FEATURES]
        fp32.append(tail.run({FEATURES: features}, ["logits"])["logits"])
        uint8.append(tail.run({FEATURES: quantiser.unpack(quantiser.pack(features))}, ["logits"])["logits"])
        report(f"{network.name}: test", len(batch), len(test))
    (coarse, fine), (_, fp32_fine) = (
        score(np.concatenate(logits), test, manifest.hierarchy, target="fine", temperature=network.temperature)[:2]
        for logits in (uint8, fp32)
    )
    assert fine is not None  # the network is a fine one
    assert fp32_fine is not None
    precision = ".int8" if network.precision == "int8" else ""
    file = f"{network.name}.{EncoderKind.CONV1}.head{precision}.onnx"
    file = write_new(folder, file, content)
    return EncoderEntry(
        kind=EncoderKind.CONV1,
        network=network.name,
        head=PartFile(
            file=file,
            sha256=hashlib.sha256(content).hexdigest(),
            size_bytes=len(content),
            costs=costs_of(content, file),
            part="whole",
        ),
        tail=PartFile(
            file=network.file,
            sha256=network.sha256,
            size_bytes=network.size_bytes,
            costs=costs_of(extract_part(whole, "tail"), network.name),
            part="tail",
        ),
        feature_shape=network.cut.shape,
        scale=quantiser.scale,
        zero_point=quantiser.zero_point,
        temperature=network.temperature,
        fine_accuracy=fine,
        coarse_accuracy=coarse,
        fp32_fine_accuracy=fp32_fine,
        test_images=len(test),
        head_parameters=network.cut.head_parameters,
        parameters=network.parameters,
    )


def _measure_range(head: OnnxModel, tail: OnnxModel, images: Images, report: Callable[[int], None]) -> Quantiser:
    low = high = 0.0
    rectified = True
    for batch in _batches(images):
        features = head.run({"images": batch}, [FEATURES])[FEATURES]
        low, high = min(low, float(features.min())), max(high, float(features.max()))
        if rectified:
            whole, clipped = (
                tail.run({FEATURES: values}, ["logits"])["logits"] for values in (features, np.maximum(features, 0))
            )
            rectified = bool((whole == clipped).all())
        report(len(batch))
    # A tail that begins with a rectifier makes nothing of negative features: they need no levels, and stay below.
    return Quantiser.for_range(0.0 if rectified else low, high)


def _batches(images: Images) -> Iterator[Array]:
    return (images[start : start + _BATCH] for start in range(0, len(images), _BATCH))
