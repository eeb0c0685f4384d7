"""What a host tells the scheduler of its workers: few bytes, however many segments there are."""

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from training.host.reporting import spans

pytestmark = pytest.mark.train


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((), ""),
        ((4,), "4"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 1, 3, 5, 6), "0-1, 3, 5-6"),
        (range(0, 1024, 2), "0, 2, 4, 6, 8, 10, 12, 14, ..."),
    ],
)
def test_numbers_are_told_as_spans_and_a_long_list_is_cut_short(numbers: tuple[int, ...], expected: str) -> None:
    assert spans(numbers) == expected
