"""What Terrace is called where it is installed, and the commands that it tells people to type."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tierkit.distribution import DISTRIBUTION, command_for, install_command, installed_version

ROOT = Path(__file__).parents[3]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIG["project"]
PACKAGES = CONFIG["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
SOURCES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").rglob("*.md"),
    *filter(Path.is_file, (ROOT / "deploy").rglob("*")),
]


def origin(url: str, **facts: object) -> str:
    return json.dumps({"url": url, **facts})


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (None, "pip install 'terrace-inference[cpu,import]'"),
        (origin("file:///src/te", dir_info={"editable": True}), "pip install -e '/src/te[cpu,import]'"),
        (origin("file:///my%20src", dir_info={}), "pip install '/my src[cpu,import]'"),
        (origin("file:///a/t-0.1.0.whl", archive_info={}), "pip install '/a/t-0.1.0.whl[cpu,import]'"),
        (
            origin("https://example.org/t.whl", archive_info={}),
            "pip install 'terrace-inference[cpu,import] @ https://example.org/t.whl'",
        ),
    ],
)
def test_the_command_names_what_is_installed(direct_url: str | None, command: str) -> None:
    assert command_for(direct_url, ("cpu", "import")) == command


def test_the_distribution_is_the_one_of_the_project() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert installed_version() == PROJECT["version"]
    assert install_command().startswith("pip install ")


def test_every_hint_names_an_extra_of_the_project() -> None:
    hint = re.compile(r"(?:install_command|MissingExtra)\(\s*[\"'](\w+)[\"']")
    named = {extra for path in SOURCES for extra in hint.findall(path.read_text())}
    assert named
    assert named <= set(PROJECT["optional-dependencies"])


def test_no_page_and_no_message_installs_another_project() -> None:
    """Each `pip install` of ours names a checkout with extras that exist; none names `terrace`."""
    for path in [*SOURCES, *PAGES]:
        text = path.read_text(errors="replace")
        assert not re.search(r"pip install [^`\n]*\bterrace(?!-inference)\b(\[|['\" `]|$)", text), path
        for extras in re.findall(r"(?:'\.|/src)\[([\w,]+)\]", text):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), path
