"""A package that adds an extension of each group, in real services: with it, without it, and with one that fails."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from models.manifest import load_manifest, save_manifest, weights_folder
from terrace.cli import run
from tests.integration.end_node.observing import said_scheduler
from tests.shapes import write_shapes
from tierkit.testing import service_process, wait_for

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

TERRACE = (sys.executable, "-P", "-m", "terrace")
NETWORK = """
name = "net"
tier = "end"
target = "fine"
epochs = 2
batch_size = 6
peak_rate = 0.05
held_out_per_class = 2
precision = "fp32"
crop_padding = 0

[network]
kind = "{kind}"
"""
MLP = NETWORK.format(kind="mlp") + 'options = { inputs = 3072, hidden = [8], activation = "tanh" }\n'
ENCODERS = """
import asyncio, json, sys
import numpy as np
from cloud_node.settings import CloudSettings
from encryption.loading import load_heads, load_served
from encryption.noise import KEY_BYTES
from end_node.settings import EndSettings
from models.data import read_sample
from models.manifest import Manifest
from models.manifest import load_manifest
from pathlib import Path
from tierkit.types import Tier

folder = Path(sys.argv[1])

async def main():
    manifest = load_manifest(folder)
    heads = await load_heads(EndSettings(models=folder), manifest)
    served = await load_served(CloudSettings(models=folder), Tier.CLOUD, manifest)
    tails = {tail.name: tail for tails in served.standby.values() for tail in tails}
    answers = {}
    for head in heads:
        if head.encoder.name in tails:
            images = read_sample().images[:8]
            given = {"images": images}
            if head.encoder.noise:
                given["noise_keys"] = np.zeros((8, KEY_BYTES), np.uint8)
            features = head.run(given, ["uint8"])["uint8"]
            logits = tails[head.encoder.name].run({"features": features}, ["logits"])["logits"]
            answers[head.encoder.name] = [features.tolist(), logits.tolist()]
    print(json.dumps({"answers": answers, "hidings": [head.encoder.hiding for head in heads]}))

asyncio.run(main())
"""


async def test_a_source_yields_pictures_on_an_end_node(tmp_path: Path, with_package: dict[str, str]) -> None:
    (tmp_path / "end.toml").write_text(
        '[[source]]\nname = "wall"\nkind = "colours"\nurl = "colours://ff8000"\nrate = 50\n'
        '[[source]]\nname = "gate"\nkind = "faulty"\nurl = "faulty://"\n'
        f'[spool]\nfolder = "{tmp_path / "spool"}"\n'
    )
    async with said_scheduler() as (scheduler, url):
        flags = ["--config", str(tmp_path / "end.toml"), "--port", "0", "--node-id", "end-1", "--scheduler", url]
        flags += ["--models", str(weights_folder())]
        async with (
            service_process(
                ["-m", "terrace", "end", *flags], ready_file=tmp_path / "ready", environment=with_package
            ) as node,
            httpx.AsyncClient(base_url=node.url) as http,
        ):

            async def sources() -> dict[str, Any]:
                answer = await http.get("/v1/sources")
                return {each["name"]: each for each in answer.json()["sources"]}

            async def is_waiting() -> bool:
                return bool((await sources())["gate"]["state"] == "waiting")

            await wait_for(lambda: len(scheduler.observations) >= 3, timeout_s=60)
            await wait_for(is_waiting)
            found = await sources()
    assert (found["wall"]["kind"], found["wall"]["state"]) == ("colours", "running")
    assert (
        "from the package terrace-example 0.3, which cannot be used: RuntimeError: the camera"
        in (found["gate"]["reason"])
    )


def test_a_kind_of_source_without_its_package_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "end.toml").write_text('[[source]]\nname = "wall"\nkind = "colours"\nurl = "colours://ff8000"\n')
    with pytest.raises(SystemExit, match="2"):
        run(["end", "--config", str(tmp_path / "end.toml"), "--port", "0"])
    said = capfd.readouterr().err
    assert "terrace.sources has no 'colours' here; known: stream, camera, folder, snapshot, push." in said
    assert "If a package adds it, install that package" in said


async def test_an_engine_computes_on_a_cloud_node(tmp_path: Path, with_package: dict[str, str]) -> None:
    command = ["-m", "terrace", "cloud", "--engine", "mean", "--port", "0"]
    async with (
        service_process(command, ready_file=tmp_path / "ready", environment=with_package) as node,
        httpx.AsyncClient(base_url=node.url) as http,
    ):
        (model,) = [entry.name for entry in load_manifest().models if entry.tier == "cloud" and not entry.gpu]
        white = {"name": "images", "datatype": "UINT8", "shape": [1, 32, 32, 3], "data": [255] * 3072}
        answer = (await http.post(f"/v2/models/{model}/infer", json={"inputs": [white]})).json()
        about = (await http.get(f"/v2/models/{model}")).json()
    logits = next(each["data"] for each in answer["outputs"] if each["name"] == "logits")
    assert (int(np.argmax(logits)), about["platform"]) == (99, "mean")


async def test_a_sink_gets_the_events_of_a_scheduler(tmp_path: Path, with_package: dict[str, str]) -> None:
    lines = tmp_path / "lines"
    command = ["-m", "terrace", "scheduler", "--port", "0", "--state", str(tmp_path / "state")]
    sinks = [{"name": name, "kind": name, "options": {"path": str(lines)}} for name in ("lines", "faulty")]
    async with (
        service_process(command, ready_file=tmp_path / "ready", environment=with_package) as scheduler,
        httpx.AsyncClient(base_url=scheduler.url) as http,
    ):
        known, faulty = [await http.post("/v1/sinks", json=sink) for sink in sinks]
        assert known.status_code == 201, known.text
        assert (await http.post("/v1/sinks/lines/test")).is_success
        assert json.loads(lines.read_text())["id"].startswith("evt_")
    assert faulty.status_code == 400, faulty.text


def test_an_engine_without_its_package_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["cloud", "--engine", "mean", "--port", "0"])
    assert "terrace.engines has no 'mean' here; known: onnx, oip, ray." in capfd.readouterr().err


def encoded(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, "-P", "-c", ENCODERS, str(folder)],
        env=environment,
        check=True,
        timeout=110,
        stdout=subprocess.PIPE,
    )
    return dict(json.loads(found.stdout))


def model_set(folder: Path, hiding: str | None) -> Path:
    """The bundled networks, and one encoder of the cloud's with this hiding and without noise."""
    folder.mkdir()
    for file in weights_folder().iterdir():
        if file.suffix == ".onnx":
            (folder / file.name).symlink_to(file)
    manifest = load_manifest()
    networks = {entry.name for entry in manifest.models if entry.tier == "cloud"}
    encoder = next(each for each in manifest.encoders if each.network in networks)
    encoder = encoder.model_copy(update={"hiding": hiding, "noise": 0.0})
    save_manifest(manifest.model_copy(update={"encoders": (encoder,)}), folder)
    return folder


def test_an_encoder_hides_on_the_device_and_restores_upstream(tmp_path: Path, with_package: dict[str, str]) -> None:
    plain = encoded(model_set(tmp_path / "plain", None), with_package)
    hidden = encoded(model_set(tmp_path / "hidden", "reversed"), with_package)
    ((name, (features, logits)),) = hidden["answers"].items()
    plain_features, plain_logits = plain["answers"][name]
    assert np.array_equal(np.array(features), np.array(plain_features)[:, ::-1])
    assert np.array_equal(logits, plain_logits)
    # Without the package, neither side offers the encoder: no features leave the device unhidden.
    without = encoded(tmp_path / "hidden", {**os.environ, "PYTHONPATH": with_package["PYTHONPATH"].split(":")[1]})
    assert without == {"answers": {}, "hidings": []}


def test_doctor_names_the_package_that_cannot_be_imported(with_package: dict[str, str]) -> None:
    flags = ["--scheduler", "http://127.0.0.1:9", "--json"]
    found = subprocess.run(
        [*TERRACE, "doctor", *flags], env=with_package, check=False, timeout=110, stdout=subprocess.PIPE
    )
    checks = [each for each in json.loads(found.stdout)["checks"] if each["group"] == "extensions"]
    assert found.returncode == 1
    assert {each["name"] for each in checks if each["verdict"] == "ok"} >= {"mean", "fedadam", "colours", "lines"}
    (faulty,) = [each for each in checks if each["name"] == "faulty"]
    assert faulty["verdict"] == "fail"
    assert faulty["detail"] == ("terrace.sources of terrace-example 0.3: RuntimeError: the camera library is too old")


@pytest.mark.train
def test_a_strategy_and_a_network_train_with_two_workers(tmp_path: Path, with_package: dict[str, str]) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    shapes = write_shapes(tmp_path / "shapes")
    (tmp_path / "net.toml").write_text(NETWORK.format(kind="linear"))
    (tmp_path / "own.toml").write_text(
        'family = "outer"\nrule = "fedadam"\nperiod = 2\noptions = { rate = 0.02, first = 0.8 }\n'
    )
    for strategy in ("softsync", str(tmp_path / "own.toml")):
        flags = ["--strategy", strategy, "--workers", "2", "--dataset", str(shapes), "--seed", "3", "--json"]
        done = subprocess.run(
            [*TERRACE, "train", "run", str(tmp_path / "net.toml"), *flags],
            env=with_package,
            check=True,
            timeout=110,
            stdout=subprocess.PIPE,
        )
        found = json.loads(done.stdout)
        assert (found["strategy"], found["workers"], found["faults"]) == (Path(strategy).stem, 2, 0)
        assert found["updates"] >= 2


@pytest.mark.train
def test_a_rule_that_fails_ends_the_run(tmp_path: Path, with_package: dict[str, str]) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    shapes, network = write_shapes(tmp_path / "shapes"), tmp_path / "net.toml"
    network.write_text(MLP)
    flags = ["--strategy", "brittle", "--workers", "1", "--dataset", str(shapes)]
    done = subprocess.run(
        [*TERRACE, "train", "run", str(network), *flags],
        env=with_package,
        check=False,
        timeout=110,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 2
    assert "the rule Brittle fails: RuntimeError: the third update is too much" in done.stderr


async def worked(url: str, name: str, data: Path) -> tuple[int | None, str]:
    """Exit code and standard error of a worker without the package."""
    flags = [url, "--name", name, "--dataset", str(data), "--threads", "1"]
    process = await asyncio.create_subprocess_exec(*TERRACE, "train", "work", *flags, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(110):
        _, said = await process.communicate()
    return process.returncode, said.decode()


@pytest.mark.train
async def test_only_the_host_needs_the_package_of_a_strategy(tmp_path: Path, with_package: dict[str, str]) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    shapes, network = write_shapes(tmp_path / "shapes"), tmp_path / "net.toml"
    network.write_text(MLP)
    flags = [f"--network={network}", f"--dataset={shapes}", "--strategy=fedadam", "--workers=2"]
    flags += ["--start-at=2", "--port=0"]  # a worker that comes after the end would wait for the host
    command = ["-m", "terrace", "train", "host", *flags, f"--folder={tmp_path / 'run'}"]
    async with service_process(command, ready_file=tmp_path / "ready", environment=with_package) as host:
        ended = await asyncio.gather(*(worked(host.url, name, shapes) for name in ("w1", "w2")))
    assert [code for code, _ in ended] == [0, 0]


@pytest.mark.train
async def test_a_worker_without_the_package_of_a_network_says_so(tmp_path: Path, with_package: dict[str, str]) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    shapes, network = write_shapes(tmp_path / "shapes"), tmp_path / "net.toml"
    network.write_text(NETWORK.format(kind="linear"))
    flags = [f"--network={network}", f"--dataset={shapes}", "--strategy=sgd", "--workers=1", "--port=0"]
    command = ["-m", "terrace", "train", "host", *flags, f"--folder={tmp_path / 'run'}"]
    async with service_process(command, ready_file=tmp_path / "ready", environment=with_package) as host:
        code, said = await worked(host.url, "w1", shapes)
    assert code == 2
    assert "terrace.networks has no 'linear' here" in said
    assert "install that package" in said


@pytest.mark.train
def test_a_strategy_without_its_package_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    assert run(["train", "run", "mnist-100", "--strategy", "fedadam"]) == 2
    said = capsys.readouterr().err
    assert "no strategy 'fedadam' here; there are fedavg, sgd" in said
    assert "If a package adds it, install that package" in said
