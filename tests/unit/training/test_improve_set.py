"""The model set of an improved network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from models.manifest import MANIFEST_NAME, load_manifest
from tests.model_sets import COLOURS, colour_network, colour_set, coloured, encoded_set
from tierkit.errors import InvalidInput, NotFound, SetupError
from training.improve.successor import answers_of, entry_to_improve, successor, write_set

PICTURES = np.stack([coloured(colour, strength=strength) for strength in (120, 160, 200) for colour in COLOURS])
LABELS = np.tile(np.arange(3), 3)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    networks = {
        "end": colour_network(tmp_path / "end.onnx", weights=(0.1, 1.0, 0.2)),
        "edge": colour_network(tmp_path / "edge.onnx", factor=20.0),
    }
    return colour_set(tmp_path / "base", networks)


def better(tmp_path: Path) -> bytes:
    """File of an end network that knows the colours."""
    other = colour_set(tmp_path / "other", {"end": colour_network(tmp_path / "better.onnx")})
    return (other / load_manifest(other).default_for("end").file).read_bytes()


def test_the_set_has_the_improved_network_and_keeps_the_others(base: Path, tmp_path: Path):
    before, content = load_manifest(base), better(tmp_path)
    entry = entry_to_improve(before, "end")
    draft = successor(before, entry, content)
    manifest = write_set(base, tmp_path / "set", draft, content)
    logits = answers_of(manifest, draft, tmp_path / "set", PICTURES)
    assert logits.argmax(1).tolist() == LABELS.tolist()
    final = successor(before, entry, content, fitted=[(logits, LABELS)])
    write_set(base, tmp_path / "set", final, content)
    after = load_manifest(tmp_path / "set")
    assert after == load_manifest(tmp_path / "set")
    assert after.digest != before.digest
    assert after.entry(entry.name).sha256 == hashlib.sha256(content).hexdigest()
    assert after.entry(entry.name).temperature != entry.temperature
    assert (after.entry(entry.name).test_images, after.entry(entry.name).accuracy) == (0, None)
    assert after.entry("of-edge") == before.entry("of-edge")
    for each in after.models:
        file = (tmp_path / "set" / each.file).read_bytes()
        assert hashlib.sha256(file).hexdigest() == each.sha256
    assert load_manifest(base) == before


def test_a_set_that_cannot_be_written_has_no_manifest(base: Path, tmp_path: Path):
    before, content = load_manifest(base), better(tmp_path)
    entry = successor(before, entry_to_improve(before, "end"), content)
    (base / before.entry("of-edge").file).unlink()
    with pytest.raises(SetupError):
        write_set(base, tmp_path / "set", entry, content)
    assert not (tmp_path / "set" / MANIFEST_NAME).exists()


def test_only_a_network_of_the_end_tier_without_encoders_is_improved(tmp_path: Path, base: Path):
    manifest = load_manifest(base)
    with pytest.raises(InvalidInput, match="end tier"):
        entry_to_improve(manifest, "edge")
    (tmp_path / "more").mkdir()
    encoded = load_manifest(encoded_set(tmp_path / "more", {"edge": 32}))
    with pytest.raises(NotFound):
        entry_to_improve(encoded, "end")


def test_no_pictures_give_no_answers(base: Path):
    manifest = load_manifest(base)
    entry = entry_to_improve(manifest, "end")
    assert answers_of(manifest, entry, base, PICTURES[:0]).shape == (0, 3)
