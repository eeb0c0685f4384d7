"""What the metadata inside an ONNX file says about pixels."""

from typing import Any

import pytest

from models.importing.metadata import facts_of
from models.importing.preprocess import PreprocessFacts
from tierkit.errors import InvalidInput

PLAIN = {"scale": 255.0, "mean": 0.0, "std": 1.0}
ULTRALYTICS = {"author": "Ultralytics", "task": "classify", "imgsz": "[64, 64]", "stride": "1", "channels": "3"}
ULTRALYTICS |= {"names": "{0: 'red', 1: 'green'}", "args": "{'half': False}", "description": "trained on rgb pictures"}


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, {}),
        ({"Image.BitmapPixelFormat": "Bgr8", "Image.ColorSpaceGamma": "SRGB"}, {"colour": "bgr"}),
        ({"Image.BitmapPixelFormat": "Gray8"}, {"colour": "grey"}),
        ({"Image.NominalPixelRange": "NominalRange_0_255"}, {"scale": 1.0, "mean": 0.0, "std": 1.0}),
        ({"Image.NominalPixelRange": "Normalized_1_1"}, {"scale": 255.0, "mean": 0.5, "std": 0.5}),
        ({"license": "MIT", "author": "me", "onnx.quant.pre_process": "x", "names": "['a', 'b']"}, {}),
        ({"labels": "['bgr', 'mean: 1']", "classes": '{"scale": 0, "crop": 1}', "config": '{"lr": 0.1}', "x": "{"}, {}),
        ({"config": '{"id2label": {"0": "mean", "1": "std"}, "layer_norm_eps": 1}', "framework": "pytorch"}, {}),
        (
            ULTRALYTICS,
            {"size": (64, 64), "resize": "shortest-side", "resize_to": 64, "resample": "bilinear", "colour": "rgb"}
            | PLAIN,
        ),
        (
            ULTRALYTICS | {"imgsz": "[64, 96]", "channels": "1"},
            {"size": (64, 96), "resize": "squash", "resample": "bilinear", "colour": "grey"} | PLAIN,
        ),
    ],
)
def test_what_is_understood(metadata: dict[str, str], said: dict[str, Any]) -> None:
    assert facts_of(metadata) == PreprocessFacts(**said)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"Image.BitmapPixelFormat": "Rgba8"}, "Rgba8"),
        ({"Image.NominalPixelRange": "NominalRange_16_235"}, "16_235"),
        ({"Image.ColorSpaceGamma": "Linear"}, "Linear"),
        ({"Image.Something": "1"}, "Image.Something"),
        ({"model_info mean_values": "123.7 116.3 103.5"}, "mean_values"),
        ({"normalize": "imagenet"}, "normalize"),
        ({"preprocessing": "caffe"}, "preprocessing"),
        ({"reverse_input_channels": "True"}, "reverse_input_channels"),
        ({"input_format": "BGR"}, "input_format"),
        ({"config": '{"mean": [0.5, 0.5, 0.5]}'}, "config"),
        ({"config": "{'input': {'std': (1, 1, 1)}}"}, "config"),
        ({"settings": '[{"name": "Normalize", "center_crop": 224}]'}, "settings"),
        ({"notes": "pixels with mean=[123, 117, 104] taken off"}, "notes"),
        ({"description": "takes BGR pictures"}, "description"),
        (ULTRALYTICS | {"input_format": "bgr"}, "input_format"),
        (ULTRALYTICS | {"args": "{'bgr': True}"}, "args"),
        (ULTRALYTICS | {"task": "detect"}, "detect"),
        ({"author": "Ultralytics", "task": "classify"}, "imgsz"),
    ],
)
def test_what_is_not_understood_is_named(metadata: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        facts_of(metadata)
