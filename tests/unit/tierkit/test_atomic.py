"""Files are replaced whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from tierkit.atomic import replace_file, write_atomically, write_new
from tierkit.errors import SetupError


def test_content_replaces_the_old(tmp_path: Path):
    path = tmp_path / "new" / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if call == "fsync" else Path, call, fail)
    with pytest.raises(SetupError, match="No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_of_the_writer_passes_through_and_leaves_no_trace(tmp_path: Path):
    def write_half() -> None:
        with replace_file(tmp_path / "file") as handle:
            handle.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert os.listdir(tmp_path) == []


def test_a_new_file_never_replaces_another(tmp_path: Path):
    assert write_new(tmp_path, "net.onnx", b"first") == "net.onnx"
    second = write_new(tmp_path, "net.onnx", b"second")
    assert second not in ("net.onnx", "")
    assert (tmp_path / "net.onnx").read_bytes() == b"first"
    assert (tmp_path / second).read_bytes() == b"second"
    assert write_new(tmp_path, "net.onnx", b"first") == "net.onnx"
    assert write_new(tmp_path, "net.onnx", b"second") == second
    assert len(list(tmp_path.iterdir())) == 2
