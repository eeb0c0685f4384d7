"""`terrace classify` and `terrace jobs` against a running fleet: every kind of source, and what a script reads."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from terrace.cli import run


@pytest.fixture
def terrace(
    fleet_url: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CompletedProcess[str]]:
    """The command line, without a process of its own: the examples of docs/reference/cli.md have that."""
    monkeypatch.setenv("TERRACE_SCHEDULER", fleet_url)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: str) -> CompletedProcess[str]:
        code = run(arguments)
        captured = capsys.readouterr()
        return CompletedProcess(arguments, code, captured.out, captured.err)

    return call


@pytest.mark.parametrize(
    ("source", "images", "names"),
    [
        (["photos/apple.png"], 1, ["apple.png"]),
        (["photos/"], 3, ["apple.png", "bicycle.png", "ray.png"]),
        (["photos.zip"], 3, ["apple.png", "ray.png", "bicycle.png"]),
        (["photos/ray.png", "photos.zip"], 4, ["ray.png", "photos/apple.png", "photos/ray.png", "photos/bicycle.png"]),
        (["photos.npz"], 3, None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_every_kind_of_source(terrace: Any, source: list[str], images: int, names: list[str] | None) -> None:
    done = terrace("classify", *source, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["job"]["images"] == report["job"]["answered_fine"] == len(report["results"]) == images
    assert [result["index"] for result in report["results"]] == list(range(images))
    if names:
        assert [result["name"] for result in report["results"]] == names


def test_the_sample_has_labels_and_so_an_accuracy(terrace: Any) -> None:
    done = terrace("classify", "sample", "--scheme", "end", "--json", "--out", "all.jsonl")
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)["job"]
    assert (job["images"], job["answered_coarse"], job["scheme"]) == (1000, 1000, "end")
    assert job["coarse_accuracy"] > 0.3
    lines = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    right = sum(line["coarse"]["label"] == line["true_coarse"] for line in lines)
    assert right / len(lines) == pytest.approx(job["coarse_accuracy"], abs=1e-6)


def test_labels_from_folders(terrace: Any) -> None:
    done = terrace("classify", "by-class/", "--labels", "folders", "--json")
    assert done.returncode == 0, done.stderr
    assert [result["true_fine"] for result in json.loads(done.stdout)["results"]] == ["apple", "bicycle", "ray"]


def test_results_as_a_table(terrace: Any) -> None:
    done = terrace("classify", "photos/", "--out", "results.csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(Path("results.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == ["apple.png", "bicycle.png", "ray.png"]
    assert all(row["fine_label"] in done.stdout for row in rows)


def test_a_job_can_be_looked_at_later(terrace: Any) -> None:
    job = json.loads(terrace("classify", "photos/", "--json", "--name", "holiday").stdout)["job"]["id"]
    listed = json.loads(terrace("jobs", "list", "--json").stdout)["jobs"]
    assert {entry["id"]: entry["name"] for entry in listed}[job] == "holiday"
    (row,) = [line for line in terrace("jobs", "list").stdout.splitlines() if job in line]
    assert {"holiday", "completed", "3"} <= set(row.split()), "into a pipe whole, whatever its width"
    assert json.loads(terrace("jobs", "show", job, "--json").stdout)["state"] == "completed"
    waited = terrace("jobs", "wait", job, "--budget", "0", "--json")
    assert (waited.returncode, waited.stderr, json.loads(waited.stdout)["id"]) == (0, "", job)
    assert len(terrace("jobs", "results", job).stdout.splitlines()) == 3
    (attempt,) = json.loads(terrace("jobs", "attempts", job, "--json").stdout)["attempts"]
    assert (attempt["task"], attempt["attempt"], attempt["outcome"]) == (0, 1, "ok")
    assert attempt["node"] in terrace("jobs", "attempts", job, "--task", "0").stdout
    events = [json.loads(line)["event"] for line in terrace("jobs", "events", job, "--json").stdout.splitlines()]
    assert [kind for kind in events if kind != "state"] == ["coarse", "fine"]
    assert events[-1] == "state"
    assert "completed" in terrace("jobs", "show", job).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["jobs", "show", "no-such-job"], 2, "no-such-job"),
        (["devices", "drain", "no-such-node"], 2, "no-such-node"),
        (["classify", "not-an-image.png"], 2, "not-an-image.png"),
        (["classify", "absent.png"], 2, "absent.png"),
        (["classify", "cifar100:test", "--data", "."], 2, "TERRACE_DATA"),
        (["classify", "photos/", "--escalate", "budget", "--escalate-budget", "7"], 2, "escalate_budget"),
        (["classify", "photos/", "--deadline", "-1"], 2, "deadline"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence(terrace: Any, arguments: list[str], code: int, word: str) -> None:
    Path("not-an-image.png").write_text("hello")
    done = terrace(*arguments)
    assert done.returncode == code
    assert word in done.stderr
    assert done.stderr.startswith("terrace: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_finished_job_cannot_be_cancelled(terrace: Any) -> None:
    job = json.loads(terrace("classify", "photos/", "--json").stdout)["job"]["id"]
    done = terrace("jobs", "cancel", job)
    assert done.returncode == 1
    assert job in done.stderr


def test_devices_are_listed(terrace: Any, fleet_url: str) -> None:
    # As the routes in the documentation begin.
    devices = json.loads(terrace("devices", "list", "--json", "--scheduler", f"{fleet_url}/v1/").stdout)["devices"]
    assert sorted(device["node_id"] for device in devices) == ["cloud-1", "edge-1", "end-1", "end-2"]
    rows = [line.split() for line in terrace("devices", "list").stdout.splitlines()[2:]]
    assert {(row[0], row[-1]) for row in rows} == {(device["node_id"], device["url"]) for device in devices}


def test_what_is_done_to_a_device_is_told_as_json(terrace: Any) -> None:
    verbs = {"drain": "draining", "remove": "removed", "trust yes": "trusted: yes", "trust default": "trusted: default"}
    for verb, state in {**verbs, "resume": "resumed"}.items():
        name, *said = verb.split()
        done = terrace("devices", name, "cloud-1", *said, "--json")
        assert (done.returncode, json.loads(done.stdout)) == (0, {"node_id": "cloud-1", "state": state})
    assert terrace("devices", "forget", "end-1").returncode == 1, "it lives"
    assert terrace("devices", "forget").returncode == 2
    # The node registers again by itself; other tests count on it.
    for _ in range(200):
        devices = json.loads(terrace("devices", "list", "--json").stdout)["devices"]
        if {device["node_id"]: device["health"] for device in devices}.get("cloud-1") == "alive":
            return
    raise AssertionError(devices)


def test_the_doctor_is_content(terrace: Any) -> None:
    report = json.loads(terrace("doctor", "--json").stdout)
    bad = [check for check in report["checks"] if check["verdict"] == "fail" and check["group"] != "ports"]
    assert bad == []
    assert {check["name"] for check in report["checks"]} >= {"scheduler", "end-1", "end-2", "edge-1", "cloud-1"}
