"""`terrace watch` as a process, with the network that ships."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.end_node.cameras import http_camera, jpeg, showing

TERRACE = (sys.executable, "-P", "-m", "terrace")


async def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(*TERRACE, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture(scope="module")
async def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watch") / "sample"
    assert (await run("sample", str(folder), "--count", "5"))[0] == 0
    return folder


async def test_a_folder_is_answered_line_by_line(sample: Path) -> None:
    code, out, _ = await run("watch", str(sample), "--until", "3")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert [(line[1], line[2]) for line in lines] == [
        ("001-aquarium_fish.png", "fish"),
        ("002-baby.png", "people"),
        ("005-bed.png", "household_furniture"),
    ]


async def test_json_until_a_label(sample: Path, tmp_path: Path) -> None:
    (tmp_path / "0.jpg").write_bytes(b"no picture")
    code, out, _ = await run("watch", str(tmp_path), "--until", "1", "--json")
    assert code == 0
    assert json.loads(out)["error"]
    code, out, _ = await run("watch", str(sample), "--until", "label=people", "--json")
    assert code == 0
    first, last = map(json.loads, out.splitlines())
    assert (first["label"], last["label"], last["number"]) == ("fish", "people", 2)
    assert last["confidence"] > 0.9
    assert len(last["sha256"]) == 64


async def test_a_stream_until_a_time() -> None:
    pytest.importorskip("av", reason="the extra 'video' is not installed")
    async with http_camera(showing(lambda number: jpeg())) as url:
        code, out, err = await run("watch", url, "--rate", "10", "--until", "3s")
    assert code == 0, err
    assert len(out.splitlines()) >= 2
    assert "running" in err


async def test_ctrl_c_is_a_good_end(sample: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *TERRACE, "watch", str(sample), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["/nothing/here"], "cannot find /nothing/here"),
        (["ftp://me:hidden@host/"], "not ftp://"),
        (["http://me:hidden@127.0.0.1:1/"], "cannot be reached"),
        ([".", "--until", "soon"], "it is a number (20)"),
        ([".", "--until", "0"], "it is a number (20)"),
        ([".", "--until", "label=unicorn"], "no class 'unicorn'"),
        ([".", "--rate", "0"], "--rate"),
        ([__file__], "it is not a video"),
    ],
)
async def test_a_wrong_source_or_option(arguments: list[str], reason: str) -> None:
    code, out, err = await run("watch", *arguments)
    assert (code, out) == (2, "")
    assert reason in err
    assert "hidden" not in err


def some_of(sample: Path, folder: Path, count: int) -> None:
    for picture in sorted(sample.iterdir())[:count]:
        shutil.copy(picture, folder)


@pytest.mark.parametrize("pictures", [1, 5], ids=["one picture", "several pictures"])
async def test_output_that_nobody_reads_ends_the_command(sample: Path, tmp_path: Path, pictures: int) -> None:
    some_of(sample, tmp_path, pictures)
    shell = f"{' '.join(TERRACE)} watch {tmp_path} | head -1"
    process = await asyncio.create_subprocess_shell(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert len(out.splitlines()) == 1
