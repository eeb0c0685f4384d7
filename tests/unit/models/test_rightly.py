"""The pictures that a newcomer sees first."""

from __future__ import annotations

import numpy as np

from models.data import read_sample
from models.manifest import load_manifest, weights_folder
from models.rightly import find_rightly, read_rightly, right_first

AGAIN = "run: python -m models.rightly"


def test_the_first_pictures_are_answered_rightly_by_the_networks_that_ship() -> None:
    manifest = load_manifest()
    networks, listed = read_rightly()
    assert networks == {entry.name: entry.sha256 for entry in manifest.models}, AGAIN
    some = np.arange(60)
    found = find_rightly(read_sample().take(some), manifest, weights_folder())
    assert found == [number for number in listed if number < 60], AGAIN


def test_each_picture_comes_once_the_right_ones_first() -> None:
    _, listed = read_rightly()
    assert 500 < len(listed) < 800
    assert right_first(10).tolist() == listed[:10]
    every = right_first(1000)
    assert every[: len(listed)].tolist() == listed
    assert sorted(every) == list(range(1000))
