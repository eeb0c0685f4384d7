"""The model set with an improved network in the place of the present one, and its temperature and accuracies."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.calibration import fit_temperature
from models.evaluate import logits_of, score
from models.folders import Images, Labelled
from models.manifest import Manifest, ModelEntry, load_manifest, save_manifest
from models.session import load_model
from tierkit.atomic import write_atomically
from tierkit.errors import InvalidInput, SetupError
from tierkit.tensors import Array

__all__ = ["ComparedOn", "answers_of", "answers_of_file", "entry_to_improve", "successor", "write_set"]


_FILE = "network.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOn:
    """Pictures for comparing the two networks."""

    images: Images
    """The pixels that the network takes."""
    labels: Array
    """int64 `[n]`, of the network's target."""
    by_people: Array | None = None
    """bool `[n]`: people named the label, and not the tier above. None for pictures that all have labels."""


def entry_to_improve(manifest: Manifest, tier: str) -> ModelEntry:
    """The network that a tier serves by default, if it can be improved.

    Raises:
        InvalidInput: the tier is another one than `end`, or encoders are parts of its network.
        NotFound: the tier has no network.
    """
    if tier != "end":
        raise InvalidInput(
            f"only the network of the end tier can be improved: devices hold encoders cut from the network of the "
            f"{tier} tier"
        )
    entry = manifest.default_for(tier)
    if any(encoder.network == entry.name for encoder in manifest.encoders):
        raise InvalidInput(f"encoders are cut from {entry.name!r}, and they would not fit the improved network")
    return entry


def answers_of(manifest: Manifest, entry: ModelEntry, folder: Path, images: Images) -> Array:
    """Compute the logits `[n, classes]` of a network with ONNX Runtime, like a node that serves it. They are FP32;
    without pictures there are no rows.

    Raises:
        WeightsError: the file cannot be loaded.
        DataError: a picture cannot be read.
    """
    if not len(images):
        return np.zeros((0, entry.classes), np.float32)
    return logits_of(load_model(entry, folder, labels=manifest.labels(entry)), images)[0]


def answers_of_file(manifest: Manifest, entry: ModelEntry, content: bytes, *parts: Images) -> list[Array]:
    """The logits for each of these parts, of a network whose file is in memory.

    Args:
        entry: entry of this network, or of one that differs only in its weights.

    Raises:
        SetupError: the file cannot be written for ONNX Runtime.
        WeightsError, DataError: see `answers_of`.
    """
    facts = {"file": _FILE, "sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    with tempfile.TemporaryDirectory(prefix="terrace-compared-") as place:
        write_atomically(Path(place) / _FILE, content)
        return [answers_of(manifest, entry.model_copy(update=facts), Path(place), each) for each in parts]


def successor(
    manifest: Manifest,
    entry: ModelEntry,
    content: bytes,
    *,
    fitted: Sequence[tuple[Array, Array]] = (),
    measured: tuple[Array, Labelled] | None = None,
) -> ModelEntry:
    """The entry of an improved network.

    Args:
        entry: entry of the present network.
        content: file of the improved one.
        fitted: its logits and the labels by which its temperature is fitted; without any it is not changed.
        measured: its logits for labelled pictures, by which its accuracies are known.
    """
    temperature = entry.temperature
    if sum(len(labels) for _, labels in fitted):
        temperature = fit_temperature(
            np.concatenate([logits for logits, _ in fitted]), np.concatenate([labels for _, labels in fitted])
        )
    changes: dict[str, object] = {
        "sha256": hashlib.sha256(content).hexdigest(),
        "size_bytes": len(content),
        "temperature": temperature,
        "coarse_accuracy": None,
        "fine_accuracy": None,
        "fp32_coarse_accuracy": None,
        "fp32_fine_accuracy": None,
        "test_images": 0,
        "ece_before": None,
        "ece_after": None,
    }
    if measured is not None:
        logits, labelled = measured
        _, _, before = score(logits, labelled, manifest.hierarchy, target=entry.target, temperature=1.0)
        coarse, fine, after = score(logits, labelled, manifest.hierarchy, target=entry.target, temperature=temperature)
        changes |= {"coarse_accuracy": coarse, "fine_accuracy": fine, "test_images": len(labelled)}
        changes |= {"ece_before": before, "ece_after": after}
    return entry.model_copy(update=changes)


def write_set(base: Path, folder: Path, entry: ModelEntry, content: bytes) -> Manifest:
    """Write the model set of a folder again, with another network in the place of the one of its name. The manifest
    comes last; thresholds of the old network are left out.

    Raises:
        SetupError: a file cannot be written.
    """
    before = load_manifest(base)
    models = tuple(entry if each.name == entry.name else each for each in before.models)
    manifest = Manifest(
        hierarchy=before.hierarchy_content,
        data_source=before.data_source,
        models=models,
        encoders=before.encoders,
        tuned=before.tuned,
    )
    sides = [getattr(encoder, side).file for encoder in before.encoders for side in encoder.own_files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in {*(each.file for each in models), *sides} - {entry.file}:
            if not (folder / name).is_file():
                copied = folder / f".{name}.part"
                shutil.copyfile(base / name, copied)
                copied.replace(folder / name)
    except OSError as error:
        raise SetupError(f"cannot write the model set in {folder}: {error.strerror}") from error
    write_atomically(folder / entry.file, content)
    save_manifest(manifest, folder)
    return manifest
