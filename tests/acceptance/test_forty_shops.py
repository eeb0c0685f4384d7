"""The how-to of forty shops as it is written: an office and four shops on one machine, with folders for cameras."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from models.data import read_sample
from tests.acceptance.test_docs import ROOT, commands, wait_for_listener
from tierkit.http.address import free_port

PAGE = "docs/how-to/sites.md"
SHOPS = ("shop-1", "shop-2", "shop-3", "shop-4")
CAMERAS = ("192.168.1.11", "192.168.1.12")


class Machines:
    """The machines of the page, all of them here; the addresses 10.0.x.y are 127.0.x.y."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "COLUMNS": "200",
        }
        self.fleets: list[subprocess.Popen[bytes]] = []

    def local(self, text: str) -> str:
        """The same text for this machine, and for four shops."""
        text = text.replace("40)", "4)").replace("10.0.", "127.0.").replace("10[.]0", "127[.]0")
        return text.replace("8070", str(self.port))

    def furnish(self, shop: str, cameras: str) -> Path:
        """Make the folder of a shop's machine: its files, and pictures of its cameras."""
        folder = self.folder / shop
        folder.mkdir()
        images = read_sample().images
        for number, camera in enumerate(CAMERAS):
            (folder / camera).mkdir()
            Image.fromarray(images[number]).save(folder / camera / "1.png")
            cameras = cameras.replace(f"http://{camera}/now.jpg", str(folder / camera))
        (folder / "cameras.toml").write_text(cameras)
        for suffix in ("toml", "token"):
            shutil.copy(self.folder / f"{shop}.{suffix}", folder)
        return folder

    def start(self, line: str, folder: Path) -> subprocess.Popen[bytes]:
        fleet = subprocess.Popen(["bash", "-c", f"exec {line}"], env=self.environment, cwd=folder)
        self.fleets.append(fleet)
        return fleet

    def run(self, line: str, *, code: int = 0) -> str:
        words = ["bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(words, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=100)
        assert done.returncode == code, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stdout + done.stderr

    def knows(self, token: str) -> bool:
        """True if the scheduler has read of a token in its file of tokens."""
        words = ["terrace", "sites", "list", "--token-file", token]
        return not subprocess.run(words, env=self.environment, cwd=self.folder, capture_output=True).returncode

    def wait_until(self, what: str, true: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not true():  # each look is a command, which takes its time
            assert time.monotonic() < until, f"not {what}: {self.run('terrace sites list')}"

    def healths(self) -> dict[str, str]:
        sites = json.loads(self.run("terrace sites list --json"))["sites"]
        return {site["site"]: site["health"] for site in sites}

    def has_a_site(self, health: str) -> bool:
        return health in self.healths().values()

    def stop(self) -> None:
        for fleet in reversed(self.fleets):
            fleet.terminate()
        for fleet in self.fleets:
            fleet.wait(60)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    try:
        yield machines
    finally:
        machines.stop()


@pytest.mark.timeout(540)
def test_the_how_to_works_as_written(machines: Machines) -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    office, shop, cameras = (machines.local(text) for text in re.findall(r"^```toml\n(.*?)^```$", page, re.M | re.S))
    (machines.folder / "office.toml").write_text(office)
    (machines.folder / "shop-1.toml").write_text(shop)
    shown: list[tuple[str, str]] = []
    for line in (line for heading in re.findall(r"^## (.*)$", page, re.M) for line in commands(PAGE, heading)):
        command, words = machines.local(line), line.split()
        if words[0] == "export":
            machines.environment |= dict(each.split("=", 1) for each in command.split()[1:])
            machines.wait_until("all there", lambda: machines.healths() == dict.fromkeys(SHOPS, "ok"))
            machines.wait_until("all cameras heard", lambda: len(seen(machines)) == 8)
        elif words[:3] == ["terrace", "up", "--fleet"]:
            name = words[3].removesuffix(".toml")
            if name == "office":
                wait_for_listener(machines.start(command, machines.folder), machines.port)
            else:
                machines.start(command, machines.furnish(name, cameras))
        else:
            shown.append((line, machines.run(command)))
        if words[:3] == ["terrace", "up", "kill"]:
            health = {"shop-2-edge-1": "degraded", "shop-3-edge-1": "coarse"}[words[3]]
            machines.wait_until("noticed", partial(machines.has_a_site, health))
        if "anna" in words and words[2] == "create":
            machines.wait_until("known to the scheduler", lambda: machines.knows("anna.token"))
    assert_shown(shown)
    told = machines.run("terrace classify photos/ --token-file anna.token", code=2)
    assert "shop-1" in told
    assert "shop-2" in told
    assert "shop-3" not in told
    machines.run("terrace classify photos/ --site shop-3 --token-file anna.token", code=1)
    examined = machines.run("terrace doctor", code=1)
    assert re.search(r"• site shop-2 +degraded, share cloud: shop-2-edge-1 is dead", examined)
    assert re.search(r"✗ site shop-3 +coarse, share none: no upstream node is alive", examined)


def seen(machines: Machines) -> list[dict[str, Any]]:
    """The sources that have sent an observation."""
    sources = json.loads(machines.run("terrace sources list --json"))["sources"]
    return [source for source in sources if source["last"]]


def assert_shown(shown: list[tuple[str, str]]) -> None:
    """What the commands printed, in their order."""

    def of(command: str) -> list[str]:
        return [out for line, out in shown if line == command]

    at_first, degraded, coarse, drained, closed = of("terrace sites list")
    assert [row_of(at_first, shop)[1] for shop in SHOPS] == ["ok"] * 4
    assert [row_of(at_first, shop)[5] for shop in SHOPS] == ["cloud", "cloud", "none", "cloud"]
    assert [row_of(degraded, shop)[1] for shop in SHOPS] == ["ok", "degraded", "ok", "ok"]
    assert [row_of(coarse, shop)[1] for shop in SHOPS] == ["ok", "degraded", "coarse", "ok"]
    assert row_of(drained, "shop-4")[1] == "drained"
    assert "shop-4" not in closed
    for command in ("sites show shop-2", "devices list --site shop-2"):
        (out,) = of(f"terrace {command}")
        assert nodes(out) == {"shop-2-edge-1", "shop-2-end-1"}
    for command in ("sources list", "observations"):
        (out,) = of(f"terrace {command} --site shop-2")
        assert nodes(out) == {"shop-2-end-1"}
        assert [name for name in ("door", "till") if name in out] == ["door", "till"]

    (first,) = of("terrace classify photos/ --site shop-1")
    assert nodes(first) <= {"shop-1-end-1", "shop-1-edge-1", "office-cloud-1"}
    own, alone = of("terrace classify photos/ --site shop-3")
    assert nodes(own) == {"shop-3-end-1", "shop-3-edge-1"}
    assert nodes(alone) == {"shop-3-end-1"}
    assert "with the coarse answer standing" in alone
    (office,) = of("terrace classify photos/ --site shop-2")
    assert nodes(office) == {"shop-2-end-1", "office-cloud-1"}
    (listed,) = of("terrace jobs list --site shop-1")
    assert len(listed.splitlines()) == 3

    (annas,) = of("terrace sites list --token-file anna.token")
    assert [shop for shop in SHOPS if shop in annas] == ["shop-1", "shop-2"]
    (annas,) = of("terrace devices list --token-file anna.token")
    assert nodes(annas) == {"shop-1-edge-1", "shop-1-end-1", "shop-2-edge-1", "shop-2-end-1", "office-cloud-1"}


def row_of(table: str, first: str) -> list[str]:
    """The cells of a row, by their words."""
    (row,) = [line.split() for line in table.splitlines() if line.split()[:1] == [first]]
    return row


def nodes(out: str) -> set[str]:
    return set(re.findall(r"shop-\d-e(?:nd|dge)-\d|office-cloud-\d", out))
