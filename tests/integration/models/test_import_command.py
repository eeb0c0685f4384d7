"""`terrace models import` as a person calls it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from models.importing import run as importing
from models.manifest import load_manifest
from terrace.cli import run
from tests.model_sets import COLOURS, colour_network, colour_pictures


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, entered, with `net.onnx`, `labels.txt` and `pictures/`."""
    monkeypatch.chdir(tmp_path)
    # Nothing here depends on the speed, and measuring it takes two seconds.
    monkeypatch.setattr(importing, "least_ms_per_image", lambda *_: 1.0)
    colour_network(tmp_path / "net.onnx")
    (tmp_path / "labels.txt").write_text("\n".join(COLOURS))
    colour_pictures(tmp_path / "pictures")
    return tmp_path


def enter(*more: str, file: str = "net.onnx", tier: str = "cloud") -> int:
    return run(["models", "import", file, "--models", "set", "--tier", tier, "--labels", "labels.txt", *more])


def test_it_says_what_it_has_entered(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert enter("--validate", "pictures") == 0
    shown = capsys.readouterr().out
    assert "net: 3 classes on the cloud tier, 32 x 32 pixels" in shown
    assert "right on 100.0 % of 12 pictures" in shown
    assert "licence: unknown" in shown
    assert "to give it to a running fleet: terrace models release create set --models set" in shown
    assert enter("--json", tier="end") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["entry"]["name"] == "net-end"
    assert [entry.name for entry in load_manifest(place / "set").models] == ["net-end", "net"]


def test_the_name_of_a_release_is_made_of_any_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["models", "import", "net.onnx", "--tier", "cloud", "--labels", "labels.txt", "--models"]
    assert run([*words, "Flowers of Spring_2"]) == 0
    assert "release create flowers-of-spring_2 --models 'Flowers of Spring_2'" in capsys.readouterr().out
    assert run([*words, "Ωμέγα"]) == 0
    assert "release create networks --models" in capsys.readouterr().out


def test_names_and_pixels_are_read_from_the_files_of_the_network(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "config.json").write_text(json.dumps({"id2label": dict(enumerate(COLOURS))}))
    processor = {"image_processor_type": "ViTImageProcessor", "size": 32, "resample": 2}
    (place / "preprocessor_config.json").write_text(json.dumps(processor))
    assert run(["models", "import", "net.onnx", "--models", "set", "--tier", "end"]) == 0
    shown = capsys.readouterr().out
    assert "preprocessor_config.json" in shown
    assert "assumed" not in shown
    manifest = load_manifest(place / "set")
    assert manifest.labels(manifest.models[0]) == COLOURS


def _unknown_key(place: Path) -> None:
    processor = {"image_processor_type": "ViTImageProcessor", "size": 32, "do_sharpen": True}
    (place / "preprocessor_config.json").write_text(json.dumps(processor))


def _other_names(place: Path) -> None:
    (place / "config.json").write_text(json.dumps({"id2label": dict(enumerate(reversed(COLOURS)))}))


def _no_network(place: Path) -> None:
    (place / "net.onnx").write_bytes(b"\x00no network")


def _latin(place: Path) -> None:
    (place / "labels.txt").write_bytes(b"r\xf6t\ngreen\nblue\n")


def _few(place: Path) -> None:
    (place / "labels.txt").write_text("red\ngreen\n")


def _double(place: Path) -> None:
    (place / "labels.txt").write_text("red\nred\nblue\n")


def _two_means(place: Path) -> None:
    (place / "preprocess.toml").write_text("size = [32, 32]\nmean = [123.7, 116.8, 103.9]\n")


def _another_size(place: Path) -> None:
    (place / "preprocess.toml").write_text("size = [64, 64]\n")


def _half_a_hierarchy(place: Path) -> None:
    (place / "hierarchy.toml").write_text(
        'name = "x"\nfine = ["red", "green"]\n[superclasses]\nall = ["red", "green"]\n'
    )


def _nothing(_place: Path) -> None: ...


@pytest.mark.parametrize(
    ("spoil", "more", "words"),
    [
        (_unknown_key, [], "'do_sharpen'"),
        (_other_names, [], "contradict"),
        (_no_network, [], "net.onnx is not an ONNX file"),
        (_latin, [], "not UTF-8"),
        (_few, [], "2 labels"),
        (_double, [], "'red' twice"),
        (_two_means, ["--preprocess", "preprocess.toml"], "scale = 1"),
        (_another_size, ["--preprocess", "preprocess.toml"], "[32, 32], and preprocess.toml says [64, 64]"),
        (_half_a_hierarchy, ["--hierarchy", "hierarchy.toml"], "'blue'"),
        (_nothing, ["--name", "../net"], "'../net' is not a name of a network"),
        (_nothing, ["--int8"], "--int8 and --calibrate go together"),
        (_nothing, ["--validate", "nowhere"], "nowhere"),
        (_nothing, ["--validate", "."], "called like no class"),
    ],
)
def test_what_cannot_be_entered_is_one_line_and_changes_nothing(
    place: Path,
    spoil: Callable[[Path], None],
    more: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    spoil(place)
    assert enter(*more) == 2
    said = capfd.readouterr()
    assert words in " ".join(said.err.splitlines()[-1:])
    assert "Traceback" not in said.err
    assert not (place / "set").exists()


def test_a_network_that_comes_in_int8_is_listed_as_that(place: Path) -> None:
    assert enter("--int8", "--calibrate", "pictures") == 0
    # Each wraps what was imported before.
    assert enter("--name", "again", file="set/net.onnx") == 0
    assert enter("--name", "once-more", file="set/again.onnx") == 0
    assert [entry.precision for entry in load_manifest(place / "set").models] == ["int8"] * 3


def test_damaged_pictures_are_left_out_and_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (place / "pictures" / "red" / "000.png").read_bytes()
    names = [f"{colour}/{name}" for colour, name in (("red", "cut.png"), ("blue", "001.png"), ("green", "no.jpg"))]
    for name in names:
        (place / "pictures" / name).write_bytes(whole[: len(whole) // 2])
    calibrated = ("--int8", "--calibrate", "pictures")
    assert enter("--validate", "pictures", *calibrated, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["entry"]["test_images"] == 11
    assert json.loads(captured.out)["entry"]["fine_accuracy"] == 1.0
    assert [captured.err.count(name) for name in names] == [2, 2, 2]


@pytest.mark.parametrize("option", [("--validate",), ("--int8", "--calibrate")])
def test_pictures_that_are_all_damaged_end_the_import(
    place: Path, option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (place / "pictures").rglob("*.png"):
        path.write_bytes(b"no picture")
        for number in range(2):
            path.with_suffix(f".{number}.png").write_bytes(b"no picture")
    assert enter(*option, "pictures") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert (said.count(".png"), "16 more" in said) == (20, True)
    assert not (place / "set").exists()


def test_classes_that_differ_between_tiers_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert enter() == 0
    before = (place / "set" / "manifest.json").read_bytes()
    (place / "labels.txt").write_text("red\ngreen\npurple\n")
    assert enter(tier="end") == 2
    said = capsys.readouterr().err
    assert "'purple'" in said
    assert "--hierarchy" in said
    assert (place / "set" / "manifest.json").read_bytes() == before
