"""`docs/get-started/self-improving.md` as written: dark pictures, kept and labelled, and a network that learns."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.manifest import load_manifest
from tests.acceptance.fleets import running
from tests.acceptance.test_docs import ROOT, commands
from tierkit.client import AsyncClient, Client
from tierkit.http.address import free_port
from tierkit.testing import wait_for
from tierkit.types import Tier
from tierkit.wire.sources import SeenPicture

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]

PAGE = "docs/get-started/self-improving.md"
FILES = {"toml": ["fleet.toml"], "python": ["prepare.py", "label.py"]}
DEVICES, PICTURES = 3, 600


def furnish(folder: Path, text: str) -> None:
    """Write the files that the page shows."""
    for language, names in FILES.items():
        contents = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert [name in text for name in names] == [True] * len(contents)
        for name, content in zip(names, contents, strict=True):
            (folder / name).write_text(content)


async def answered(url: str) -> None:
    """Wait until all pictures have their answers, and the scheduler has heard what the devices keep."""
    async with AsyncClient(url) as client:

        async def settled() -> bool:
            seen = [each async for each in client.observations() if isinstance(each, SeenPicture)]
            now = await client.learning()
            kept = [each.kept.pictures for each in now.nodes if each.kept is not None]
            at_gate = sum(each.source == "gate" and each.fine is not None for each in seen)
            there = all(each.picture for each in seen if each.source == "yard")  # people label these
            return len(seen) == PICTURES and there and not any(each.waits for each in seen) and sum(kept) == at_gate

        await wait_for(settled, what="answers to all pictures", timeout_s=200)


def test_the_tutorial_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("TERRACE_SCHEDULER", url)
    text = (ROOT / PAGE).read_text(encoding="utf-8").replace("http://127.0.0.1:8070", url)
    furnish(tmp_path, text)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    lines = [line.replace("http://127.0.0.1:8070", url) for each in headings for line in commands(PAGE, each)]
    with ExitStack() as stack:
        for line in lines:
            words = line.split()
            if words[1] == "up":
                up = stack.enter_context(running(*words[2:], log=tmp_path / "log"))
                stack.callback(up.process.wait, 30)
                stack.callback(up.process.terminate)
                asyncio.run(answered(url))
            elif words[1:3] == ["train", "work"]:
                worker = subprocess.Popen([sys.executable, "-m", *words])
                stack.callback(worker.wait, 30)
                stack.callback(worker.kill)
            else:
                done = subprocess.run(["bash", "-euc", line], capture_output=True, text=True, timeout=400)
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert_improved(tmp_path, url)


def assert_improved(folder: Path, url: str) -> None:
    """The devices answer with a network that does better on dark pictures."""
    outcome = json.loads((folder / "improved" / "improve.json").read_text())
    assert (outcome["state"], outcome["new_release"], outcome["devices"]) == ("released", "bundled@2", DEVICES)
    figures = outcome["figures"]
    assert figures["above_gained"] > figures["above_lost"]
    assert figures["validation_pictures"] >= 50
    with Client(url) as client:
        assert client.releases().in_force == "bundled@2"
        assert client.learning().labels == figures["validation_pictures"]
        (improved,) = [each for each in client.release("bundled@2").networks if each.tier == Tier.END]
    assert improved.sha256 != load_manifest().default_for("end").sha256
