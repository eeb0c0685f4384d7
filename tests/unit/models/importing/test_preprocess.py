"""What a network expects of its pixels, from the places where exporters say it."""

from pathlib import Path
from typing import Any

import pytest

from models.importing.preprocess import PreprocessFacts, from_toml, joined
from tierkit.errors import InvalidInput, SetupError

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
        ({"a": {"size": (8, 8), "mean": (0.406, 0.456, 0.485)}}, "say colour"),
        ({"a": {"size": (8, 8), "scale": 1, "mean": (103.939, 116.779, 123.68)}}, "say colour"),
        ({"a": {"size": (8, 8), "resize": "pad", "resize_to": 9}}, "pad"),
        ({"a": {"size": (8, 8), "resample": "bilinear"}, "b": {"resample": "nearest"}}, "a says resample = .*b says"),
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


def test_one_number_stands_for_all_colours(tmp_path: Path) -> None:
    path = tmp_path / "preprocess.toml"
    path.write_text("mean = [0.5]\nstd = 0.25\n")
    assert from_toml(path) == PreprocessFacts(mean=(0.5,) * 3, std=(0.25,) * 3)


def test_grey_has_one_channel() -> None:
    known = joined({"x": PreprocessFacts(size=(8, 8), colour="grey", mean=(0.5,) * 3, std=(0.25,) * 3)})
    assert (known.channels, known.steps) == (1, ((4 / 255,), (-2.0,)))
    with pytest.raises(InvalidInput, match="one channel"):
        joined({"x": PreprocessFacts(size=(8, 8), colour="grey", mean=MEAN)})


WHOLE = {"resize": "squash", "resample": "bilinear", "colour": "rgb", "scale": 255, "mean": MEAN, "std": STD}


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        (WHOLE, True),
        (WHOLE | {"resize": "shortest-side"}, False),
        (WHOLE | {"resize": "shortest-side", "resize_to": 256}, True),
        *[({key: value for key, value in WHOLE.items() if key != left}, False) for left in WHOLE],
    ],
)
def test_what_leaves_nothing_to_others(said: dict[str, Any], whole: bool) -> None:
    assert PreprocessFacts(**said).is_whole is whole
