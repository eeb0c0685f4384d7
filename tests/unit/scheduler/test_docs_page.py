"""The files of others that the page at /docs is made of."""

import hashlib
import re
from pathlib import Path

import scheduler

FOLDER = Path(scheduler.__file__).parent / "web" / "vendor" / "swagger"


def test_the_files_of_others_are_unchanged() -> None:
    sums = [line.split() for line in (FOLDER / "SHA256SUMS").read_text().splitlines()]
    assert sorted(name for _, name in sums) == ["swagger-ui-bundle.js", "swagger-ui.css"]
    for digest, name in sums:
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest


def test_they_come_with_their_licences() -> None:
    for name in ("LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt"):
        assert (FOLDER / name).stat().st_size


def test_styles_load_nothing_from_elsewhere() -> None:
    styles = (FOLDER / "swagger-ui.css").read_text()
    assert re.findall(r"@import|url\((?!['\"]?data:)[^)]{0,40}", styles) == []
