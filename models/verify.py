"""Does an installed network work? Digest, loading, shapes, finite answers, and head + tail against the whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.manifest import EncoderEntry, Manifest, ModelEntry
from models.session import load_encoder, load_model, verify_file
from models.speed import probe_images
from tierkit.errors import WeightsError

__all__ = ["Verification", "verify_encoder", "verify_entry"]

_IMAGES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of `verify_entry`."""

    name: str
    file: str
    ok: bool
    detail: str
    """Confirmation, or the first fault found."""


def verify_entry(entry: ModelEntry, manifest: Manifest, folder: Path, *, provider: str = "cpu") -> Verification:
    """Check one network of a weights folder. The result describes a fault of its file.

    Raises:
        MissingExtra, ProviderUnavailable: nothing can be checked on this installation.
    """
    try:
        verify_file(entry, folder)
        detail = _run_parts(entry, manifest, folder, provider)
    except WeightsError as error:
        return Verification(name=entry.name, file=entry.file, ok=False, detail=str(error))
    return Verification(name=entry.name, file=entry.file, ok=True, detail=detail)


def verify_encoder(encoder: EncoderEntry, manifest: Manifest, folder: Path, *, provider: str = "cpu") -> Verification:
    """Check head and tail of one encoder of a weights folder. See `verify_entry`."""
    network = manifest.entry(encoder.network)
    labels = manifest.labels(network)
    file = encoder.head.file
    try:
        head = load_encoder(encoder, network, "head", folder, provider=provider, labels=labels)
        tail = load_encoder(encoder, network, "tail", folder, provider=provider, labels=labels)
        features = head.run({"images": probe_images(network.input_shape)[:_IMAGES]}, ["features"])
        if not np.isfinite(tail.run(features, ["logits"])["logits"]).all():
            raise WeightsError(f"{encoder.tail.file} gives values that are not finite")
    except WeightsError as error:
        return Verification(name=encoder.name, file=file, ok=False, detail=str(error))
    return Verification(name=encoder.name, file=file, ok=True, detail="sha256 of head and tail match; both run")


def _run_parts(entry: ModelEntry, manifest: Manifest, folder: Path, provider: str) -> str:
    labels = manifest.labels(entry)
    images = probe_images(entry.input_shape)[:_IMAGES]
    whole = load_model(entry, folder, provider=provider, labels=labels).run({"images": images}, ["logits"])["logits"]
    if not np.isfinite(whole).all():
        raise WeightsError(f"{entry.file} gives values that are not finite")
    if entry.feature_shape is None:
        return "sha256 matches; runs"
    head = load_model(entry, folder, provider=provider, labels=labels, part="head")
    tail = load_model(entry, folder, provider=provider, labels=labels, part="tail")
    joined = tail.run(head.run({"images": images}, ["features"]), ["logits"])["logits"]
    # The whole may round a feature that lies between two steps of the INT8 scale the other way.
    same = float(np.mean(whole.argmax(axis=1) == joined.argmax(axis=1)))
    if same < 0.97:
        raise WeightsError(f"head and tail of {entry.file} agree with the whole on only {same:.0%} of the answers")
    return f"sha256 matches; runs; head + tail give {same:.0%} of answers"
