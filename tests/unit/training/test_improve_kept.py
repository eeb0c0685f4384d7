"""Training images of kept pictures: whose word is the label, and which pictures are left out."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.kept.sample import KeptPicture
from tests.shapes import SHAPES
from tierkit.errors import DataError
from tierkit.types import Tier
from training.improve.kept import FEWEST_PICTURES, images_of, label_of
from training.own_data import OwnData

OWN = OwnData(
    release="shapes@1",
    sha256="0" * 64,
    size_bytes=1,
    hierarchy=SHAPES.content(),
    height=8,
    width=6,
    least_confidence=0.5,
)
PICTURE = KeptPicture(
    source="door",
    sequence=1,
    taken_at=None,
    sha256="0" * 64,
    release=1,
    local_sha256="0" * 64,
    local=1,
    local_confidence=0.5,
    margin=0.1,
    tier=Tier.CLOUD,
    node_id="cloud-1",
    upper_sha256="1" * 64,
    label=2,
    confidence=0.6,
    coarse_label=1,
    coarse_confidence=0.9,
    kind="differs",
    form="pixels",
    classes=SHAPES.digest,
)


def file(strength: int = 200, form: str = "PNG") -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (20, 20), (strength, 0, 0)).save(written, form)
    return written.getvalue()


@pytest.mark.parametrize(
    ("changes", "fine", "coarse"),
    [
        ({}, 2, 1),
        ({"confidence": 0.4}, "unsure answers from above", 1),
        ({"coarse_confidence": 0.4}, 2, "unsure answers from above"),
        ({"confidence": float("nan"), "coarse_confidence": float("nan")},) + ("unsure answers from above",) * 2,
        ({"confidence": 1.5, "coarse_confidence": 1.5},) + ("unsure answers from above",) * 2,
        ({"label": 3, "coarse_label": 2},) + ("other classes",) * 2,
        ({"label": -1, "coarse_label": -1},) + ("other classes",) * 2,
        ({"classes": "0" * 64},) + ("other classes",) * 2,
        ({"person": 0}, 0, 0),
        ({"person": 0, "confidence": float("nan")}, 0, 0),
        ({"person": 3}, "other classes", "other classes"),
    ],
)
def test_a_person_is_believed_before_a_sure_answer_from_above(changes: dict[str, Any], fine, coarse):
    picture = replace(PICTURE, **changes)
    assert label_of(picture, SHAPES, "fine", 0.5) == fine
    assert label_of(picture, SHAPES, "coarse", 0.5) == coarse


def kept(key: int, content: bytes, **changes: Any) -> tuple[int, KeptPicture, bytes]:
    """A row of a kept sample."""
    return key, replace(PICTURE, sequence=key, sha256=hashlib.sha256(content).hexdigest(), **changes), content


def test_pictures_become_the_pixels_of_the_network():
    sound = [kept(key, file(key * 20)) for key in range(1, FEWEST_PICTURES + 1)]
    damaged = [kept(100, b"no picture"), kept(101, file()[:60]), kept(102, b"")]
    others = [kept(103, file(), classes=""), kept(104, file(form="JPEG"), person=0)]
    found = images_of([*sound, *damaged, *others], OWN, "fine")
    assert found.images.images.shape == (FEWEST_PICTURES + 1, 8, 6, 3)
    assert found.images.fine is not None
    assert found.images.fine.tolist() == [2] * FEWEST_PICTURES + [0]
    assert found.keys == (*range(1, FEWEST_PICTURES + 1), 104)
    assert found.by_people == 1
    assert found.left_out == {"damaged": 3, "other classes": 1}
    assert np.abs(found.images.images[0, 0, 0].astype(int) - [20, 0, 0]).max() <= 1


def test_a_picture_whose_bytes_have_changed_on_the_disk_is_left_out():
    sound = [kept(key, file(key * 20)) for key in range(1, FEWEST_PICTURES + 1)]
    _, picture, _ = kept(100, file(form="JPEG"))
    found = images_of([*sound, (100, picture, file(90, "JPEG"))], OWN, "fine")
    assert found.keys == tuple(range(1, FEWEST_PICTURES + 1))
    assert found.left_out == {"another file than its digest says": 1}


def test_a_superclass_is_learned_with_one_of_its_classes():
    rows = [kept(key, file(), coarse_label=key % 2) for key in range(FEWEST_PICTURES)]
    images = images_of(rows, OWN, "coarse").images
    assert images.coarse is not None
    assert images.coarse.tolist() == [key % 2 for key in range(FEWEST_PICTURES)]


def test_too_few_pictures_are_named_with_the_reasons():
    rows = [kept(1, file()), kept(2, file(), confidence=0.1), kept(3, b"?")]
    with pytest.raises(DataError, match=r"1 kept pictures.*unsure.*damaged"):
        images_of(rows, OWN, "fine")
