"""`terrace models` as a person calls it, without torch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from models.manifest import load_manifest, weights_folder
from terrace.commands.models import app
from tierkit.errors import DataError, InvalidInput, MissingExtra, NotFound


def names() -> list[str]:
    return [entry.name for entry in load_manifest().models]


def invoke(*arguments: str, **environment: str):
    return CliRunner(env=environment).invoke(app, list(arguments), catch_exceptions=False)


def test_list_names_every_network():
    shown = invoke("list")
    assert shown.exit_code == 0
    assert all(name in shown.output for name in names())
    assert [entry["name"] for entry in json.loads(invoke("list", "--json").stdout)] == names()


def test_show_tells_how_a_network_was_trained():
    shown = invoke("show", names()[0])
    assert "training epochs" in shown.output
    assert json.loads(invoke("show", names()[0], "--json").stdout)["training"]["record"] == f"{names()[0]}.json"
    with pytest.raises(NotFound, match=names()[0]):
        invoke("show", "vgg")


def test_verify_passes_on_the_shipped_networks():
    assert invoke("verify").exit_code == 0
    assert [verdict["ok"] for verdict in json.loads(invoke("verify", "--json").stdout)] == [True] * len(names())


def test_verify_fails_on_a_changed_file_and_names_it(tmp_path: Path):
    shutil.copytree(weights_folder(), tmp_path / "weights")
    file = load_manifest().models[0].file
    (tmp_path / "weights" / file).write_bytes(b"")
    result = invoke("verify", TERRACE_WEIGHTS=str(tmp_path / "weights"))
    assert result.exit_code == 1
    assert file in result.output


def test_speed_measures_each_batch_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("models.speed._LEAST_S", 0.001)
    (row,) = json.loads(invoke("speed", names()[0], "--batch", "1", "--batch", "4", "--json").stdout)
    assert set(row["ms_per_image"]) == {"1", "4"}
    assert names()[0] in invoke("speed", names()[0], "--batch", "2").output


def test_eval_wants_names_or_all():
    with pytest.raises(InvalidInput, match="--all"):
        invoke("eval")
    with pytest.raises(InvalidInput, match="--all"):
        invoke("eval", names()[0], "--all")


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


@pytest.mark.parametrize("command", ["train", "export", "quantize"])
def test_without_torch_the_extra_is_named(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in [name for name in sys.modules if name.startswith(("models.training", "models.export"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"terrace\[train\]"):
        invoke(command, names()[0], "--runs", str(tmp_path))
