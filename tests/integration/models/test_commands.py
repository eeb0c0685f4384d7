"""`terrace models` as a person calls it, without torch."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from models.manifest import load_manifest, records_folder, weights_folder
from terrace.cli import run
from terrace.commands.models import app
from tierkit.errors import DataError, InvalidInput, MissingExtra, WeightsError


def names() -> list[str]:
    return [entry.name for entry in load_manifest().models]


def invoke(*arguments: str, **environment: str):
    return CliRunner(env=environment).invoke(app, list(arguments), catch_exceptions=False)


def test_list_names_every_network():
    shown = invoke("list")
    assert shown.exit_code == 0
    assert all(name in shown.output for name in names())
    listed = json.loads(invoke("list", "--json").stdout)
    assert [entry["name"] for entry in listed["models"]] == names()
    assert {encoder["network"] for encoder in listed["encoders"]} <= set(names())


def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_name(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    shown = invoke("list").output.splitlines()
    assert all(any(line.startswith(f"{name} ") for line in shown) for name in names())
    assert max(map(len, shown)) <= 50


def test_show_tells_how_a_network_was_trained():
    shown = invoke("show", names()[0])
    assert "training epochs" in shown.output
    assert json.loads(invoke("show", names()[0], "--json").stdout)["training"]["record"] == f"{names()[0]}.json"
    assert run(["models", "show", "vgg"]) == 2


def test_verify_passes_on_the_shipped_networks_and_fits_a_terminal_of_80_columns():
    result = invoke("verify", COLUMNS="80")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == len(names()) + len(load_manifest().encoders)
    assert all(line.rstrip().endswith(("answers", "both run")) for line in lines)
    assert {verdict["ok"] for verdict in json.loads(invoke("verify", "--json").stdout)} == {True}


def test_verify_fails_on_a_changed_file_and_names_it(tmp_path: Path):
    shutil.copytree(weights_folder(), tmp_path / "weights")
    file = load_manifest().models[0].file
    (tmp_path / "weights" / file).write_bytes(b"")
    result = invoke("verify", TERRACE_MODELS=str(tmp_path / "weights"))
    assert result.exit_code == 1
    # Folded where the terminal is narrower than the path is long, but whole.
    assert file in re.sub(r"\s", "", result.output)


def test_speed_measures_each_batch_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("models.speed._LEAST_S", 0.001)
    (row,) = json.loads(invoke("speed", names()[0], "--batch", "1", "--batch", "4", "--json").stdout)
    assert set(row["ms_per_image"]) == {"1", "4"}
    assert names()[0] in invoke("speed", names()[0], "--batch", "2").output


@pytest.mark.train
def test_speed_measures_the_fp32_form_beside_the_shipped_one(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("onnx", reason="needs the extra 'train'")
    monkeypatch.setattr("models.speed._LEAST_S", 0.001)
    integer, floating = json.loads(invoke("speed", "wrn-16-4", "--batch", "4", "--fp32", "--json").stdout)
    assert (integer["precision"], floating["precision"]) == ("int8", "fp32")
    assert 3.5 < floating["size_bytes"] / integer["size_bytes"] < 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("eval", "name the networks to measure, or say --all."),
        ("eval resnet-34 --all", "name the networks to measure or say --all, not both."),
        ("eval --all --runs x", "name the runs to measure."),
        ("eval ../x --runs x", "'../x' is not a name of a network"),
        ("eval --all --provider foo", "'foo' is not one of 'cpu', 'cuda'."),
        ("eval --all --threads 99999", "99999 threads are asked for, and this machine has"),
        ("speed --threads 99999", "take at most"),
        ("tune-escalation --threads 99999", "take at most"),
        ("tune-escalation --relative-accuracy 0.9 --target-accuracy 0.9 --out x", "give one of them."),
        ("tune-escalation", "Missing option '--out'."),
        ("cut-encoder", "Missing option '--out'."),
        ("quantize wrn-16-4", "Missing option '--out'."),
        ("train wrn-16-4 --threads 99999", "take at most"),
        ("train wrn-16-4 --device tpu", "'tpu' is not one of 'cpu', 'cuda'."),
        ("train ../x", "'../x' is not a name of a network"),
        ("export ../x", "'../x' is not a name of a network"),
        ("quantize a/b", "'a/b' is not a name of a network"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(
    arguments: str, message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert run(["models", *arguments.split()]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())


def test_an_error_into_a_pipe_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    shutil.copytree(weights_folder(), tmp_path / "weights")
    (tmp_path / "weights" / load_manifest().models[0].file).write_bytes(b"")
    (tmp_path / "data").mkdir()
    classes = load_manifest().hierarchy.fine
    for name in classes:
        picture = tmp_path / "data" / "test" / name / "0.png"
        picture.parent.mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(picture)
    (tmp_path / "data" / "hierarchy.json").write_text(json.dumps(load_manifest().hierarchy.content()))
    arguments = ["--dataset", str(tmp_path / "data"), "--models", str(tmp_path / "weights")]
    assert run(["models", "eval", "--all", *arguments]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "is not the file of the manifest" in line


def test_the_records_of_other_weights_lie_with_them(tmp_path: Path):
    assert records_folder(tmp_path) == tmp_path / "records"
    assert (records_folder(weights_folder()) / load_manifest().models[0].trained.record).is_file()


def test_eval_says_what_to_set_when_the_data_are_missing(tmp_path: Path):
    with pytest.raises(DataError, match="TERRACE_DATA"):
        invoke("eval", "--all", "--data", str(tmp_path))


@pytest.mark.skipif("TERRACE_DATA" not in os.environ, reason="needs CIFAR-100: set TERRACE_DATA")
def test_eval_measures_what_the_manifest_says():
    (row,) = json.loads(invoke("eval", names()[0], "--json").stdout)
    entry = load_manifest().models[0]
    assert row["images"] == 10_000
    assert row["coarse_accuracy"] == pytest.approx(entry.coarse_accuracy, abs=0.002)
    assert (row["name"], row["tier"], row["precision"]) == (entry.name, entry.tier, "int8")
    assert row["fine_accuracy"] is None
    assert row["parameters"] == entry.parameters
    assert row["ms_per_image"] > 0


def test_serving_commands_do_not_import_torch():
    script = (
        "import sys; import terrace.commands.models, models.session, models.verify, models.evaluate; "
        "bad = {'torch', 'onnx', 'onnxscript', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)


@pytest.mark.parametrize("command", ["train", "export", "quantize", "eval"])
def test_without_torch_the_extra_is_named(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in [name for name in sys.modules if name.startswith(("models.training", "models.export"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    out = ["--out", str(tmp_path)] if command == "quantize" else []
    with pytest.raises(MissingExtra, match=r"\[train\]"):
        invoke(command, names()[0], "--runs", str(tmp_path), *out)


def test_speed_names_the_run_that_has_no_fp32_file_before_it_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("terrace.commands.models.measure_ms_per_image", None)
    with pytest.raises(WeightsError, match="terrace models export mobilenet"):
        invoke("speed", "--runs", str(tmp_path))


@pytest.mark.parametrize("command", ["cut-encoder", "tune-escalation"])
def test_a_command_that_fails_leaves_no_new_folder_and_an_old_one_alone(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TERRACE_DATA", raising=False)
    with pytest.raises(DataError, match="TERRACE_DATA"):
        invoke(command, "--out", str(tmp_path / "new"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match="holds files"):
        invoke(command, "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("arguments", ["eval --all", "tune-escalation --out x", "cut-encoder --out x", "speed --fp32"])
def test_a_missing_extra_is_told_before_anything_is_read(
    arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in [name for name in sys.modules if name.startswith("models.export")]:
        monkeypatch.delitem(sys.modules, name)
    for library in ("onnxruntime", "onnx"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingExtra):
        invoke(*arguments.split(), "--models", str(tmp_path / "missing"))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds that do not depend on the machine."""
    monkeypatch.setattr("models.speed.least_ms_per_image", lambda *_: 2.0)
    monkeypatch.setattr("models.placing.least_ms_per_image", lambda *_: 2.0)


def test_list_wide_shows_costs_and_accuracy_per_parameter(tmp_path: Path):
    shown = invoke("list", "--wide").output.splitlines()
    entry = load_manifest().default_for("end")
    row = next(line.split() for line in shown if entry.name in line)
    assert row[-4:] == ["24.3", "0.9", f"{100 * 0.7903 / 0.828852:.1f}", "-"]
    listed = json.loads(invoke("list", "--wide", "--json").stdout)["models"][0]
    assert listed["costs"] == {"macs": 24279040, "peak_bytes": 944170}
    assert listed["accuracy_density"] == pytest.approx(95.35, abs=0.01)
    assert listed["ms_per_image"] is None
    # What an older manifest lacks comes from the files, if there are files.
    shutil.copytree(weights_folder(), tmp_path / "set")
    content = json.loads((tmp_path / "set" / "manifest.json").read_text())
    del content["models"][0]["costs"], content["models"][1]["costs"]
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(content))
    (tmp_path / "set" / content["models"][1]["file"]).unlink()
    first, second, _ = json.loads(invoke("list", "--wide", "--json", "--models", str(tmp_path / "set")).stdout)[
        "models"
    ]
    assert first["costs"] == listed["costs"]
    assert "costs" not in second


def test_fit_proposes_a_network_for_each_tier(quick: None):
    rows = json.loads(invoke("fit", "--json", "--threads", "1").stdout)
    assert [(row["tier"], row["cores"], row["within_ms"]) for row in rows] == [
        ("end", 1, 100.0),
        ("edge", 1, 100.0),
        ("cloud", 1, None),
    ]
    assert [each["outcome"] for row in rows for each in row["networks"]] == ["chosen"] * 3
    assert {each["ms_per_image"] for row in rows for each in row["networks"]} == {2.0}
    shown = invoke("fit", "--tier", "edge").output
    assert "resnet-34" in shown
    assert "mobilenet" not in shown


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--memory-mb", "100"], "too large"),
        (["--within-ms", "1"], "too slow"),
    ],
)
def test_fit_fails_with_the_reason_where_nothing_fits(quick: None, given: list[str], why: str):
    result = invoke("fit", "--tier", "edge", *given, "--json")
    assert result.exit_code == 1
    ((network,),) = [row["networks"] for row in json.loads(result.stdout)]
    assert network["outcome"] == why
    assert network["needs_bytes"] > 100_000_000
    assert "no network of the edge tier suits this machine" in result.stderr


def test_place_marks_the_cut_that_the_limit_allows(quick: None):
    result = invoke("place", "resnet-34", "--most-bytes", "2500", "--link-mbps", "1")
    assert result.exit_code == 0
    assert "on the device: the first " in " ".join(result.output.split())
    placed = json.loads(invoke("place", "resnet-34", "--most-bytes", "600", "--device-ms", "16", "--json").stdout)
    assert (placed["device_factor"], placed["upstream_factor"], placed["link_mbps"]) == (8, 1, None)
    cuts = placed["cuts"]
    assert cuts[0]["size_bytes"] == 3072
    assert [cut["size_bytes"] <= 600 for cut in cuts] == [cut["allowed"] for cut in cuts]
    least = min(cut["total_ms"] for cut in cuts if cut["allowed"])
    assert [cut["total_ms"] for cut in cuts if cut["chosen"]] == [least]
    assert cuts[-1]["layers"] == 37


@pytest.mark.parametrize(
    ("given", "code", "why"),
    [
        ([], 2, "--most-bytes"),
        (["--most-bytes", "9", "--device-ms", "1", "--device-factor", "2"], 2, "not both"),
        (["--most-bytes", "9"], 2, "the least is 100 bytes"),
    ],
)
def test_place_refuses_what_cannot_be(quick: None, given: list[str], code: int, why: str, capsys):
    assert run(["models", "place", "resnet-34", *given]) == code
    assert why in capsys.readouterr().err
