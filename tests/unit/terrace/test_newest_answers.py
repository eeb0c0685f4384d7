"""Pictures with answers from above, for comparing two networks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from PIL import Image

from models.hierarchy import Hierarchy
from models.manifest import Manifest, ModelEntry, load_manifest
from terrace.newest_answers import MOST_PICTURES, newest_answers
from tests.model_sets import colour_network, colour_set, coloured
from tierkit.client import Client
from tierkit.errors import NotFound
from tierkit.types import Tier
from tierkit.wire.api import FineAnswer
from tierkit.wire.sources import ObservationPage, SeenPicture


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder: Path = tmp_path_factory.mktemp("models")
    return load_manifest(colour_set(folder / "set", {"end": colour_network(folder / "end.onnx")}))


@pytest.fixture
def entry(manifest: Manifest) -> ModelEntry:
    return manifest.default_for("end")


@pytest.fixture
def hierarchy(manifest: Manifest) -> Hierarchy:
    return manifest.hierarchy


def seen(sequence: int, *, picture: bool = True, answered: bool = True, **changes: Any) -> SeenPicture:
    given = {"index": 2, "confidence": 0.9, "coarse_index": 2, "coarse_confidence": 0.9, **changes}
    fine = FineAnswer(label="blue", coarse_label="blue", node="edge-1", tier=Tier.EDGE, **given)
    return SeenPicture(node="end-1", source="door", sequence=sequence, picture=picture, fine=fine if answered else None)


def png() -> bytes:
    written = io.BytesIO()
    Image.fromarray(coloured("blue")).save(written, "PNG")
    return written.getvalue()


def scheduler(pages: list[list[SeenPicture]], file: Any) -> Client:
    client = mock.create_autospec(Client, instance=True)
    found = [
        ObservationPage(observations=tuple(page), next_cursor=str(number) if number < len(pages) else None)
        for number, page in enumerate(pages, start=1)
    ]
    client.observation_page.side_effect = found
    client.picture.side_effect = file
    return client  # type: ignore[no-any-return]


WRONG: list[dict[str, Any]] = [
    {"picture": False},
    {"answered": False},
    {"confidence": 0.4, "coarse_confidence": 0.4},
    {"confidence": float("nan"), "coarse_confidence": float("nan")},
    {"confidence": 1.5, "coarse_confidence": 1.5},
    {"index": 3, "coarse_index": 3},
    {"index": -1, "coarse_index": -1},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_only_sure_answers_to_pictures_count(wrong: dict[str, Any], entry: ModelEntry, hierarchy: Hierarchy) -> None:
    client = scheduler([[seen(3, **wrong)], [seen(2)], [seen(1)]], lambda *place: png())
    found = newest_answers(client, entry, hierarchy, 0.5)
    assert found.labels.tolist() == [2, 2]
    assert found.images[:].shape == (2, 32, 32, 3)


def test_damaged_and_deleted_pictures_are_left_out(entry: ModelEntry, hierarchy: Hierarchy) -> None:
    files = [b"damaged", NotFound("gone"), png()]
    client = scheduler([[seen(3), seen(2), seen(1)]], files)
    assert newest_answers(client, entry, hierarchy, 0.5).labels.tolist() == [2]


def test_no_more_pictures_are_fetched_than_are_compared(entry: ModelEntry, hierarchy: Hierarchy) -> None:
    client = scheduler([[seen(number) for number in range(1, MOST_PICTURES + 50)]], lambda *place: png())
    assert len(newest_answers(client, entry, hierarchy, 0.5).labels) == MOST_PICTURES
    assert client.picture.call_count == MOST_PICTURES  # type: ignore[attr-defined]
    assert len(newest_answers(scheduler([[]], None), entry, hierarchy, 0.5).images) == 0


def test_the_label_of_a_person_counts_more_than_the_answer(entry: ModelEntry, hierarchy: Hierarchy) -> None:
    red = {"person": hierarchy.fine[0]}
    pictures = [
        seen(4).model_copy(update=red),
        seen(3, answered=False).model_copy(update=red),
        seen(2, picture=False).model_copy(update=red),
        seen(1).model_copy(update={"person": "no class"}),
    ]
    client = scheduler([pictures], lambda *place: png())
    assert newest_answers(client, entry, hierarchy, 0.5).labels.tolist() == [0, 0]
    coarse = Hierarchy(name="turned", fine=hierarchy.fine, coarse=hierarchy.coarse, parent=hierarchy.parent[::-1])
    client = scheduler([pictures], lambda *place: png())
    expected = [0, 0] if entry.target == "fine" else [coarse.parent[0]] * 2
    assert newest_answers(client, entry, coarse, 0.5).labels.tolist() == expected
