"""What a worker tells of its machine."""

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from training.measuring import free_bytes, gflops

pytestmark = pytest.mark.train


def test_a_machine_has_a_speed_and_free_memory() -> None:
    assert gflops("cpu") > 0
    free = free_bytes("cpu")
    assert free is None or free > 0
