"""The main job: `terrace demo`, as a newcomer runs it first."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.model_sets import colour_network, colour_set

KEYS = {
    "images",
    "answered_coarse",
    "answered_fine",
    "lost",
    "coarse_accuracy",
    "fine_accuracy",
    "coarse_p50_ms",
    "coarse_p99_ms",
    "fine_p50_ms",
    "fine_p99_ms",
    "images_per_s",
    "nodes",
    "mapping",
    "scheme",
    "seconds",
}


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "terrace", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=55, env={**os.environ, "COLUMNS": "100"})


@pytest.fixture(scope="module")
def finished() -> subprocess.CompletedProcess[str]:
    return demo("--json")


def test_it_prints_one_json_document_and_nothing_else(finished: subprocess.CompletedProcess[str]) -> None:
    assert (finished.returncode, finished.stderr) == (0, "")
    assert json.loads(finished.stdout).keys() >= KEYS


def test_every_image_is_answered_twice(finished: subprocess.CompletedProcess[str]) -> None:
    report = json.loads(finished.stdout)
    assert (report["images"], report["answered_coarse"], report["answered_fine"], report["lost"]) == (300, 300, 300, 0)


def test_all_three_tiers_take_part(finished: subprocess.CompletedProcess[str]) -> None:
    report = json.loads(finished.stdout)
    shares = {node["node_id"]: (node["tier"], node["coarse_images"], node["fine_images"]) for node in report["nodes"]}
    assert shares == {
        "end-1": ("end", 150, 0),
        "end-2": ("end", 150, 0),
        "edge-1": ("edge", 0, 150),
        "cloud-1": ("cloud", 0, 150),
    }
    assert (report["scheme"], report["mapping"]) == ("mapping", {"end-1": "edge-1", "end-2": "cloud-1"})


def test_the_answers_are_those_of_trained_networks(finished: subprocess.CompletedProcess[str]) -> None:
    report = json.loads(finished.stdout)
    # Guessing gives 0.05 and 0.01; the manifest's own accuracies are checked where the networks are.
    assert report["coarse_accuracy"] > 0.3
    assert report["fine_accuracy"] > 0.3


def test_a_person_sees_the_answers_of_a_set_of_networks_for_large_pictures(tmp_path: Path) -> None:
    networks = {
        tier: colour_network(tmp_path / f"{tier}.onnx", size=side) for tier, side in (("end", 48), ("cloud", 96))
    }
    models = colour_set(tmp_path / "set", networks)
    done = demo("--models", str(models), "--images", "20", "--edge", "0", "--end", "1")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("20 images", "20/20", "first", "upper", "end-1 → cloud-1", "everything is stopped again"):
        assert word in done.stdout, word
    assert re.search(r"^first +20 +- ", done.stdout, re.MULTILINE)  # no accuracy: the set has other classes
    refused = demo("--models", str(models), "--images", "20")
    assert refused.returncode == 2
    assert "--tier edge" in refused.stderr
    assert "--edge 0" in refused.stderr


def test_ctrl_c_ends_it_without_a_word_too_many() -> None:
    command = [sys.executable, "-m", "terrace", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        began = time.monotonic()
        running.send_signal(2)
        assert running.wait(timeout=20) == 130
        assert time.monotonic() - began < 15
        assert running.stderr.read() == ""
