"""The newest pictures that a scheduler has with labels or answers from above: networks are compared on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from models.hierarchy import Hierarchy
from models.manifest import ModelEntry
from models.pictures.decode import decoder
from tierkit.client import Client
from tierkit.errors import InvalidInput, NotFound
from tierkit.tensors import Array
from tierkit.wire.sources import SeenPicture
from training.improve.successor import ComparedOn

__all__ = ["MOST_PICTURES", "newest_answers"]

MOST_PICTURES = 400
_MOST_LOOKED_AT = 4_000
"""Observations, most of which may have no picture."""
_PAGE = 100


def newest_answers(client: Client, entry: ModelEntry, hierarchy: Hierarchy, least_confidence: float) -> ComparedOn:
    """Pictures as a network takes them. The label is what a person said, otherwise the answer from above. Damaged
    pictures are left out.

    Args:
        hierarchy: of the network.
        least_confidence: of an answer from above that counts.
    """
    decode, never = decoder(entry.fit), threading.Event()
    pixels: list[Array] = []
    labels: list[int] = []
    by_people: list[bool] = []
    for seen in _seen(client):
        label = _label(seen, entry, hierarchy, least_confidence) if seen.picture else None
        if label is None:
            continue
        try:
            pixels.append(decode(client.picture(seen.node, seen.source, seen.sequence), never))
        except (NotFound, InvalidInput):  # it was deleted meanwhile, or is damaged
            continue
        labels.append(label)
        by_people.append(seen.person is not None)
        if len(labels) == MOST_PICTURES:
            break
    images = np.stack(pixels) if pixels else np.zeros((0, *entry.input_shape), np.uint8)
    return ComparedOn(images=images, labels=np.array(labels, np.int64), by_people=np.array(by_people, bool))


def _label(seen: SeenPicture, entry: ModelEntry, hierarchy: Hierarchy, least_confidence: float) -> int | None:
    """The class that a person named, otherwise the sure answer from above; None without either."""
    if seen.person is None:
        return _answer(seen, entry, least_confidence)
    if seen.person not in hierarchy.fine:
        return None
    fine = hierarchy.fine.index(seen.person)
    return fine if entry.target == "fine" else hierarchy.parent[fine]


def _answer(seen: SeenPicture, entry: ModelEntry, least_confidence: float) -> int | None:
    """The class from above; None if there is no sure one."""
    if seen.fine is None:
        return None
    index, confidence = (
        (seen.fine.index, seen.fine.confidence)
        if entry.target == "fine"
        else (seen.fine.coarse_index, seen.fine.coarse_confidence)
    )
    # Written so that NaN is refused as well.
    if confidence is None or not least_confidence <= confidence <= 1 or not 0 <= index < entry.classes:
        return None
    return index


def _seen(client: Client) -> Iterator[SeenPicture]:
    """The newest observations."""
    cursor = None
    for _ in range(0, _MOST_LOOKED_AT, _PAGE):
        page = client.observation_page(limit=_PAGE, cursor=cursor)
        yield from page.observations
        cursor = page.next_cursor
        if cursor is None:
            return
