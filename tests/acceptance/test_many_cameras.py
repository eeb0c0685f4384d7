"""The how-to of many cameras as it is written: three devices on one machine, with folders instead of cameras."""

from __future__ import annotations

import csv
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.data import read_sample
from tests.acceptance.test_docs import ROOT, commands, wait_for_listener
from tierkit.http.address import free_port

PAGE = "docs/how-to/many-cameras.md"
CAMERAS = [f"10.0.{device}.{number}" for device in (1, 2, 3) for number in (1, 2, 3, 4)]


class Site:
    """The machines of the page, all of them here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = [free_port() for _ in range(5)]
        self.port, self.cloud_port, self.end_ports = ports[0], ports[1], ports[2:]
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "COLUMNS": "200",
        }
        self.services: list[subprocess.Popen[bytes]] = []

    def local(self, text: str) -> str:
        """The same text for this machine; what only cameras have is left out."""
        for address in CAMERAS:
            text = text.replace(f"http://{address}/now.jpg", str(self.camera(address)))
        text = re.sub(r"^changed = .*\n", "", text, flags=re.MULTILINE)
        text = text.replace("8070", str(self.port)).replace("8073", str(self.cloud_port))
        return re.sub(r"10\.0\.0\.1|0\.0\.0\.0", "127.0.0.1", text)

    def camera(self, address: str) -> Path:
        return self.folder / address

    def see(self, address: str, number: int, pixels: np.ndarray) -> None:
        """Let a camera take a picture."""
        path = self.camera(address) / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path.with_name(f".{path.name}"), "JPEG")
        path.with_name(f".{path.name}").rename(path)

    def serve(self, line: str) -> None:
        port = {"scheduler": self.port, "cloud": self.cloud_port}.get(line.split()[1])
        port = port or self.end_ports[len(self.services) - 2]
        words = ["bash", "-c", f"exec {line} --port {port}"]
        self.services.append(subprocess.Popen(words, env=self.environment, cwd=self.folder))
        wait_for_listener(self.services[-1], port)

    def run(self, line: str) -> str:
        words = ["bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(words, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def stop(self) -> None:
        for service in self.services:
            service.terminate()
        for service in self.services:
            service.wait(20)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.stop()


def follow(site: Site, line: str) -> str:
    """The first line of a command that ends with Ctrl-C; the cameras take pictures until it comes."""
    following = subprocess.Popen(
        line.split(),
        env=site.environment,
        cwd=site.folder,
        stdout=subprocess.PIPE,
        # It is ignored where the tests run in the background of a script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert following.stdout is not None
    for number in range(60):
        site.see(CAMERAS[0], 1000 + number, np.full((32, 32, 3), number, np.uint8))
        if select.select([following.stdout], [], [], 1.0)[0]:
            break
    shown = following.stdout.readline().decode()
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=60)
    assert following.returncode == 130
    return shown


@pytest.mark.timeout(240)
def test_the_how_to_works_as_written(site: Site) -> None:
    sample = read_sample().images
    for place, address in enumerate(CAMERAS):
        for number in range(6):
            site.see(address, number, sample[6 * place + number])
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    (settings,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for name in ("pi-1", "pi-2", "pi-3"):
        device = settings.replace("pi-1", name).replace("10.0.1.", f"10.0.{name[-1]}.")
        (site.folder / f"{name}.toml").write_text(site.local(device))
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    shown: dict[str, str] = {}
    for line in (line for heading in headings for line in commands(PAGE, heading)):
        command, words = site.local(line.partition("   #")[0].strip()), line.split()
        if words[0] == "export":
            site.environment |= dict(each.split("=", 1) for each in command.split()[1:])
            wait_for_cameras(site)
        elif words[0] == "sed":
            assert set(re.findall(r"pi-\d", command)) >= {"pi-1"}
        elif words[1] in ("scheduler", "cloud", "end"):
            site.serve(command)
        elif "--follow" in words:
            assert "pi-1  gate" in follow(site, command)
        else:
            shown[command] = site.run(command)
    assert_shown(site, shown)


def wait_for_cameras(site: Site) -> None:
    """Wait until each camera was heard, and the scheduler has pictures."""
    for _ in range(60):
        sources = json.loads(site.run("terrace sources list --json"))["sources"]
        if len([each for each in sources if each["last"]]) == 12 and any(each["last_picture"] for each in sources):
            return
    raise AssertionError(sources)


def assert_shown(site: Site, shown: dict[str, str]) -> None:
    everything = shown["terrace sources list"]
    assert [everything.count(name) for name in ("pi-1", "gate", "roof")] == [4, 3, 3]
    assert "jpg" not in shown["terrace sources list pi-1"]
    annas = shown["terrace sources list --token-file anna.token"]
    assert [annas.count(name) for name in ("gate", "yard", "anna", "ben")] == [3, 0, 3, 1]
    assert "readers" not in shown["terrace sources unshare pi-1 gate ben --token-file anna.token"].replace(
        "no readers", ""
    )
    assert "gate" in shown["terrace observations --source gate --since 2h"]
    assert "yard" not in shown["terrace observations --source gate --since 2h"]
    table = list(csv.DictReader((site.folder / "today.csv").read_text(encoding="utf-8-sig").splitlines()))
    lines = [json.loads(line) for line in (site.folder / "all.jsonl").read_text().splitlines()]
    assert len(lines) >= len(table) >= 72
    assert {line["node"] for line in lines} == {"pi-1", "pi-2", "pi-3"}
    pictures = list((site.folder / "unsure").rglob("*.jpg"))
    assert pictures
    for path in pictures:
        assert re.fullmatch(r"pi-\d\+(gate|yard|hall|roof)-\d+", path.stem)
