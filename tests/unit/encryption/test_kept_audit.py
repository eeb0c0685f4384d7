"""An audit as it is kept: what is written is read again, and what is no audit is refused."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from encryption.audit.kept import ORIGINALS, RECORD, KeptAudit, keep_audit, read_audit, read_picture
from models.manifest import load_manifest, weights_folder
from tests.unit.encryption.test_audit_rows import LEARNED, ROW
from tierkit.errors import DataError, SetupError

AUDIT = KeptAudit(
    measured_at=datetime(2026, 1, 2, tzinfo=UTC), quick=True, heads={"a.conv1": "0" * 64}, rows=(ROW, LEARNED)
)
PICTURES = np.arange(20 * 4 * 6 * 3, dtype=np.uint32).reshape(20, 4, 6, 3).astype(np.uint8)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keep_audit(tmp_path / "privacy", AUDIT, PICTURES, [PICTURES[::-1], PICTURES[3:5]])
    return tmp_path / "privacy"


def test_an_audit_is_read_as_it_was_kept(folder: Path) -> None:
    assert read_audit(folder) == AUDIT
    shown = {name: pixels(folder / f"{name}.png") for name in (ORIGINALS, "0", "1")}
    assert np.array_equal(shown[ORIGINALS], np.concatenate(PICTURES[:8], axis=1))
    assert np.array_equal(shown["0"][:, :6], PICTURES[-1])
    assert shown["1"].shape == (4, 12, 3)
    assert read_picture(folder, "1") == (folder / "1.png").read_bytes()


def test_a_later_audit_takes_the_place_of_an_earlier_one(folder: Path) -> None:
    later = AUDIT.model_copy(update={"rows": (LEARNED,), "quick": False})
    keep_audit(folder, later, PICTURES, [PICTURES])
    assert read_audit(folder) == later


def test_without_its_pictures_an_audit_is_not_kept(folder: Path) -> None:
    (folder / "1.png").unlink()
    (folder / "1.png").mkdir()
    with pytest.raises(SetupError, match=r"1\.png"):
        keep_audit(folder, AUDIT, PICTURES, [PICTURES, PICTURES])
    assert read_audit(folder) is None


def test_there_need_be_none(tmp_path: Path) -> None:
    assert read_audit(tmp_path) is None
    assert read_audit(tmp_path / "missing") is None
    assert read_picture(tmp_path, ORIGINALS) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rows": []}', b"{" * 50_000, b" " * (2**20 + 1)])
def test_what_is_no_audit_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_bytes(content)
    with pytest.raises(DataError, match=RECORD):
        read_audit(tmp_path)


@pytest.mark.parametrize("wrong", [b"NaN", b"1.5", b"Infinity", b"null"])
def test_figures_that_cannot_be_measured_are_refused(wrong: bytes, folder: Path) -> None:
    content = (folder / RECORD).read_bytes()
    assert b'"ssim": 0.95' in content
    (folder / RECORD).write_bytes(content.replace(b'"ssim": 0.95', b'"ssim": ' + wrong))
    with pytest.raises(DataError, match=RECORD):
        read_audit(folder)


@pytest.mark.parametrize("content", [b"", b"<svg/>", b"\x89PNG\r\n\x1a\n" + bytes(8 * 2**20)])
def test_what_is_no_picture_is_not_given(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(content)
    assert read_picture(tmp_path, "0") is None


def test_the_audit_that_ships_is_of_the_encoders_that_ship() -> None:
    folder = weights_folder() / "privacy"
    audit = read_audit(folder)
    assert audit is not None
    assert audit.heads == {entry.name: entry.head.sha256 for entry in load_manifest().encoders}
    for name in (ORIGINALS, *map(str, range(len(audit.rows)))):
        assert pixels(folder / f"{name}.png").shape == (32, 8 * 32, 3)
