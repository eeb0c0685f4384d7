"""Modules are imported without garbage collection, and free memory is known."""

import gc
import resource
from pathlib import Path

import pytest

from tierkit.memory import free_bytes, importing


def test_garbage_is_collected_again_after_an_import_and_after_one_that_fails() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_what_is_there_after_the_import_is_frozen_if_it_stays() -> None:
    before = gc.get_freeze_count()
    with importing(freeze=True):
        assert gc.get_freeze_count() == before
    assert gc.get_freeze_count() > before


def system(folder: Path, *, available_kb: int, groups: str = "", status: str = "") -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal:  16 kB\nMemAvailable:   {available_kb} kB\n")
    (folder / "self" / "cgroup").write_text(groups)
    (folder / "self" / "status").write_text(status)
    return folder


def group(folder: Path, limit: object, use: int, cache: int, *, old: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, use), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'total_' if old else ''}inactive_file {cache}\n")


def test_limits_of_the_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = system(tmp_path / "proc", available_kb=100, status="VmSize:  50 kB\nVmData:  20 kB\n")
    for data, size, free in ((30, 200, 10), (200, 60, 10), (10, 200, 0), (-1, -1, 100)):
        bounds = {resource.RLIMIT_DATA: data, resource.RLIMIT_AS: size}
        limits = {limit: 1024 * bound if bound >= 0 else resource.RLIM_INFINITY for limit, bound in bounds.items()}
        monkeypatch.setattr("resource.getrlimit", lambda which, limits=limits: (limits[which], limits[which]))
        assert free_bytes(proc, tmp_path / "none") == 1024 * free


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    proc, groups = system(tmp_path / "proc", available_kb=1000, groups="0::/outer/inner\n"), tmp_path / "groups"
    assert free_bytes(proc, groups) == 1_024_000  # a system without them
    group(groups / "outer" / "inner", "max", 10, 0)
    assert free_bytes(proc, groups) == 1_024_000
    group(groups / "outer", 9000, 5000, 500)
    assert free_bytes(proc, groups) == 4500
    group(groups / "outer" / "inner", 3000, 2500, 100)
    assert free_bytes(proc, groups) == 600
    group(groups / "outer" / "inner", 3000, 3500, 100)
    assert free_bytes(proc, groups) == 0


def test_limits_of_older_control_groups_and_of_containers_count(tmp_path: Path) -> None:
    lines = "3:cpu,memory:/docker/abc\n2:cpuset:/\n0::/\n"
    proc, groups = system(tmp_path / "proc", available_kb=1000, groups=lines), tmp_path / "groups"
    group(groups / "memory", 7000, 1000, 0, old=True)  # the only one that a container sees
    assert free_bytes(proc, groups) == 6000
    group(groups, 10, 5, 0)
    group(groups / "memory" / "docker" / "abc", 2**63 - 4096, 1000, 0, old=True)
    assert free_bytes(proc, groups) == 5


@pytest.mark.parametrize("content", [None, "", "MemAvailable: much"])
def test_memory_that_is_not_told_is_none(tmp_path: Path, content: str | None) -> None:
    proc = system(tmp_path / "proc", available_kb=1)
    (proc / "meminfo").unlink()
    if content is not None:
        (proc / "meminfo").write_text(content)
    assert free_bytes(proc, tmp_path) is None
