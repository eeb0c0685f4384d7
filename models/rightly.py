"""Pictures of the bundled sample that all networks of Terrace answer correctly; a newcomer sees them first.

They do not measure accuracy: about 60 % of the sample are answered correctly by all. `python -m models.rightly` writes
the list again when other networks ship.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from models.data import ImageSet, read_sample
from models.evaluate import logits_of
from models.hierarchy import bundled_hierarchy
from models.manifest import Manifest, load_manifest, weights_folder
from models.session import load_model
from tierkit.atomic import write_atomically
from tierkit.tensors import Array

__all__ = ["LISTED", "find_rightly", "read_rightly", "right_first"]

LISTED = Path(__file__).parent / "samples" / "rightly.json"


def read_rightly() -> tuple[dict[str, str], list[int]]:
    """The networks by name with their sha256, and the numbers of the pictures that all of them answer rightly."""
    kept = json.loads(LISTED.read_text(encoding="utf-8"))
    return kept["networks"], kept["pictures"]


def right_first(count: int) -> Array:
    """Numbers of `count` pictures of the sample, int64 `[count]`: first the pictures that are answered correctly, then
    the others, both in the order of the sample.
    """
    _, rightly = read_rightly()
    others = np.setdiff1d(np.arange(len(read_sample())), rightly)
    return np.concatenate([np.array(rightly, np.int64), others])[:count]


def find_rightly(sample: ImageSet, manifest: Manifest, folder: Path) -> list[int]:
    """Numbers of the pictures that every network of a model set answers rightly, each by its own kind of classes."""
    hierarchy = bundled_hierarchy(sample.hierarchy_name)
    right = np.ones(len(sample), bool)
    for entry in manifest.models:
        logits, _ = logits_of(load_model(entry, folder, labels=manifest.labels(entry)), sample.images)
        truth = sample.fine if logits.shape[1] == len(hierarchy.fine) else sample.coarse
        right &= logits.argmax(axis=1) == truth
    return np.flatnonzero(right).tolist()


def main() -> None:
    manifest = load_manifest()
    pictures = find_rightly(read_sample(), manifest, weights_folder())
    networks = {entry.name: entry.sha256 for entry in manifest.models}
    write_atomically(LISTED, (json.dumps({"networks": networks, "pictures": pictures}) + "\n").encode())


if __name__ == "__main__":
    main()
