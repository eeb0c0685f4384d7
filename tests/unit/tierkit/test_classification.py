"""The classification extension's text form."""

import numpy as np
import pytest

from tierkit.errors import InvalidInput
from tierkit.inference.endpoints.classification import best_classes


def test_best_first_and_the_lower_index_first_among_equals() -> None:
    scores = np.array([[0.1, 0.7, 0.7, 0.2], [1, 2, 3, 4]], np.float32)
    assert best_classes("y", scores, 3).tolist() == [
        [b"0.700000:1", b"0.700000:2", b"0.200000:3"],
        [b"4.000000:3", b"3.000000:2", b"2.000000:1"],
    ]


def test_labels_and_more_than_there_are() -> None:
    texts = best_classes("y", np.array([[2.5, -1]], np.float32), 9, ("cat", "süß"))
    assert texts.tolist() == [[b"2.500000:0:cat", "-1.000000:1:süß".encode()]]


def test_unsigned_scores_are_ordered_as_numbers() -> None:
    assert best_classes("y", np.array([[3, 255, 0]], np.uint8), 2).tolist() == [[b"255.000000:1", b"3.000000:0"]]


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3)])
def test_an_output_without_a_class_axis_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="no class axis"):
        best_classes("y", np.zeros(shape), 1)
