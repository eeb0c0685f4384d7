"""How the plot tells its lines apart."""

import pytest

from experiments.bench.plot import _colours


@pytest.mark.parametrize("count", [1, 4, 25])
def test_each_percentile_has_a_colour_of_its_own(count: int) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots' is not installed")
    assert len(set(_colours(count))) == count
