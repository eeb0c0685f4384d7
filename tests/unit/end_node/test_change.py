"""The measure of change between pictures."""

import io

import numpy as np
import pytest
from PIL import Image

from end_node.sources.change import ChangeFilter, grey_of_file


def grey(value: int) -> np.ndarray:
    return np.full((32, 32), value, np.uint8)


def test_a_slow_change_adds_up_until_it_counts() -> None:
    change = ChangeFilter(0.1)
    passed = [value for value in range(0, 256, 5) if change.differs(grey(value))]
    # Each one is compared with the last that passed: 25.5 steps of brightness are a tenth of the range.
    assert passed == list(range(0, 256, 30))


def test_without_a_threshold_every_picture_passes() -> None:
    change = ChangeFilter(0.0)
    assert not change.active
    assert change.differs(grey(1))
    assert change.differs(grey(1))


def test_a_picture_that_cannot_be_read_passes_and_is_not_compared_with() -> None:
    change = ChangeFilter(0.5)
    assert change.differs(grey(0))
    assert change.differs(None)
    assert not change.differs(grey(1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_grey_version_of_a_file(kind: str, mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (640, 480), "white").save(file, kind)
    found = grey_of_file(file.getvalue())
    assert found is not None
    assert found.shape == (32, 32)
    assert found.min() >= 250
    assert grey_of_file(file.getvalue()[:60]) is None
