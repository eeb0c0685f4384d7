"""The services work under the restrictions of their units, without a systemd that runs."""

import ctypes.util
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from terrace import AsyncClient
from tierkit.testing import service_process, wait_for

HERE = Path(__file__).parent
COMMON = HERE.parents[2] / "deploy" / "systemd" / "terrace-.service.d" / "common.conf"


def expanded(name: str) -> set[str]:
    """The system calls of a set of systemd's, or the one that this is."""
    if not name.startswith("@"):
        return {name}
    command = ["systemd-analyze", "--no-pager", "syscall-filter", name]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    members = [line.strip() for line in lines if line.startswith("    ") and "#" not in line]
    return set().union(*map(expanded, members))


def allowed_calls() -> set[str]:
    """What the lines SystemCallFilter= of the units come to."""
    calls: set[str] = set()
    for refused, names in re.findall(r"^SystemCallFilter=(~?)(.+)$", COMMON.read_text(), re.MULTILINE):
        named = set().union(*map(expanded, names.split()))
        calls = calls - named if refused else calls | named
    return calls | expanded("@default")


@pytest.fixture(scope="module")
def restricted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if shutil.which("systemd-analyze") is None or ctypes.util.find_library("seccomp") is None:
        pytest.skip("needs systemd-analyze and libseccomp: apt-get install systemd libseccomp2")
    assert re.search("^MemoryDenyWriteExecute=yes$", COMMON.read_text(), re.MULTILINE)
    calls = tmp_path_factory.mktemp("calls") / "calls"
    calls.write_text("\n".join(sorted(allowed_calls())))
    launcher = [str(HERE / "restricted.py"), str(calls)]
    probe = "import mmap, os\nfor refused in lambda: mmap.mmap(-1, 4096, prot=7), lambda: os.setuid(0):\n"
    probe += " try: refused()\n except PermissionError: print('refused')"
    tried = subprocess.run([sys.executable, *launcher, "-c", probe], capture_output=True, text=True, timeout=60)
    if "PR_SET_MDWE" in tried.stderr:
        pytest.skip("needs Linux 6.3 or newer")
    assert tried.stdout.split() == ["refused", "refused"], tried.stderr
    return launcher


def pictures() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    made = {}
    for kind in ("png", "jpeg", "webp", "avif"):
        held = io.BytesIO()
        Image.fromarray(noise).save(held, kind)
        made[f"noise.{kind}"] = held.getvalue()
    return made


async def test_a_fleet_answers_under_the_restrictions_of_its_units(restricted: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, content in pictures().items():
        (folder / name).write_bytes(content)
    scheduler = [*restricted, "-m", "terrace", "scheduler", f"--state={tmp_path / 'state'}", "--port=0"]
    async with service_process(scheduler, ready_file=tmp_path / "scheduler.ready") as hub:
        nodes = [[*restricted, "-m", "terrace", tier, "--port=0", f"--scheduler={hub.url}"] for tier in ("end", "edge")]
        async with (
            service_process(nodes[0], ready_file=tmp_path / "end.ready") as end,
            service_process(nodes[1], ready_file=tmp_path / "edge.ready") as edge,
            AsyncClient(hub.url) as client,
        ):

            async def joined() -> bool:
                return len(await client.devices()) == 2

            await wait_for(joined, what="both nodes to register")
            job = await client.wait(await client.submit(folder, scheme="end-edge"))
            results = [result async for result in client.results(job)]
            assert len(results) == 4
            assert all(result.fine is not None for result in results), (hub.log, end.log, edge.log)
            assert all("not permitted" not in service.log for service in (hub, end, edge))
