"""The files of others that the pages are made of."""

import hashlib
import re
from pathlib import Path

import pytest

import scheduler

VENDOR = Path(scheduler.__file__).parent / "web" / "vendor"
LICENCES = {"swagger": ("LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt"), "uplot": ("LICENSE",)}


@pytest.mark.parametrize("folder", sorted(LICENCES))
def test_the_files_of_others_are_unchanged_and_come_with_their_licences(folder: str) -> None:
    sums = [line.split() for line in (VENDOR / folder / "SHA256SUMS").read_text().splitlines()]
    served = [path.name for path in (VENDOR / folder).iterdir() if path.suffix in (".js", ".css")]
    assert sorted(name for _, name in sums) == sorted(served)
    for digest, name in sums:
        assert hashlib.sha256((VENDOR / folder / name).read_bytes()).hexdigest() == digest
    for name in LICENCES[folder]:
        assert (VENDOR / folder / name).stat().st_size


def test_styles_load_nothing_from_elsewhere() -> None:
    for styles in VENDOR.rglob("*.css"):
        assert re.findall(r"@import|url\((?!['\"]?data:)[^)]{0,40}", styles.read_text()) == []
