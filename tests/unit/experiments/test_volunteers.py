"""The segments that the machines of the table `volunteers` have."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from experiments.training.volunteers import segments_of

pytestmark = pytest.mark.train

LABELS = np.random.default_rng(0).integers(0, 10, 1_000)


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize(("machines", "held"), [(1, 1), (4, 1), (4, 2), (3, 3)])
def test_all_segments_are_with_some_machine(machines: int, held: int, by_class: bool) -> None:
    found = segments_of(LABELS, machines=machines, held=held, by_class=by_class)
    assert len(found) == machines
    assert set(np.concatenate(found)) == set(range(1_000))
    assert all(len(set(each)) == len(each) for each in found)


def test_neighbours_share_a_segment_and_others_nothing() -> None:
    sets = [set(each) for each in segments_of(LABELS, machines=4, held=2, by_class=False)]
    assert [len(each & other) for each, other in pairwise(sets)] == [200, 200, 200]
    assert not sets[0] & sets[2]
    alone = segments_of(LABELS, machines=4, held=1, by_class=False)
    assert sum(map(len, alone)) == 1_000


def test_segments_by_class_have_few_classes() -> None:
    found = segments_of(LABELS, machines=5, held=1, by_class=True)
    assert max(len(set(LABELS[each])) for each in found) <= 4
