"""What a network expects of its pixels, from the places where exporters say it."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.importing.preprocess import PreprocessFacts, beside, from_metadata, from_toml, joined
from tierkit.errors import DataError, InvalidInput, SetupError, TerraceError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_what_no_source_says_is_as_most_networks_have_it() -> None:
    known = joined({"shape": PreprocessFacts(size=(224, 192))})
    assert (known.resize, known.resize_to, known.colour, known.layout) == ("shortest-side", 224, "rgb", "nchw")
    assert known.steps == ((1 / 255,) * 3, (0.0,) * 3)


def test_several_sources_add_up() -> None:
    known = joined({"shape": PreprocessFacts(size=(8, 8)), "file": PreprocessFacts(mean=MEAN, std=STD, size=(8, 8))})
    factor, offset = known.steps
    assert factor == pytest.approx([1 / 255 / each for each in STD])
    assert offset == pytest.approx([-mean / std for mean, std in zip(MEAN, STD, strict=True)])


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({}, "size ="),
        ({"a": {"size": (8, 8), "colour": "rgb"}, "b": {"colour": "bgr"}}, "a says colour = .*b says"),
        ({"a": {"size": (8, 8), "mean": (0.5,) * 3}, "b": {"mean": (0.4,) * 3}}, "a says mean = .*b says"),
        ({"a": {"size": (8, 8), "mean": (123.7, 116.3, 103.5)}}, "scale = 1"),
        ({"a": {"size": (8, 8), "resize_to": 4}}, "resize_to 4"),
    ],
)
def test_contradictions_name_who_says_what(sources: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        joined({name: PreprocessFacts(**said) for name, said in sources.items()})


def test_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "preprocess.toml"
    path.write_text('size = [224, 224]\nresize = "pad"\ncolour = "bgr"\nscale = 1\nlayout = "nhwc"\n')
    said = from_toml(path)
    assert said == PreprocessFacts(size=(224, 224), resize="pad", colour="bgr", scale=1, layout="nhwc")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sise = [1, 1]", "did you mean size"),
        ("size = [0, 3]", "size.0"),
        ("std = [1, 1, 0]", "std.2"),
        ("mean = [nan, 0, 0]", "mean.0"),
        ("mean = [1, 2]", "mean"),
        ('resize = "crop"', "resize"),
        ("scale = 0", "scale"),
        ("size = ", "TOML"),
    ],
)
def test_a_wrong_toml_file_says_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "preprocess.toml"
    path.write_text(text)
    with pytest.raises(SetupError, match=words):
        from_toml(path)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, {}),
        ({"Image.BitmapPixelFormat": "Bgr8"}, {"colour": "bgr"}),
        ({"Image.NominalPixelRange": "NominalRange_0_255"}, {"scale": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3}),
        ({"Image.NominalPixelRange": "Normalized_1_1"}, {"scale": 255.0, "mean": (0.5,) * 3, "std": (0.5,) * 3}),
    ],
)
def test_the_metadata_of_a_file(metadata: dict[str, str], said: dict[str, Any]) -> None:
    assert from_metadata(metadata) == PreprocessFacts(**said)


@pytest.mark.parametrize("key", ["Image.BitmapPixelFormat", "Image.NominalPixelRange"])
def test_metadata_that_cannot_be_served(key: str) -> None:
    with pytest.raises(InvalidInput, match=r"(?i)gray8"):
        from_metadata({key: "Gray8"})


HUGGING_FACE = {
    "image_processor_type": "ConvNextFeatureExtractor",
    "image_mean": list(MEAN),
    "image_std": list(STD),
    "rescale_factor": 0.00392156862745098,
}
TIMM = {"input_size": [3, 224, 192], "mean": list(MEAN), "std": list(STD), "crop_pct": 0.875}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "preprocessor_config.json",
            {**HUGGING_FACE, "size": {"height": 224, "width": 192}},
            {"size": (224, 192), "resize": "squash", "scale": 255.0, "mean": MEAN, "std": STD},
        ),
        (
            "preprocessor_config.json",
            {**HUGGING_FACE, "size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}},
            {"size": (224, 224), "resize": "shortest-side", "resize_to": 256, "scale": 255.0, "mean": MEAN, "std": STD},
        ),
        (
            "preprocessor_config.json",
            {**HUGGING_FACE, "size": 224, "do_normalize": False, "do_rescale": False},
            {"size": (224, 224), "resize": "shortest-side", "scale": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3},
        ),
        (
            "config.json",
            {"architecture": "x", "pretrained_cfg": TIMM},
            {"size": (224, 192), "resize": "shortest-side", "resize_to": 219, "scale": 255.0, "mean": MEAN, "std": STD},
        ),
        (
            "config.json",
            {**TIMM, "crop_mode": "squash"},
            {"size": (224, 192), "resize": "squash", "scale": 255.0, "mean": MEAN, "std": STD},
        ),
    ],
)
def test_configuration_beside_the_file(tmp_path: Path, name: str, content: Any, said: dict[str, Any]) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    assert beside(tmp_path / "net.onnx") == {name: PreprocessFacts(**said)}


def test_configuration_of_something_else_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ResNetForImageClassification"]}')
    assert beside(tmp_path / "net.onnx") == {}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"image_mean": "no", "image_std": [1, 1, 1], "size": 3}',
        '{"image_mean": [0, 0, 0], "size": 3}',
        '{"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "size": {"depth": 3}}',
        '{"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "size": 3, "rescale_factor": 0}',
        '{"image_mean": [0, 0, 0], "image_std": [1, 1, 1], "size": -3}',
    ],
)
def test_configuration_that_makes_no_sense_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(TerraceError, match=r"preprocessor_config\.json") as caught:
        beside(tmp_path / "net.onnx")
    assert isinstance(caught.value, DataError)
