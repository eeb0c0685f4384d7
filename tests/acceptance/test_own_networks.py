"""`docs/get-started/own-networks.md` as a new user follows it: the five commands, then the other examples."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.fleets import running
from tests.acceptance.test_docs import ROOT, blocks, run
from tests.model_sets import colour_network, wide_picture
from tierkit.client import DEFAULT_URL

PAGE = "docs/get-started/own-networks.md"
CLASSES = {"red": "poppy", "green": "fern", "blue": "cornflower"}
"""What the networks see is the colour that a picture has most of."""
UP = "terrace up "
SUFFIXES = ("jpg", "tif", "png", "gif", "bmp", "webp")


def five_commands(page: str) -> list[str]:
    """The first ones of a page that are shown with a prompt, from the first import on."""
    shown = re.findall(r"^\$ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    first = next(number for number, command in enumerate(shown) if command.startswith("terrace models import"))
    return shown[first : first + 5]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user brings along."""
    folder = tmp_path_factory.mktemp("own")
    colour_network(folder / "small.onnx", size=96, factor=5)
    colour_network(folder / "large.onnx", size=160, factor=20)
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in CLASSES.values()))
    (folder / "small.toml").write_text("size = [96, 96]\n")
    (folder / "large.toml").write_text("size = [160, 160]\nresize_to = 180\n")
    for number, suffix in enumerate(SUFFIXES, 1):
        colour = list(CLASSES)[number % 3]
        path = folder / "photographs" / f"{number}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        form = {"jpg": "JPEG", "tif": "TIFF"}.get(suffix, suffix.upper())
        path.write_bytes(wide_picture(colour, form, (500, 375), edges="white"))
        labelled = folder / "labelled" / CLASSES[colour] / path.name
        labelled.parent.mkdir(parents=True, exist_ok=True)
        labelled.write_bytes(path.read_bytes())
    (folder / "photographs" / "notes.txt").write_text("by whom, and where")
    return folder


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def fleet(
    workplace: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The environment of a second terminal, once the commands up to `terrace up` have been followed."""
    state = tmp_path_factory.mktemp("state")
    before = os.getcwd()
    os.chdir(workplace)
    try:
        for command in five_commands(PAGE):
            if command.startswith(UP):
                break
            run(["bash", "-euc", command], environment)
        arguments = shlex.split(command.removeprefix(UP))
        with running(*arguments, "--port", "0", "--state", str(state / "state"), log=state / "log") as up:
            url = re.search(r"scheduler  (http://\S+)", up.output)
            assert url is not None
            yield {**environment, "TERRACE_SCHEDULER": url[1]}
            up.process.terminate()
            up.process.wait(timeout=30)
    finally:
        os.chdir(before)


@pytest.mark.timeout(180)
def test_five_commands_answer_photographs(workplace: Path, fleet: dict[str, str]) -> None:
    commands = five_commands(PAGE)
    shown = ""
    for command in commands[[text.startswith(UP) for text in commands].index(True) + 1 :]:
        done = subprocess.run(["bash", "-euc", command], env=fleet, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        shown = done.stdout
    assert shown == (workplace / "answers.csv").read_text()
    answers = list(csv.DictReader(shown.splitlines()))
    colours = [list(CLASSES)[number % 3] for number in range(1, len(SUFFIXES) + 1)]
    assert [answer["name"] for answer in answers] == [f"{n}.{suffix}" for n, suffix in enumerate(SUFFIXES, 1)]
    for column in ("coarse_label", "fine_label"):
        assert [answer[column] for answer in answers] == [CLASSES[colour] for colour in colours]
    assert {answer["answered_by"] for answer in answers} == {"cloud"}
    assert {answer["resized_from"] for answer in answers} == {"500x375"}


@pytest.mark.timeout(180)
def test_the_other_examples_run(fleet: dict[str, str]) -> None:
    found = [*blocks(PAGE), *blocks("docs/how-to/import.md")]
    shell = "".join(text for language, text in found if language == "sh")
    run(["bash", "-euo", "pipefail", "-x", "-c", shell.replace(DEFAULT_URL, fleet["TERRACE_SCHEDULER"])], fleet)
    for language, text in found:
        if language == "python":
            program = text.replace(DEFAULT_URL, fleet["TERRACE_SCHEDULER"])
            run([sys.executable, "-W", "error", "-c", program], fleet)


def test_the_readme_shows_the_same_commands() -> None:
    assert five_commands("README.md") == five_commands(PAGE)
