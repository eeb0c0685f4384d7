"""`docs/how-to/releases.md` as it is written: import, canary, promotion, a worse release, return, clean-up."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from models.manifest import load_manifest
from tests.acceptance.fleets import running
from tests.acceptance.test_docs import ROOT, blocks, commands, run
from tests.model_sets import COLOURS, colour_network, coloured
from tierkit.client import DEFAULT_URL, Client

PAGE = "docs/how-to/releases.md"
CLASSES = ("poppy", "fern", "cornflower")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a user brings along: a network that is as good as the present one, and one that answers one class."""
    monkeypatch.chdir(tmp_path)
    for folder in ("better", "careless"):
        (tmp_path / folder).mkdir()
    colour_network(tmp_path / "small.onnx", size=96, factor=5)
    colour_network(tmp_path / "large.onnx", size=160, factor=20)
    colour_network(tmp_path / "better" / "small.onnx", size=96, factor=20)
    colour_network(tmp_path / "careless" / "small.onnx", size=96, weights=(0.01, 1.0, 0.01))
    (tmp_path / "labels.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    for name, content in pictures(12).items():
        path = tmp_path / "photographs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def pictures(count: int) -> dict[str, bytes]:
    """PNG files by name, of all colours in turn."""
    files = {}
    for number in range(count):
        file = io.BytesIO()
        Image.fromarray(coloured(COLOURS[number % 3], 180, strength=100 + number)).save(file, "PNG")
        files[f"{number:02}.png"] = file.getvalue()
    return files


@contextmanager
def work(url: str) -> Iterator[list[set[str]]]:
    """Jobs of many small tasks, one after another; gives the sha256 that gave the first answers of each job."""
    ended, seen = threading.Event(), []
    files = pictures(60)

    def submit() -> None:
        with Client(url) as client:
            while not ended.is_set():
                job = client.wait(client.submit(files, scheme="end-cloud", batch_size=1), budget_s=60)
                results = list(client.results(job))
                assert all(result.coarse and result.fine for result in results)
                seen.append({result.coarse.sha256 for result in results if result.coarse})

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@pytest.mark.timeout(600)
def test_the_how_to_works_as_written(workplace: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(workplace),
        "COLUMNS": "200",
    }
    headings = re.findall(r"^## (.*)$", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE)
    lines = [line for heading in headings for line in commands(PAGE, heading)]
    shown: dict[str, list[str]] = {}

    def call(line: str, *, code: int = 0, budget_s: float = 100) -> str:
        done = subprocess.run(["bash", "-euc", line], env=environment, capture_output=True, text=True, timeout=budget_s)
        assert done.returncode == code, f"{line}\n{done.stdout}\n{done.stderr}"
        shown.setdefault(line, []).append(done.stdout)
        return done.stdout

    start = next(number for number, line in enumerate(lines) if line.startswith("terrace up "))
    for line in lines[:start]:
        call(line)
    old = load_manifest(workplace / "flowers").default_for("end").sha256
    arguments = lines[start].split()[2:]
    with running(*arguments, "--port", "0", log=workplace / "log") as up:
        found = re.search(r"scheduler  (http://\S+)", up.output)
        assert found is not None
        environment["TERRACE_SCHEDULER"] = url = found[1]
        for line in lines[start + 1 :]:
            if "--for 2h --follow" not in line:
                call(line)
                continue
            careless = load_manifest(workplace / "flowers").default_for("end").sha256
            with work(url) as jobs:
                out = call(line, code=1, budget_s=300)
        assert "rolled back: The trial failed. agreement:" in out
        assert {frozenset(job) for job in jobs} >= {frozenset({careless})}
        assert all(len(job) == 1 for job in jobs), "each job is answered by one network"
        assert_shown(shown)
        with Client(url) as client:
            releases = client.releases()
            states = {release.release: release.state for release in releases.releases}
            assert states == {"flowers@1": "in force", "flowers@3": "rolled back"}
            assert {network.sha256 for network in client.release("1").networks if network.tier == "end"} == {old}
        for language, text in blocks(PAGE):
            assert language == "python"
            run([sys.executable, "-W", "error", "-c", text.replace(DEFAULT_URL, url)], environment)
        examined = json.loads(call("terrace doctor --models flowers --json", code=1))["checks"]
        (check,) = [check for check in examined if check["name"] == "model set"]
        assert "terrace models release promote flowers@3" in check["advice"]
        up.process.terminate()
        up.process.wait(timeout=30)


def assert_shown(shown: dict[str, list[str]]) -> None:
    """What the commands printed."""

    def of(command: str) -> list[str]:
        return shown[f"terrace {command}"]

    at_first, at_the_end = of("models release list")
    assert at_first.splitlines()[2].split()[:4] == ["flowers@1", "in", "force", "5"]
    assert [line.split()[0] for line in at_the_end.splitlines()[2:]] == ["flowers@3", "flowers@2", "flowers@1"]
    made = of("models release create flowers --models flowers")
    assert [out.split(":")[0] for out in made] == ["flowers@2", "flowers@3"]
    (changed,) = of("models release diff flowers@1 flowers@2")
    assert "other weights" in changed
    assert "large" not in changed
    (trial,) = of("models release show flowers@2")
    assert "(1 device)" in trial
    assert "of 2 h" in trial
    assert [name for name in ("agreement", "p99", "errors") if f"\n{name}" in trial] == ["agreement", "p99", "errors"]
    for number in (1, 2):
        (answered,) = of(f"classify photographs/ --release flowers@{number}")
        assert f"with flowers@{number}  completed" in answered
    (answered,) = of("classify photographs/")
    assert "with flowers@2  completed" in answered
    (promoted,) = of("models release promote flowers@2 --follow")
    assert "flowers@2  done" in promoted
    (returned,) = of("models release rollback --follow")
    assert "flowers@1  done" in returned
    (would,) = of("models release prune")
    assert would.startswith("would remove flowers@2, and 1 network")
    (removed,) = of("models release prune --yes")
    assert removed.startswith("removed flowers@2, and 1 network")
