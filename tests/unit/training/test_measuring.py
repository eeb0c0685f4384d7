"""What a worker tells of its machine."""

import resource
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


def test_limits_of_the_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo, status = tmp_path / "meminfo", tmp_path / "status"
    meminfo.write_text("MemAvailable:   100 kB\n")
    status.write_text("VmSize:  50 kB\nVmData:  20 kB\n")
    monkeypatch.setattr("training.measuring._STATUS", status)
    for data, size, free in ((30, 200, 10), (200, 60, 10), (10, 200, 0), (-1, -1, 100)):
        bounds = {resource.RLIMIT_DATA: data, resource.RLIMIT_AS: size}
        limits = {limit: 1024 * bound if bound >= 0 else resource.RLIM_INFINITY for limit, bound in bounds.items()}
        monkeypatch.setattr("resource.getrlimit", lambda which, limits=limits: (limits[which], limits[which]))
        assert free_bytes("cpu", meminfo) == 1024 * free


@pytest.mark.parametrize("content", [None, "", "MemAvailable: much"])
def test_memory_that_is_not_told_is_none(tmp_path: Path, content: str | None) -> None:
    meminfo = tmp_path / "meminfo"
    if content is not None:
        meminfo.write_text(content)
    assert free_bytes("cpu", meminfo) is None
