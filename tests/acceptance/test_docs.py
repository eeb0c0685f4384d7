"""The examples of README and docs run as they stand: `sh` and `python` blocks, in order, one empty folder per page.

Blocks marked `console` show what cannot run here (other machines, root, a service that stays).
"""

import contextlib
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from end_node.settings import UplinkSettings
from models.data import read_sample
from scheduler.core.policy import PolicyRequest
from tierkit import errors
from tierkit.client import DEFAULT_URL
from tierkit.http.address import free_port

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/get-started/install.md",
    "docs/get-started/first-fleet.md",
    "docs/how-to/jobs.md",
    "docs/reference/cli.md",
    "docs/how-to/monitoring.md",
)
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str, fleet_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # `terrace` and `python` are those of this environment, the fleet is the one of the tests.
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERRACE_SCHEDULER": fleet_url,
        "COLUMNS": "120",
    }
    found = blocks(page)
    assert found, f"{page} has no examples"
    shell = "".join(text for language, text in found if language == "sh").replace(DEFAULT_URL, fleet_url)
    run(["bash", "-euo", "pipefail", "-x", "-c", shell], environment)
    for language, text in found:
        if language == "python":
            run([sys.executable, "-W", "error", "-c", text.replace(DEFAULT_URL, fleet_url)], environment)


def run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command[-1]}\n--- {done.returncode}\n{done.stdout}\n{done.stderr}"
    # curl ends well when the scheduler answers with an error; the examples must not.
    assert '{"error":' not in done.stdout, done.stdout + done.stderr


def commands(page: str, heading: str) -> list[str]:
    """The commands of a section that is for more than one machine."""
    section = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    shown = "".join(re.findall(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    lines = shown.replace("\\\n", " ").splitlines()
    return [line.removeprefix(prompt) for line in lines for prompt in ("$ ", "# ") if line.startswith(prompt)]


def here(command: str, port: int) -> str:
    """The same command with all machines on this one."""
    command = re.sub(r"10\.0\.0\.\d+", "127.0.0.1", command).replace(":8070", f":{port}")
    if command.startswith("terrace scheduler"):
        command += f" --port {port}"
    elif command.startswith("terrace end"):
        command += " --port 0"
    return f"exec {command}" if command.startswith("terrace") else command


def wait_for_listener(service: subprocess.Popen[bytes], port: int) -> None:
    ended = os.pidfd_open(service.pid)
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return
            assert not select.select([ended], [], [], 0.05)[0], "the service has ended"
    finally:
        os.close(ended)
    raise AssertionError(f"nothing listens on port {port}")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_fleet_with_tls_works_as_written(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    port = free_port()
    services = []
    try:
        for command in commands("docs/how-to/security.md", "TLS"):
            line = ["bash", "-c", here(command, port)]
            if command.startswith(("terrace scheduler", "terrace end")):
                services.append(subprocess.Popen(line, env=environment, cwd=tmp_path))
                if len(services) == 1:
                    wait_for_listener(services[0], port)
                continue
            done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert len(services) == 2
        assert re.search(r"^coarse +10 ", done.stdout, re.MULTILINE), done.stdout
    finally:
        for service in services:
            service.terminate()
        for service in services:
            service.wait(20)


def film(path: Path) -> None:
    """A video of pictures that ship with Terrace, two a second for half a minute."""
    av = pytest.importorskip("av", reason="needs the extra 'video'")
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=2)
        stream.width = stream.height = 128
        stream.pix_fmt = "yuv420p"
        for pixels in read_sample().images[:60]:
            large = np.repeat(np.repeat(pixels, 4, axis=0), 4, axis=1)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(large, "rgb24")))
        file.mux(stream.encode())


def test_the_camera_works_as_written(tmp_path: Path) -> None:
    """The tutorial on one machine, with a video file for the camera."""
    film(tmp_path / "gate.mp4")
    page = (ROOT / "docs/get-started/camera.md").read_text(encoding="utf-8")
    port, end_port, cloud_port = free_port(), free_port(), free_port()
    ports = {":8070": f":{port}", ":8071": f":{end_port}", ":8073": f":{cloud_port}"}

    def local(text: str) -> str:
        text = text.replace("rtsp://10.0.0.9/main", str(tmp_path / "gate.mp4"))
        for before, after in ports.items():
            text = text.replace(before, after)
        return re.sub(r"10\.0\.0\.\d+|0\.0\.0\.0", "127.0.0.1", text)

    settings, budget = (local(text) for text in re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert UplinkSettings.model_validate(tomllib.loads(budget)["uplink"]).bytes_per_day == 5_000_000
    settings = settings.replace("[end]", f"[end]\nport = {end_port}")
    (tmp_path / "pi.toml").write_text(settings.replace("[spool]", f'[spool]\nfolder = "{tmp_path / "spool"}"'))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERRACE_SCHEDULER": f"http://127.0.0.1:{port}",
    }
    headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
    lines = [local(line) for heading in headings for line in commands("docs/get-started/camera.md", heading)]
    services: list[subprocess.Popen[bytes]] = []
    listening = {"scheduler": port, "cloud": cloud_port, "end": end_port}

    def output(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    try:
        for line in lines:
            words = line.split()
            if words[0] == "pip":
                assert re.search(r"\.\[cpu,video\]", line)
            elif words[1] in listening:
                own = ["--port", str(listening[words[1]])] if words[1] != "end" else []
                services.append(subprocess.Popen([*words, *own], env=environment, cwd=tmp_path))
                wait_for_listener(services[-1], listening[words[1]])
            elif words[0] == "curl":
                assert '"source":"gate"' in output(f"timeout 20 {line} -H 'Last-Event-ID: 0' | grep -m 1 '^data: '")
            elif words[1] == "watch":
                assert len(output(line).splitlines()) == 5
            elif words[:2] == ["terrace", "sources"]:
                assert "gate" in output(
                    f"for i in $(seq 30); do {line} > seen; grep -q gate seen && break; done; cat seen"
                )
            else:
                assert words[:2] == ["terrace", "observations"]
                seen = output(f"for i in $(seq 100); do {line} > seen; test -s seen && break; done; cat seen")
                assert "gate" in seen
    finally:
        for service in services:
            service.terminate()
        for service in services:
            service.wait(20)


def test_the_bounds_of_the_policy_are_told() -> None:
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| (.*) \|.*\|$", (ROOT / "docs/how-to/jobs.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    schema = PolicyRequest.model_json_schema()["properties"]
    for name, field in schema.items():
        for option in field.get("anyOf", [field]):
            for bound in ("minimum", "maximum", "exclusiveMinimum", "maxLength"):
                if bound in option and name != "task_deadline_s":
                    assert f"{option[bound]:,.0f}" in rows[name], (name, bound)


def test_the_errors_of_the_api_page_exist() -> None:
    table = (ROOT / "docs/reference/rest.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| [\d, ]+ \|.*\| `(\w+)` \|$", table, re.MULTILINE))
    assert len(named) == 12
    assert named <= set(errors.__all__)


@pytest.mark.parametrize(
    ("heading", "at_least"), [("Guarantees", 25), ("Pictures, releases and training", 11), ("On real networks", 7)]
)
def test_the_tests_of_the_promises_exist(heading: str, at_least: int) -> None:
    page = (ROOT / "docs/reference/guarantees.md").read_text(encoding="utf-8")
    table = page.split(f"\n## {heading}\n")[1].split("\n##")[0]
    rows = [re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", row) for row in table.split("\n| ")[2:]]
    assert len(rows) > at_least
    for row in rows:
        file = ""
        assert row, "a promise without a test"
        for named, test in row:
            file = named or file
            sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(file)]
            assert any(f"def {test}(" in source for source in sources if test) or (sources and not test), (file, test)
