"""Training images of the pictures that a device has kept, labelled by people or by the tiers above."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.kept.sample import KeptPicture
from models.kept.store import KeptStore
from models.pictures.decode import decoder
from tierkit.errors import DataError, TerraceError
from tierkit.tensors import Array
from training.own_data import OwnData

__all__ = ["FEWEST_PICTURES", "Gathering", "KeptImages", "images_of", "label_of", "read_kept"]

FEWEST_PICTURES = 8
"""A device with fewer learns them by heart."""
_MOST_BYTES = 512 << 20
"""Bound on the decoded pixels in memory: 2,700 pictures of 256 x 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptImages:
    """Pictures that can be trained on."""

    images: ImageSet
    by_people: int
    """Number of labels that people gave."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of the other pictures, by the reason."""
    keys: tuple[int, ...] = ()
    """Keys of the pictures in the kept sample."""


def label_of(picture: KeptPicture, hierarchy: Hierarchy, target: str, least_confidence: float) -> int | str:
    """Return the class to learn for a kept picture: a person's label, or the answer from above. Otherwise return the
    reason why there is none.

    Args:
        target: "fine" or "coarse", whose index is meant.
        least_confidence: of an answer from above.
    """
    if picture.classes != hierarchy.digest:
        return "other classes"
    classes = len(hierarchy.labels(target))
    if picture.person is not None:
        if not 0 <= picture.person < len(hierarchy.fine):
            return "other classes"
        return picture.person if target == "fine" else hierarchy.parent[picture.person]
    found, confidence = (
        (picture.label, picture.confidence) if target == "fine" else (picture.coarse_label, picture.coarse_confidence)
    )
    if found is None or not 0 <= found < classes:
        return "other classes"
    # Written so that NaN is refused as well.
    if confidence is None or not least_confidence <= confidence <= 1:
        return "unsure answers from above"
    return found


def read_kept(folder: Path) -> Iterator[tuple[int, KeptPicture, bytes]]:
    """Key, picture and file of all pictures that a device has kept in a folder, the oldest first.

    Raises:
        SetupError: there is no kept sample, or it cannot be read.
        SpoolUnavailable: the disk fails.
    """
    with closing(KeptStore.reading(folder)) as store:
        yield from store.read_all()


class Gathering:
    """Makes training images of kept pictures, one after the other. If they are too many for the memory, the newest
    count.

    Args:
        own: the network that takes them.
        target: "fine" or "coarse".

    Raises:
        DataError: the classes of `own` contradict themselves.
    """

    def __init__(self, own: OwnData, target: str) -> None:
        self.classes = own.classes
        self._own, self._target = own, target
        self._decode, self._never = decoder(own.fit), threading.Event()
        most = max(FEWEST_PICTURES, _MOST_BYTES // (own.height * own.width * 3))
        self._found: deque[tuple[int, Array, int, bool]] = deque(maxlen=most)
        self._left_out: Counter[str] = Counter()

    def add(self, key: int, picture: KeptPicture, content: bytes) -> None:
        """Take a picture, or count it as left out."""
        if hashlib.sha256(content).hexdigest() != picture.sha256:
            self.leave_out("another file than its digest says")
            return
        label = label_of(picture, self.classes, self._target, self._own.least_confidence)
        if isinstance(label, str):
            self.leave_out(label)
            return
        try:
            pixels = self._decode(content, self._never)
        except TerraceError:
            self.leave_out("damaged")
            return
        if len(self._found) == self._found.maxlen:
            self.leave_out("more than fit into memory")
        self._found.append((key, pixels, label, picture.person is not None))

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count pictures that cannot be trained on."""
        self._left_out[reason] += count

    def images(self) -> KeptImages:
        """The training images of all pictures.

        Raises:
            DataError: fewer than `FEWEST_PICTURES` can be trained on.
        """
        found, hierarchy = self._found, self.classes
        if len(found) < FEWEST_PICTURES:
            why = "".join(f"; {count:,} left out: {reason}" for reason, count in (+self._left_out).items())
            raise DataError(
                f"{len(found):,} kept pictures can be trained on, and a device needs {FEWEST_PICTURES} at least{why}"
            )
        labels = np.array([label for _, _, label, _ in found], np.int64)
        fine = labels if self._target == "fine" else _first_members(hierarchy)[labels]
        images = ImageSet(
            images=np.stack([pixels for _, pixels, _, _ in found]),
            fine=fine,
            coarse=hierarchy.coarse_labels(fine),
            names=tuple(str(key) for key, _, _, _ in found),
            hierarchy_name=hierarchy.name,
        )
        return KeptImages(
            images=images,
            by_people=sum(person for *_, person in found),
            left_out=dict(+self._left_out),
            keys=tuple(key for key, *_ in found),
        )


def images_of(kept: Iterable[tuple[int, KeptPicture, bytes]], own: OwnData, target: str) -> KeptImages:
    """The kept pictures as the network takes them; see `Gathering`.

    Args:
        kept: key, picture and file, the oldest first.
        target: "fine" or "coarse".

    Raises:
        DataError: fewer than `FEWEST_PICTURES` can be trained on; or the classes of `own` contradict themselves.
    """
    gathering = Gathering(own, target)
    for each in kept:
        gathering.add(*each)
    return gathering.images()


def _first_members(hierarchy: Hierarchy) -> Array:
    """A class of each superclass, int64 `[C]`: it stands for the others where only the superclass is learned."""
    return np.array([hierarchy.parent.index(coarse) for coarse in range(len(hierarchy.coarse))], np.int64)
