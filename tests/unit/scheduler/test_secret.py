"""The scheduler's secret: kept, private, and refused when it is damaged."""

from pathlib import Path

import pytest

from scheduler.store.secret import kept_secret
from tierkit.errors import SetupError


def test_the_secret_of_a_state_folder_stays_the_same(tmp_path: Path):
    (tmp_path / "noise.key.part").write_text("of a start that a crash cut short")
    secret = kept_secret(tmp_path)
    assert len(secret) == 32
    assert kept_secret(tmp_path) == secret
    (found,) = tmp_path.iterdir()
    assert found.stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").mkdir()
    assert kept_secret(tmp_path / "other") != secret


@pytest.mark.parametrize("content", ["", "ab", "no digits", "\xff"])
def test_a_damaged_one_is_refused(tmp_path: Path, content: str):
    (tmp_path / "noise.key").write_text(content, encoding="latin-1")
    with pytest.raises(SetupError, match=r"noise\.key is damaged: remove it, and a new one is made"):
        kept_secret(tmp_path)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(SetupError, match=r"cannot use .*noise\.key: No such file"):
        kept_secret(tmp_path / "nowhere")
