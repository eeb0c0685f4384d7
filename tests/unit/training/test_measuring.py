"""What a worker tells of its machine."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from training.measuring import free_bytes, gflops

pytestmark = pytest.mark.train


def test_a_machine_has_a_speed_and_free_memory(tmp_path: Path) -> None:
    assert gflops("cpu") > 0
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  16 kB\nMemAvailable:   3 kB\n")
    assert free_bytes("cpu", meminfo) == 3072


@pytest.mark.parametrize("content", [None, "", "MemAvailable: much"])
def test_memory_that_is_not_told_is_none(tmp_path: Path, content: str | None) -> None:
    meminfo = tmp_path / "meminfo"
    if content is not None:
        meminfo.write_text(content)
    assert free_bytes("cpu", meminfo) is None
