"""The documentation as a site: each page is in its menu, each link leads somewhere, and it builds without a warning."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))


def menu(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            yield from menu(value) if isinstance(value, list) else [value]


def test_each_page_is_in_the_menu_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(f"docs/{page}" for page in menu(nav)) == DOCS


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *DOCS])
def test_links_lead_somewhere(page: str) -> None:
    lost = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)", (ROOT / page).read_text(encoding="utf-8")):
        file, _, place = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        if not target.exists() or (place and place not in headings(target)):
            lost.append(link)
    assert lost == []


@pytest.mark.parametrize("page", DOCS)
def test_links_stay_in_the_site(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not ((ROOT / page).parent / link).resolve().is_relative_to(ROOT / "docs")] == []


def headings(page: Path) -> set[str]:
    """The places of a page that a link may name."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\- ]", "", title.strip().lower())) for title in titles}


def test_the_site_builds(tmp_path: Path) -> None:
    """The log is read because a build with a broken API reference ends well."""
    pytest.importorskip("zensical", reason="needs the extra 'docs'")
    for name in ("zensical.toml", "docs", "terrace", "tierkit"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    log = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    assert done.returncode == 0, log
    assert not re.search(r"error|warning|traceback|griffe:", log, re.IGNORECASE), log
    built = {
        page.relative_to(tmp_path / "site").with_suffix(".md").as_posix() for page in tmp_path.rglob("site/**/*.html")
    }
    assert {page.removeprefix("docs/") for page in DOCS} <= built
