"""`terrace train release`: a finished run becomes a model set, and a release at a real scheduler."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.manifest import load_manifest
from terrace.cli import run
from tests.integration.training.conftest import CONFIG
from tests.own_networks import run_on_kept_pictures
from tierkit.client import Client
from tierkit.http.address import free_port
from tierkit.testing import service_process
from training.messages import SPEC

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(300)]


def train(folder: Path, shapes: Path, name: str, tier: str, *flags: str) -> Path:
    config = folder / f"{name}.toml"
    config.write_text(CONFIG.format(epochs=2).replace('"net"', f'"{name}"').replace('"end"', f'"{tier}"'))
    where = ["--config", str(config), "--dataset", str(shapes), "--runs", str(folder / "runs")]
    assert run(["models", "train", name, "--threads", "1", *where, *flags]) == 0
    return folder / "runs" / name


def release(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["train", "release", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


async def test_a_run_becomes_a_release_upon_the_one_in_force_and_never_twice(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--dataset", str(shapes)]
    upper = release(capsys, str(train(tmp_path, shapes, "upper", "edge")), *data)
    assert (upper["release"], upper["thresholds"]) == (None, False)
    served = upper["set"]
    assert {entry.name for entry in load_manifest(Path(served)).models} == {"upper"}

    lower = train(tmp_path, shapes, "lower", "end")
    lower = lower.rename(lower.with_name("another-name"))
    command = ["-m", "terrace", "scheduler", "--port", str(port := free_port()), "--models", served]
    async with service_process([*command, "--state", str(tmp_path / "state")], ready_file=tmp_path / "ready"):
        arguments = [str(lower), "--scheduler", f"http://127.0.0.1:{port}", "--name", "shapes", *data]
        assert run(["train", "release", *arguments]) == 2  # nobody says which images `upper` has not seen
        assert "--records" in capsys.readouterr().err
        arguments += ["--records", f"{served}/records"]
        first = release(capsys, *arguments)
        made = load_manifest(Path(first["set"]))
        assert {(entry.name, entry.tier) for entry in made.models} == {("upper", "edge"), ("lower", "end")}
        assert (first["release"], first["state"], first["thresholds"]) == ("shapes@2", "ready", True)
        assert release(capsys, *arguments)["release"] == first["release"]
        with Client(f"http://127.0.0.1:{port}") as client:
            assert len(client.releases().releases) == 2
            [lower_release] = [each for each in client.releases().releases if each.release == "shapes@2"]
            assert {each.name for each in lower_release.networks} == {"upper", "lower"}


def test_runs_that_cannot_be_released_say_what_to_do(
    tmp_path: Path, shapes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--dataset", str(shapes)]
    begun = train(tmp_path, shapes, "begun", "end", "--steps", "1")

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert run(["train", "release", *arguments, *data]) == 2
        return capsys.readouterr().err

    assert "--unfinished" in refused(str(begun))
    (filled := tmp_path / "filled").mkdir()
    (filled / "letter.txt").write_text("mine")
    assert "--out" in refused(str(begun), "--unfinished", "--out", str(filled))
    assert (filled / "letter.txt").read_text() == "mine"
    (begun / "record.json").unlink()
    assert "continues from the checkpoint" in refused(str(begun))
    assert "not the folder of a training run" in refused(str(filled))
    (filled / "rank-1").mkdir()
    (filled / "rank-1" / "checkpoint.pt").touch()
    assert str(filled / "rank-1") in refused(str(filled))
    (filled / "rank-1" / "checkpoint.pt").unlink()
    (filled / SPEC).write_text(run_on_kept_pictures().model_dump_json())
    assert "train improve" in refused(str(filled))
