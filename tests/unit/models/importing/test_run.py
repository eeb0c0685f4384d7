"""A stranger's ONNX file becomes a network of a model set, or a clear error and no change."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import TensorProto, helper
from PIL import Image

from models.importing import modelset, run
from models.importing.graph import signature
from models.importing.reading import read_onnx
from models.importing.run import Wish, import_network
from models.manifest import load_manifest
from models.session import load_model
from models.verify import verify_entry
from tests.unit.models.importing.conftest import COLOURS, Make, picture
from tierkit.errors import DataError, InvalidInput, SetupError, TerraceError
from tierkit.types import Tier


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on the speed, and measuring it takes two seconds."""
    monkeypatch.setattr(run, "least_ms_per_image", lambda *_: 1.0)


@pytest.fixture
def wish(tmp_path: Path, labels: Path) -> Callable[..., Wish]:
    def make(file: Path, preprocess: str | None = "size = [6, 8]", **more: Any) -> Wish:
        if preprocess is not None:
            (tmp_path / "preprocess.toml").write_text(preprocess)
            more["preprocess"] = tmp_path / "preprocess.toml"
        return Wish(**{"file": file, "models": tmp_path / "set", "tier": Tier.END, "labels": labels, **more})

    return make


def answers(models: Path, images: Any, name: str | None = None) -> list[str]:
    """What the networks of the set say when they are served."""
    manifest = load_manifest(models)
    entry = manifest.models[0] if name is None else manifest.entry(name)
    model = load_model(entry, models)
    logits = model.run({"images": np.stack(images)}, ["logits"])["logits"]
    return [manifest.labels(entry)[label] for label in logits.argmax(axis=1)]


@pytest.mark.parametrize(
    ("file", "preprocess"),
    [
        ({}, "size = [6, 8]"),
        ({"layout": "nhwc"}, "size = [6, 8]"),
        ({"size": (6, 8)}, None),
        ({"size": (6, 8), "softmax": True}, None),
        ({"element": TensorProto.FLOAT16}, "size = [6, 8]\nmean = [0.5, 0.5, 0.5]\nstd = [0.2, 0.2, 0.2]"),
        ({"batch": 1}, "size = [6, 8]"),
        ({"batch": 4}, "size = [6, 8]"),
        ({"factor": 0.01}, "size = [6, 8]\nscale = 1\nmean = [123, 117, 104]"),
    ],
    ids=["nchw", "nhwc", "size in the file", "probabilities", "fp16", "batch of one", "batch of four", "0..255"],
)
def test_it_answers_plain_pictures(wish: Any, make: Make, file: dict[str, Any], preprocess: str | None) -> None:
    asked = wish(make(**file), preprocess)
    report = import_network(asked)
    assert report.entry.input_shape == (6, 8, 3)
    assert report.difference < 1e-3
    assert answers(asked.models, [picture(colour) for colour in COLOURS]) == list(COLOURS)


@pytest.mark.parametrize("tail", ["fixed", "half the mean of the batch", "range of the batch"])
def test_a_network_that_needs_single_pictures_gets_them(
    wish: Any, make: Make, tmp_path: Path, tail: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its graph fixes the batch, or its answers depend on the other pictures of a batch."""
    told: list[str] = []
    pictures = folders(tmp_path / "pictures", {colour: colour for colour in COLOURS})
    asked = wish(make(tail=tail), validate=pictures, calibrate=pictures)
    report = import_network(asked, told.append)
    assert report.one_by_one
    assert [line for line in told if "one picture at a time" in line]
    assert "ReshapeHelper" not in capfd.readouterr().err
    model = load_model(report.entry, asked.models)
    images = np.stack([picture(colour) for colour in ("blue", "red", "green", "red", "red")])
    together = model.run({"images": images}, ["probabilities"])["probabilities"]
    alone = [model.run({"images": images[at : at + 1]}, ["probabilities"])["probabilities"][0] for at in range(5)]
    assert np.array_equal(together, alone)
    assert report.entry.coarse_accuracy == 1.0
    assert together.argmax(axis=1).tolist() == [2, 0, 1, 0, 0]


@pytest.mark.parametrize("file", [{"tail": "mean of the batch"}, {"factor": 0.0}, {"factor": 0.0, "softmax": True}])
def test_a_network_that_gives_every_picture_the_same_scores_is_refused(
    wish: Any, make: Make, file: dict[str, Any]
) -> None:
    asked = wish(make(**file))
    with pytest.raises(InvalidInput, match="every picture the same scores"):
        import_network(asked)
    assert not (asked.models / "manifest.json").exists()


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_small_and_saturated_differences_are_answers(wish: Any, make: Make, factor: float) -> None:
    asked = wish(make(factor=factor, softmax=True))
    import_network(asked)
    assert answers(asked.models, [picture(colour) for colour in COLOURS]) == list(COLOURS)


def test_batches_of_another_fixed_size_are_refused(wish: Any, make: Make) -> None:
    model = onnx.load(make(batch=4, tail="fixed"))
    next(each for each in model.graph.initializer if each.name == "form").CopyFrom(
        onnx.numpy_helper.from_array(np.array([4, 3]), "form")
    )
    file = make("four.onnx")
    file.write_bytes(model.SerializeToString())
    with pytest.raises(DataError, match="batches of 4"):
        import_network(wish(file))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_one_channel_gets_grey_values(wish: Any, make: Make, layout: str) -> None:
    size = (6, 8)
    asked = wish(make(channels=1, layout=layout, size=size), "mean = [0.5]\nstd = [0.25]")
    report = import_network(asked)
    assert report.preprocess.colour == "grey"
    assert "colour" not in " ".join(report.assumed)
    model = load_model(report.entry, asked.models)
    colours = np.array([[90, 90, 90], [200, 10, 70], [0, 255, 3]], np.uint8)
    images = np.broadcast_to(colours[:, None, None, :], (3, *size, 3))
    grey = np.array([np.asarray(Image.fromarray(image).convert("L")).mean() for image in images])
    logits = model.run({"images": np.ascontiguousarray(images)}, ["logits"])["logits"]
    assert logits[:, 0] == pytest.approx(10 * (grey / 255 - 0.5) / 0.25, abs=1e-4)


def test_colours_contradict_one_channel(wish: Any, make: Make) -> None:
    with pytest.raises(InvalidInput, match="colour"):
        import_network(wish(make(channels=1, size=(6, 8)), 'colour = "bgr"'))
    with pytest.raises(InvalidInput, match="3 channels"):
        import_network(wish(make(size=(6, 8)), 'colour = "grey"'))


def test_a_shape_that_fits_both_layouts_is_not_guessed(wish: Any, make: Make) -> None:
    with pytest.raises(InvalidInput, match="layout"):
        import_network(wish(make(size=("h", 3)), None))


@pytest.mark.parametrize("stated", ["mean = [0.5, 0.5, 0.5]", "scale = 255"])
def test_a_network_of_bytes_gets_pixels_as_they_are(wish: Any, make: Make, stated: str) -> None:
    model = onnx.load(make(size=(6, 8)))
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    model.graph.node.insert(0, helper.make_node("Cast", ["input"], ["wide"], to=TensorProto.FLOAT))
    model.graph.node[1].input[0] = "wide"
    file = make("bytes.onnx")
    file.write_bytes(model.SerializeToString())
    assert {line.split()[0] for line in import_network(wish(file, None)).assumed} == {"resize", "resample", "colour"}
    with pytest.raises(InvalidInput, match="the network's input says"):
        import_network(wish(file, stated))


VIT = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 6, "width": 8},
    "resample": 2,
    "do_rescale": True,
}


def test_the_source_of_the_preprocessing_is_named(wish: Any, make: Make, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT))
    report = import_network(wish(make(size=(6, 8)), None))
    assert report.assumed == ()
    assert report.sources == ("the shape of the network's input", "preprocessor_config.json")
    assert (report.entry.resize, report.entry.resample, report.entry.resize_to) == ("squash", "bilinear", None)


def test_what_is_not_understood_is_refused_unless_all_is_said(wish: Any, make: Make, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT | {"do_sharpen": True}))
    file = make(size=(6, 8))
    for some in (None, 'resize = "squash"\nscale = 255'):
        with pytest.raises(DataError, match=r"'do_sharpen'.*--preprocess"):
            import_network(wish(file, some))
    told: list[str] = []
    whole = 'resize = "squash"\nresample = "bilinear"\ncolour = "rgb"\nscale = 255\nmean = 0\nstd = 1'
    report = import_network(wish(file, whole), told.append)
    assert report.sources == ("the shape of the network's input", "preprocess.toml")
    assert [line for line in told if "do_sharpen" in line]


ALL = 'size = [6, 8]\nresize = "squash"\nresample = "bilinear"\ncolour = "rgb"\nscale = 255\nmean = 0\nstd = 1'


@pytest.mark.parametrize("name", ["preprocessor.json", "image_processor_config.json", "transforms.yaml"])
def test_a_file_about_pixels_that_is_not_read_is_refused_unless_all_is_said(
    wish: Any, make: Make, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=name):
        import_network(wish(make()))
    told: list[str] = []
    import_network(wish(make(), ALL), told.append)
    assert any(name in line for line in told)


@pytest.mark.parametrize("name", ["preprocess.toml", "net.toml"])
def test_a_preprocess_toml_that_is_there_must_be_given(wish: Any, make: Make, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("size = [6, 8]\nscale = 1")
    with pytest.raises(InvalidInput, match="--preprocess"):
        import_network(wish(make(size=(6, 8)), None))


def test_a_preprocess_toml_other_than_the_one_given_is_told(wish: Any, make: Make, tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text("scale = 1")
    told: list[str] = []
    import_network(wish(make()), told.append)
    assert any("net.toml" in line for line in told)


def test_a_file_of_open_clip_is_read(wish: Any, make: Make, tmp_path: Path) -> None:
    content = {"preprocess_cfg": {"size": 8, "mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    report = import_network(wish(make(size=(8, 8)), None))
    assert (report.preprocess.mean, report.assumed) == ((0.5,) * 3, ())


def test_another_layout_than_that_of_the_network_is_a_contradiction(wish: Any, make: Make, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT | {"data_format": "channels_last"}))
    with pytest.raises(InvalidInput, match="layout"):
        import_network(wish(make(size=(6, 8)), None))


def test_a_contradiction_is_refused_even_if_all_is_said(wish: Any, make: Make, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT))
    whole = 'resize = "squash"\nresample = "bicubic"\ncolour = "rgb"\nscale = 255\nmean = 0.5\nstd = 0.5'
    with pytest.raises(InvalidInput, match="resample"):
        import_network(wish(make(size=(6, 8)), whole))


def scaled(file: Path, *steps: tuple[str, float]) -> Path:
    """The network with some operators before it."""
    model = onnx.load(file)
    last, nodes = "input", []
    for number, (kind, value) in enumerate(steps):
        tensor = onnx.numpy_helper.from_array(np.array([value] * 3, np.float32).reshape(3, 1, 1), f"constant-{number}")
        model.graph.initializer.append(tensor)
        nodes.append(helper.make_node(kind, [last, tensor.name], [f"step-{number}"]))
        last = f"step-{number}"
    model.graph.node[0].input[0] = last
    nodes += [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    file.write_bytes(model.SerializeToString())
    return file


@pytest.mark.parametrize(
    ("steps", "scale"),
    [
        ([("Mul", 1 / 255)], 1.0),
        ([("Div", 127.5), ("Sub", 1.0)], 1.0),
        ([("Sub", 123.7)], 1.0),
        ([("Sub", 123.7), ("Mul", 0.017)], 1.0),
        ([("Sub", 0.485), ("Div", 0.229)], 255.0),
        ([("Mul", 2.0), ("Add", -1.0)], 255.0),
        ([], None),
    ],
)
def test_a_network_that_scales_its_pixels_is_not_given_scaled_ones(
    wish: Any, make: Make, tmp_path: Path, steps: list[tuple[str, float]], scale: float | None
) -> None:
    file = scaled(make(size=(6, 8)), *steps)
    report = import_network(wish(file, None))
    assert report.preprocess.scale == scale or scale is None
    assert ("scale" in " ".join(report.assumed)) is (scale is None)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(VIT | {"do_rescale": scale != 255}))
    if scale is not None:
        with pytest.raises(InvalidInput, match="first operators"):
            import_network(wish(file, None))


def test_who_knows_better_than_the_first_operators_may_say_so(wish: Any, make: Make) -> None:
    told: list[str] = []
    report = import_network(wish(scaled(make(size=(6, 8)), ("Mul", 1 / 255)), "scale = 255"), told.append)
    assert report.preprocess.scale == 255
    assert [line for line in told if "first operators" in line]


@pytest.mark.parametrize("step", [("Pow", 0.5), ("Mul", 0.5), ("Add", 3.0), ("Max", 0.0)])
def test_first_operators_that_are_not_understood_end_the_import_unless_the_scale_is_said(
    wish: Any, make: Make, step: tuple[str, float]
) -> None:
    file = scaled(make(size=(6, 8)), step)
    with pytest.raises(InvalidInput, match=step[0]):
        import_network(wish(file, None))
    assert import_network(wish(file, "scale = 255")).preprocess.scale == 255


def test_a_network_that_normalises_bytes_gets_bytes(wish: Any, make: Make) -> None:
    model = onnx.load(make(size=(6, 8)))
    for name, value in {"one": 1, "zero": 0, "mean": 120, "variance": 3600}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(3, value, np.float32), name))
    model.graph.node.insert(
        0, helper.make_node("BatchNormalization", ["input", "one", "zero", "mean", "variance"], ["normal"])
    )
    model.graph.node[1].input[0] = "normal"
    file = make("normalising.onnx")
    file.write_bytes(model.SerializeToString())
    report = import_network(wish(file, None))
    assert report.preprocess.scale == 1
    assert not [line for line in report.assumed if "scale" in line]


def named(models: Path) -> tuple[str, ...]:
    manifest = load_manifest(models)
    return manifest.labels(manifest.models[0])


def test_class_names_of_the_file_are_used_and_compared(wish: Any, make: Make, labels: Path) -> None:
    file = make(metadata={"names": "{0: 'red', 1: 'green', 2: 'blue'}"})
    import_network(wish(file, labels=None))
    assert named(wish(file).models) == COLOURS
    import_network(wish(file))
    labels.write_text("green\nred\nblue\n")
    with pytest.raises(InvalidInput, match="class 0 is 'green' and 'red'"):
        import_network(wish(file))


@pytest.mark.parametrize("key", ["class_to_idx", "label2id", "class_mapping"])
def test_all_class_names_are_compared(wish: Any, make: Make, tmp_path: Path, key: str) -> None:
    turned = {colour: number for number, colour in enumerate(reversed(COLOURS))}
    with pytest.raises(InvalidInput, match=key):
        import_network(wish(make(metadata={"names": str(list(COLOURS)), key: json.dumps(turned)})))
    with pytest.raises(InvalidInput, match=key):
        import_network(wish(make(metadata={"config": json.dumps({key: turned})})))
    content = {"id2label": dict(enumerate(COLOURS)), key: turned}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=key):
        import_network(wish(make()))


def test_class_names_of_a_configuration_are_used(wish: Any, make: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"id2label": dict(enumerate(COLOURS))}))
    import_network(wish(make(), labels=None))
    assert named(wish(make()).models) == COLOURS


def test_labels_that_do_not_exclude_each_other_are_refused_whatever_is_said_of_pixels(
    wish: Any, make: Make, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"problem_type": "multi_label_classification"}))
    whole = 'resize = "squash"\nresample = "bilinear"\ncolour = "rgb"\nscale = 255\nmean = 0\nstd = 1'
    with pytest.raises(InvalidInput, match="problem_type"):
        import_network(wish(make(size=(6, 8)), whole))


def test_without_class_names_there_is_nothing_to_import(wish: Any, make: Make) -> None:
    with pytest.raises(InvalidInput, match="--labels"):
        import_network(wish(make(), labels=None))


@pytest.mark.parametrize(("tail", "given"), [("zipmap", False), ("zipmap", True), ("numbered zipmap", True)])
def test_a_zipmap_is_taken_off(wish: Any, make: Make, labels: Path, tail: str, given: bool) -> None:
    asked = wish(make(tail=tail), labels=labels if given else None)
    import_network(asked)
    assert named(asked.models) == COLOURS
    assert answers(asked.models, [picture(colour) for colour in COLOURS]) == list(COLOURS)


def test_a_zipmap_without_an_order_is_refused(wish: Any, make: Make) -> None:
    with pytest.raises(InvalidInput, match="order"):
        import_network(wish(make(tail="shuffled zipmap")))


def test_a_network_that_learnt_bgr_gets_bgr(wish: Any, make: Make) -> None:
    asked = wish(make(), 'size = [6, 8]\ncolour = "bgr"\nmean = [0.1, 0.2, 0.3]')
    import_network(asked)
    assert answers(asked.models, [picture(colour) for colour in COLOURS]) == ["blue", "green", "red"]


def test_mean_and_spread_are_by_colour(wish: Any, make: Make) -> None:
    asked = wish(make(), "size = [6, 8]\nmean = [0.6, 0, 0.6]\nstd = [1, 5, 0.01]")
    import_network(asked)
    model = load_model(load_manifest(asked.models).models[0], asked.models)
    images = np.stack([picture("red"), picture("blue")])
    expected = 10 * (images.mean(axis=(1, 2)) / 255 - [0.6, 0, 0.6]) / [1, 5, 0.01]
    assert model.run({"images": images}, ["logits"])["logits"] == pytest.approx(expected, rel=1e-3)


def test_one_file_serves_several_tiers_and_answers_the_same_classes(wish: Any, make: Make) -> None:
    file = make()
    for tier in (Tier.CLOUD, Tier.END):
        import_network(wish(file, tier=tier))
    manifest = load_manifest(wish(file).models)
    assert [(entry.name, entry.tier, entry.target) for entry in manifest.models] == [
        ("net-end", "end", "coarse"),
        ("net", "cloud", "fine"),
    ]
    assert manifest.hierarchy.is_flat
    assert manifest.hierarchy.fine == COLOURS


def test_labels_in_another_order_are_put_in_the_order_of_the_set(
    wish: Any, make: Make, labels: Path, tmp_path: Path
) -> None:
    import_network(wish(make("one.onnx"), tier=Tier.CLOUD))
    other = tmp_path / "other.txt"
    other.write_text("blue\nred\ngreen\n")
    asked = wish(make("two.onnx"), labels=other)
    import_network(asked)
    # The file's first output is now called blue, and a red picture makes that one largest.
    assert answers(asked.models, [picture(colour) for colour in COLOURS], "two") == ["blue", "red", "green"]


HIERARCHY = (
    'name = "colours"\nfine = ["red", "green", "blue"]\n[superclasses]\nwarm = ["red"]\ncold = ["green", "blue"]\n'
)


def test_superclasses_on_the_end_tier(wish: Any, make: Make, tmp_path: Path) -> None:
    hierarchy, coarse = tmp_path / "hierarchy.toml", tmp_path / "coarse.txt"
    hierarchy.write_text(HIERARCHY)
    coarse.write_text("warm\ncold\n")
    import_network(wish(make("fine.onnx"), tier=Tier.EDGE, hierarchy=hierarchy))
    asked = wish(make("coarse.onnx", classes=2), labels=coarse)
    assert import_network(asked).entry.target == "coarse"
    assert answers(asked.models, [picture("red"), picture("green")]) == ["warm", "cold"]


def folders(root: Path, colours: dict[str, str], each: int = 6) -> Path:
    """Pictures in folders by class: `colours` says what the folder of a class holds."""
    for name, colour in colours.items():
        (root / name).mkdir(parents=True)
        for number in range(each):
            Image.fromarray(picture(colour, 20 + number % 20, 30)).save(root / name / f"{number}.png")
    return root


def test_accuracy_temperature_and_int8(wish: Any, make: Make, tmp_path: Path) -> None:
    pictures = folders(tmp_path / "pictures", {colour: colour for colour in COLOURS})
    report = import_network(wish(make(), validate=pictures, calibrate=pictures))
    assert (report.entry.coarse_accuracy, report.entry.test_images) == (1.0, 18)
    assert report.entry.precision == "int8"
    assert report.same_answers == 1.0
    assert report.mistake is None
    assert answers(wish(make()).models, [picture(colour) for colour in COLOURS]) == list(COLOURS)


def test_a_likely_mistake_is_named(wish: Any, make: Make, tmp_path: Path) -> None:
    # The network takes BGR, as its labels show, and nobody has said so.
    pictures = folders(tmp_path / "pictures", {"red": "blue", "green": "green", "blue": "red"})
    mistake = import_network(wish(make(), validate=pictures)).mistake
    assert mistake is not None
    assert mistake.change == 'colour = "bgr"'
    assert mistake.accuracy == 1.0
    assert mistake.given_accuracy == pytest.approx(1 / 3)


def test_a_mistake_is_found_whatever_class_has_most_pictures(
    wish: Any, make: Make, labels: Path, tmp_path: Path
) -> None:
    """The first 200 of these 330 pictures are of one class, to which the order of colours makes no difference."""
    labels.write_text("rose\ngrass\nsky\n")
    folders(tmp_path / "pictures", {"grass": "green"}, each=210)
    pictures = folders(tmp_path / "pictures", {"rose": "blue", "sky": "red"}, each=60)
    mistake = import_network(wish(make(), validate=pictures)).mistake
    assert mistake is not None
    assert (mistake.change, mistake.images) == ('colour = "bgr"', 200)


def _nan(path: Path) -> Path:
    model = onnx.load(path)
    weights = onnx.numpy_helper.to_array(model.graph.initializer[1]).copy()
    weights[0, 0] = np.nan
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(weights, "weights"))
    path.write_bytes(model.SerializeToString())
    return path


def _unknown_operator(path: Path) -> Path:
    model = onnx.load(path)
    model.graph.node[0].op_type = "Frobnicate"
    path.write_bytes(model.SerializeToString())
    return path


def _endless(carried: str) -> Callable[[Path], Path]:
    """A loop of 2^62 rounds after the scores, which carries them, or a constant that is added to them."""

    def change(path: Path) -> Path:
        model, helper = onnx.load(path), onnx.helper
        graph = model.graph
        rounds, goes = np.array(2**62), np.array(True)
        graph.initializer.extend(
            onnx.numpy_helper.from_array(value, name)
            for name, value in (("rounds", rounds), ("goes", goes), ("zero", np.zeros(1, np.float32)))
        )
        graph.node[-1].output[0] = "before"
        body = helper.make_graph(
            [helper.make_node("Identity", ["go"], ["goes_on"]), helper.make_node("Identity", ["value"], ["next"])],
            "round",
            [
                helper.make_tensor_value_info("number", onnx.TensorProto.INT64, []),
                helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, []),
                helper.make_tensor_value_info("value", onnx.TensorProto.FLOAT, None),
            ],
            [
                helper.make_tensor_value_info("goes_on", onnx.TensorProto.BOOL, []),
                helper.make_tensor_value_info("next", onnx.TensorProto.FLOAT, None),
            ],
        )
        graph.node.append(helper.make_node("Loop", ["rounds", "goes", carried], ["after"], body=body))
        graph.node.append(helper.make_node("Add", ["before", "after"], ["scores"]))
        path.write_bytes(model.SerializeToString())
        return path

    return change


def _external(location: str) -> Callable[[Path], Path]:
    def change(path: Path) -> Path:
        model = onnx.load(path)
        tensor = model.graph.initializer[1]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        path.write_bytes(model.SerializeToString())
        return path

    return change


def _external_bytes(name: bytes) -> Callable[[Path], Path]:
    """Weights in a file whose name is no text."""

    def change(path: Path) -> Path:
        stand_in = b"x" * len(name)
        _external(stand_in.decode())(path)
        path.write_bytes(path.read_bytes().replace(stand_in, name))
        return path

    return change


def _unknown_type(path: Path) -> Path:
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.elem_type = 102
    path.write_bytes(model.SerializeToString())
    return path


def _operator_bytes(path: Path) -> Path:
    """An operator whose name is no text."""
    model = onnx.load(path)
    model.graph.node[0].op_type = "x" * 9
    path.write_bytes(model.SerializeToString().replace(b"x" * 9, b"xxxxxxxx\xff"))
    return path


def _foreign_operator(path: Path) -> Path:
    model = onnx.load(path)
    model.graph.node[0].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    path.write_bytes(model.SerializeToString())
    return path


def _opset(version: int) -> Callable[[Path], Path]:
    def change(path: Path) -> Path:
        model = onnx.load(path)
        model.opset_import[0].version = version
        path.write_bytes(model.SerializeToString())
        return path

    return change


def _sparse(path: Path) -> Path:
    """Weights outside the folder, where fewer people look."""
    model = onnx.load(path)
    values = TensorProto(name="hidden", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    values.external_data.add(key="location", value="../labels.txt")
    indices = onnx.numpy_helper.from_array(np.array([0]), "indices")
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=values, indices=indices, dims=[3]))
    path.write_bytes(model.SerializeToString())
    return path


def _fixed_inside(path: Path) -> Path:
    """A shape that fits no other size than the one that it was exported for, which the file does not say."""
    model = onnx.load(path)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 3, 30, 30]), "shape"))
    reshape = helper.make_node("Reshape", ["input", "shape"], ["reshaped"])
    model.graph.node[0].input[0] = "reshaped"
    nodes = [reshape, *(onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    path.write_bytes(model.SerializeToString())
    return path


def _two_inputs(path: Path) -> Path:
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["n", 3, "h", "w"]))
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("carried", ["before", "zero"])
def test_a_loop_that_does_not_end_is_an_error(
    wish: Any, make: Make, monkeypatch: pytest.MonkeyPatch, carried: str
) -> None:
    monkeypatch.setattr("models.importing.running._LONGEST_S", 0.3)
    with pytest.raises(DataError, match="loop"):
        import_network(wish(_endless(carried)(make())))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_nan, "NaN"),
        (_unknown_operator, "opset 18 .*: Frobnicate"),
        (_foreign_operator, r"cannot load [^\[]*com\.example"),
        (_opset(6), "opset 6 .* from 7 to"),
        (_opset(1000), "opset 1000 .* from 7 to"),
        (_fixed_inside, "fails on 1 images of 6 x 8"),
        (_sparse, "only files in its own folder"),
        (lambda path: path.parent, "not a file"),
        (_external("../labels.txt"), "only files in its own folder"),
        (_external("/etc/passwd"), "only files in its own folder"),
        (_external("weights.bin"), "not there"),
        (_external(""), "only files in its own folder"),
        (_external("w" * 5000), "no file is called"),
        (_external_bytes(b"weights\0.bin"), "no file is called"),
        (_external_bytes(b"weights\xff.bin"), "no file is called"),
        (_unknown_type, "takes 102"),
        (_operator_bytes, "does not have"),
        (_two_inputs, "2 inputs"),
        (lambda path: path.write_bytes(b"\x08\x07no onnx") and path, "not an ONNX"),
        (lambda path: path.write_bytes(b"") is None or path, "not an ONNX"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]) and path, "ONNX|damaged"),
        (lambda path: path.with_name("missing.onnx"), "cannot read"),
    ],
)
def test_a_file_of_no_use_is_one_error_and_changes_nothing(
    wish: Any, make: Make, change: Callable[[Path], Path], words: str
) -> None:
    first = wish(make("first.onnx"))
    import_network(first)
    before = {path.name: path.read_bytes() for path in first.models.iterdir()}
    with pytest.raises(TerraceError, match=words):
        import_network(wish(change(make("second.onnx"))))
    assert {path.name: path.read_bytes() for path in first.models.iterdir()} == before


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_file_is_read_or_refused_in_words(make: Make, data: st.DataObject) -> None:
    path = make("whole.onnx")
    whole = bytearray(_external("weights.bin")(path).read_bytes() if data.draw(st.booleans()) else path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + 1] = data.draw(st.binary(max_size=2) | st.sampled_from([b"\0", b"\xff"]))
    changed = path.with_name("changed.onnx")
    changed.write_bytes(whole)
    try:
        assert signature(read_onnx(changed), 3).classes == 3
    except TerraceError as exc:
        assert str(exc)  # noqa: PT017 - some changes do no harm


@pytest.mark.parametrize("killed_at", ["write_new", "save_manifest"])
def test_killed_between_two_writes_the_set_is_as_it_was(
    wish: Any, make: Make, killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = wish(make())
    import_network(asked)
    before = load_manifest(asked.models)
    other = wish(make(factor=20.0))
    with monkeypatch.context() as patch:
        patch.setattr(modelset, killed_at, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            import_network(other)
    assert load_manifest(asked.models) == before
    assert verify_entry(before.models[0], before, asked.models).ok
    # The next one goes through, and keeps the file that a running service may offer.
    import_network(other)
    after = load_manifest(asked.models)
    assert after.models[0].sha256 != before.models[0].sha256
    assert verify_entry(after.models[0], after, asked.models).ok
    assert verify_entry(before.models[0], before, asked.models).ok


def test_a_manifest_that_cannot_be_written_leaves_no_network_behind(
    wish: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_network(wish(make()))
    models = wish(make()).models
    before = {path.name: path.read_bytes() for path in models.iterdir()}

    def full(*_: Any) -> None:
        raise SetupError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(modelset, "save_manifest", full)
        with pytest.raises(SetupError):
            import_network(wish(make(factor=3.0)))
    assert {path.name: path.read_bytes() for path in models.iterdir()} == before


def test_what_a_killed_import_was_writing_goes_with_the_next(wish: Any, make: Make) -> None:
    import_network(wish(make()))
    left = wish(make()).models / ".net.onnx.x1y2z3"
    left.write_bytes(b"half")
    import_network(wish(make(factor=3.0)))
    assert not left.exists()


def test_a_picture_beyond_all_reason_is_refused(wish: Any, make: Make) -> None:
    with pytest.raises(InvalidInput, match="60000"):
        import_network(wish(make(size=(60_000, 60_000)), preprocess=None))


def test_what_nothing_says_is_told(wish: Any, make: Make) -> None:
    assert "scale = 255.0" in import_network(wish(make())).assumed


def test_few_labelled_pictures_make_no_temperature(wish: Any, make: Make, tmp_path: Path) -> None:
    for colour in ("red", "green"):
        (tmp_path / "labelled" / colour).mkdir(parents=True)
        Image.fromarray(picture(colour)).save(tmp_path / "labelled" / colour / "x.png")
    entry = import_network(wish(make(), validate=tmp_path / "labelled")).entry
    assert (entry.temperature, entry.test_images) == (1.0, 2)
    assert entry.ece_after == entry.ece_before


def test_killed_before_the_set_had_a_manifest_it_can_be_begun_again(
    wish: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = wish(make())
    with monkeypatch.context() as patch:
        patch.setattr(modelset, "save_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            import_network(asked)
    import_network(asked)
    assert answers(asked.models, [picture("red")]) == ["red"]


def test_a_network_of_another_import_that_is_under_way_is_no_bar(wish: Any, make: Make) -> None:
    asked = wish(make())
    asked.models.mkdir()
    (asked.models / "other.onnx").write_bytes(b"")
    (asked.models / ".third.onnx.abc").write_bytes(b"")
    import_network(asked)
    assert answers(asked.models, [picture("red")]) == ["red"]


def test_two_imports_at_once_both_stay(wish: Any, make: Make) -> None:
    wishes = [wish(make(f"{tier}.onnx"), tier=tier) for tier in Tier]
    with ThreadPoolExecutor(len(wishes)) as pool:
        list(pool.map(import_network, wishes))
    assert [entry.tier for entry in load_manifest(wishes[0].models).models] == list(Tier)


def test_a_folder_of_other_files_does_not_become_a_set(wish: Any, make: Make, tmp_path: Path) -> None:
    file = make()
    content = file.read_bytes()
    with pytest.raises(InvalidInput, match=r"holds '.*' and no manifest\.json"):
        import_network(wish(file, models=tmp_path))
    assert file.read_bytes() == content


def test_the_file_itself_may_lie_in_the_set(wish: Any, make: Make) -> None:
    asked = wish(make())
    asked.models.mkdir()
    file = asked.file.rename(asked.models / asked.file.name)
    content = file.read_bytes()
    import_network(wish(file))
    assert file.read_bytes() == content
    assert answers(asked.models, [picture("red")]) == ["red"]


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [({}, "unknown"), ({"license": "CC-BY-4.0"}, "CC-BY-4.0"), ({"license": "\x1b"}, "unknown")],
)
def test_the_licence_is_what_the_file_says_or_unknown(
    wish: Any, make: Make, metadata: dict[str, str], licence: str
) -> None:
    assert licence in import_network(wish(make(metadata=metadata))).entry.licence


def test_pictures_of_classes_do_for_a_network_of_superclasses(wish: Any, make: Make, tmp_path: Path) -> None:
    hierarchy, coarse = tmp_path / "hierarchy.toml", tmp_path / "coarse.txt"
    hierarchy.write_text(HIERARCHY)
    coarse.write_text("warm\ncold\n")
    pictures = folders(tmp_path / "pictures", {colour: colour for colour in ("red", "green")})
    report = import_network(wish(make(classes=2), hierarchy=hierarchy, labels=coarse, validate=pictures))
    assert (report.entry.coarse_accuracy, report.entry.test_images) == (1.0, 12)


def cached(tmp_path: Path, make: Make, *, weights: str) -> Path:
    """A network that is a link to a file elsewhere, as in the cache of huggingface_hub; its path."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    stored = np.eye(3, dtype=np.float32).tobytes()
    file = _external("weights.bin")(make()).rename(blobs / "11aa")
    (snapshot / "net.onnx").symlink_to(f"../../blobs/{file.name}")
    match weights:
        case "a link next to the link":
            (blobs / "22bb").write_bytes(stored)
            (snapshot / "weights.bin").symlink_to("../../blobs/22bb")
        case "next to the link":
            (snapshot / "weights.bin").write_bytes(stored)
        case "next to the target":
            (blobs / "weights.bin").write_bytes(stored)
        case "a link to elsewhere":
            (tmp_path / "secret.bin").write_bytes(stored)
            (snapshot / "weights.bin").symlink_to(tmp_path / "secret.bin")
    return snapshot / "net.onnx"


@pytest.mark.parametrize("weights", ["a link next to the link", "next to the link", "next to the target"])
def test_weights_of_a_network_that_is_a_link(wish: Any, make: Make, tmp_path: Path, weights: str) -> None:
    asked = wish(cached(tmp_path, make, weights=weights))
    import_network(asked)
    assert answers(asked.models, [picture(colour) for colour in COLOURS]) == list(COLOURS)


@pytest.mark.parametrize(("weights", "words"), [("a link to elsewhere", "only files"), ("nowhere", "not there")])
def test_weights_that_are_not_with_a_link(wish: Any, make: Make, tmp_path: Path, weights: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        import_network(wish(cached(tmp_path, make, weights=weights)))


def test_a_link_that_leaves_the_folder_is_not_followed(wish: Any, make: Make, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(1000))
    (inner / "weights.bin").symlink_to(tmp_path / "secret.bin")
    file = _external("weights.bin")(make()).rename(inner / "net.onnx")
    with pytest.raises(DataError, match="only files in its own folder"):
        import_network(wish(file))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"classes": 2}, "3 labels"),
        ({"element": TensorProto.DOUBLE}, "DOUBLE"),
        ({"size": (6, "w")}, "neither"),
    ],
)
def test_networks_that_are_no_classifiers_of_these_classes(
    wish: Any, make: Make, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        import_network(wish(make(**given)))
    assert not wish(make(**given)).models.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"red\n", "at least two"),
        (b"", "at least two"),
        (b"red\nred\nblue\n", "'red' twice"),
        (b"red\n\nblue\n", "line 2"),
        (b"r\xe9d\ngreen\nblue\n", "UTF-8"),
        (b"red\ngreen\nbl\x1bue\n", "printable"),
        (b"red\ngreen\npurple\n", "the set lacks 'purple'; the labels lack 'blue'"),
    ],
)
def test_wrong_labels(wish: Any, make: Make, labels: Path, content: bytes, words: str) -> None:
    import_network(wish(make()))
    labels.write_bytes(content)
    with pytest.raises(TerraceError, match=words):
        import_network(wish(make("other.onnx")))


def test_a_hierarchy_that_misses_a_class(wish: Any, make: Make, tmp_path: Path) -> None:
    path = tmp_path / "hierarchy.json"
    path.write_text(json.dumps({"name": "x", "fine": ["red", "green"], "superclasses": {"all": ["red", "green"]}}))
    with pytest.raises(InvalidInput, match=r"hierarchy\.json lacks 'blue'\).*`fine`.*superclass"):
        import_network(wish(make(), hierarchy=path))


def test_the_set_keeps_what_it_has_of_another_hierarchy(wish: Any, make: Make, tmp_path: Path) -> None:
    import_network(wish(make()))
    path = tmp_path / "hierarchy.toml"
    path.write_text(HIERARCHY)
    with pytest.raises(InvalidInput, match="is another"):
        import_network(wish(make(), hierarchy=path))
