"""`terrace privacy audit`: what it attacks, and what it refuses; without torch."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from encryption.audit.rows import Row
from models.manifest import MANIFEST_NAME, Manifest, load_manifest
from terrace.cli import run
from terrace.commands.privacy import _show, _subjects, _table
from tierkit.distribution import install_command
from tierkit.types import EncoderKind

ROW = Row(
    encoder="conv1",
    network="resnet-34",
    form="uint8",
    attack="least-squares",
    ssim=0.987654,
    psnr_db=None,
    recognised=0.61,
    recognised_low=0.5,
    recognised_high=0.7,
    recognised_originals=0.62,
    judge="wrn-16-4",
    fine_accuracy=0.6066,
    accuracy_lost=0.01,
    test_images=10_000,
    payload_bytes=7191.4,
    device_ms_per_image=0.123,
    images=200,
    effort="",
    seconds=1.0,
)


def with_bottleneck() -> Manifest:
    manifest = load_manifest()
    conv1 = manifest.encoder("resnet-34.conv1")
    others = tuple(entry for entry in manifest.encoders if entry.kind is EncoderKind.CONV1)
    learned = conv1.model_copy(update={"kind": EncoderKind.BOTTLENECK})
    return manifest.model_copy(update={"encoders": (learned, *others)})


def chosen(*given: str | None, everything: bool = False) -> list[tuple[str, str, str]]:
    subjects = _subjects(with_bottleneck(), *given, everything=everything)
    return [(subject.encoder, subject.network.name, subject.form) for subject in subjects]


def test_all_is_pixels_then_first_convolutions_in_two_forms_then_what_was_learned():
    assert chosen(None, None, None, everything=True) == [
        ("none", "resnet-34", "pixels"),
        ("none", "wrn-16-4", "pixels"),
        ("conv1", "resnet-34", "float32"),
        ("conv1", "resnet-34", "uint8"),
        ("conv1", "wrn-16-4", "float32"),
        ("conv1", "wrn-16-4", "uint8"),
        ("bottleneck", "resnet-34", "uint8"),
    ]


def test_one_encoder_is_attacked_as_it_is_sent_unless_asked_otherwise():
    assert chosen("conv1", None, None) == [("conv1", "resnet-34", "uint8")]
    assert chosen("conv1", "wrn-16-4", "float16") == [("conv1", "wrn-16-4", "float16")]
    assert chosen("none", "wrn-16-4", None) == [("none", "wrn-16-4", "pixels")]


def test_the_attacks_on_a_learned_encoder_are_tried_on_the_first_convolution_before():
    assert chosen("bottleneck", None, None) == [("conv1", "resnet-34", "uint8"), ("bottleneck", "resnet-34", "uint8")]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "name what to attack with --encoder, or say --all."),
        ("--all --encoder conv1", "--all is everything"),
        ("--encoder conv2", "there is no encoder 'conv2': did you mean 'conv1'? There is: none, conv1, bottleneck."),
        ("--encoder conv1 --network resnet34", "'resnet34': did you mean 'resnet-34'?"),
        ("--encoder conv1 --form int8", "there is no form 'int8': did you mean 'uint8'?"),
        ("--encoder none --form uint8", "pixels have no form"),
        ("--encoder conv1 --images 2", "--images"),
    ],
)
def test_a_wrong_command_line_is_told_in_a_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["privacy", "audit", *arguments.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(["privacy", "audit", "--encoder", "conv1"]) == 1
    assert f"attacking an encoder needs the extra 'train': {install_command('train')}" in capsys.readouterr().err


@pytest.mark.train
def test_without_the_training_images_it_says_where_they_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    monkeypatch.delenv("TERRACE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert run(["privacy", "audit", "--encoder", "conv1"]) == 2
    assert "set --data or TERRACE_DATA" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.train
@pytest.mark.parametrize("place", [("--out", "file/x"), ("--page", "absent.md")], ids=["out", "page"])
def test_a_place_that_cannot_be_written_is_told_before_the_attack(
    place: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    attack = pytest.importorskip("encryption.audit.run")
    monkeypatch.setattr(attack, "run_audit", lambda *_, **__: pytest.fail("it attacks"))
    monkeypatch.setattr("models.dataset.Dataset.decoded_for", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert run(["privacy", "audit", "--encoder", "conv1", place[0], place[1]]) == 2
    assert place[1] in capsys.readouterr().err


@pytest.mark.train
def test_a_comparison_leaves_a_record_a_table_and_a_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra 'train' (torch)")
    compare = pytest.importorskip("encryption.training.compare")
    fronts = pytest.importorskip("encryption.front")
    setting = {"name": "light", "ssim": 0.3, "attack": "black-box", "fine_accuracy": 0.68, "payload_bytes": 400.0}
    setting |= {"device_ms_per_image": 0.1, "channels": 48, "levels": 8, "noise": 0.05, "adversary_weight": 3.0}
    found = fronts.Front(
        network="resnet-34",
        plain_accuracy=0.71,
        end_ms_per_image=0.2,
        end_network="mobilenet-v1-0.5",
        attacked_images=8,
        effort="1,000 queries",
        hardware="one core",
        settings=(fronts.Setting(minutes=10, **setting),),
    )
    monkeypatch.setattr(compare, "compare_encoders", lambda *_, **__: found)
    monkeypatch.setattr("models.dataset.Dataset.open", lambda *_: None)
    arguments = ["privacy", "front", str(tmp_path), "--queries", "1000", "--seed", "7"]
    assert run([*arguments, "--out", str(tmp_path / "comparison")]) == 0
    record, plot, table = sorted((tmp_path / "comparison").iterdir(), reverse=True)
    assert (plot.name, table.name) == ("front.svg", "front.csv")
    written = json.loads(record.read_text())
    assert (written["experiment"], written["seed"], written["config"]["queries"]) == ("privacy-front", 7, 1000)
    assert fronts.Front.model_validate(written["results"]) == found
    (tmp_path / "file").touch()
    monkeypatch.setattr(compare, "compare_encoders", lambda *_, **__: pytest.fail("it attacks"))
    assert run([*arguments, "--out", str(tmp_path / "file" / "x")]) == 2


def test_the_table_gives_each_figure_in_its_unit():
    learned = replace(ROW, encoder="bottleneck", attack="black-box", ssim=0.31, psnr_db=14.25, counts=False)
    figures = "61.0 % (50 to 70) | 60.7 % | 1.0 | 7,191 | 0.12"
    assert _table([ROW, learned]).markdown().splitlines()[2:] == [
        f"| conv1 | resnet-34 | uint8 | least-squares | 0.988 | same | {figures} | yes |",
        f"| bottleneck | resnet-34 | uint8 | black-box | 0.310 | 14.2 dB | {figures} | no |",
    ]


def test_the_screen_names_the_strongest_attack_and_says_what_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    _show([ROW, replace(ROW, attack="black-box", ssim=0.5, counts=False)])
    shown = capsys.readouterr().out
    assert "conv1 of resnet-34: least-squares gets most, SSIM 0.99; wrn-16-4 recognises 61.0 %" in shown
    assert "it does not count" in shown


def test_the_name_of_a_run_is_no_markup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = load_manifest().encoder("resnet-34.conv1")
    made = SimpleNamespace(export_encoder=lambda *arguments, **options: entry)
    monkeypatch.setitem(sys.modules, "encryption.training.export", made)
    name, out = "runs[/red][bold]1", tmp_path / "[bold]"
    assert run(["privacy", "export", name, "--out", str(out)]) == 0
    said, *files = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{entry.name} from {name}: fine ")
    assert files[-1] == str(out / MANIFEST_NAME)


def test_the_kept_record_holds_what_the_page_shows() -> None:
    root = Path(__file__).parents[3]
    (newest,) = sorted((root / "benchmarks/records").glob("privacy-audit-*.json"))[-1:]
    record = json.loads(newest.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in record["results"]["rows"]]
    assert _table(rows).markdown() in (root / "docs/results/privacy.md").read_text(encoding="utf-8")
