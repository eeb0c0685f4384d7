"""What the metadata inside an ONNX file says about pixels: by the ONNX standard's keys, and by those of Ultralytics."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from models.importing.preprocess import PreprocessFacts
from tierkit.errors import InvalidInput

__all__ = ["facts_of"]

_FORMATS = {"rgb8": "rgb", "bgr8": "bgr", "gray8": "grey"}
_RANGES = {
    "nominalrange_0_255": {"scale": 1.0, "mean": 0.0, "std": 1.0},
    "normalized_0_1": {"scale": 255.0, "mean": 0.0, "std": 1.0},
    "normalized_1_1": {"scale": 255.0, "mean": 0.5, "std": 0.5},
}
_KNOWN = {"image.bitmappixelformat", "image.nominalpixelrange", "image.colorspacegamma", "channels"}
_ABOUT_PIXELS = re.compile(
    r"(?i)^image\.|mean|std|scale|normali[sz]|resiz|crop|colou?r|rgb|bgr|channel|pre_?proc|pixel|interpol"
)
"""Keys that may say something about pixels."""
_OTHERS = re.compile(
    r"(?i)^(onnx|terrace)\.|gr[ae]yscale_?output|description|docs?$|author|licen[cs]e|names?$|labels?$"
)


def facts_of(metadata: Mapping[str, str]) -> PreprocessFacts:
    """What the metadata says about pixels.

    Raises:
        InvalidInput: a key about pixels is not known, or has a value that cannot be served.
    """
    said = {key.lower(): value.strip() for key, value in metadata.items()}
    found: dict[str, Any] = {}
    if pixels := said.get("image.bitmappixelformat"):
        if pixels.lower() not in _FORMATS:
            raise InvalidInput(f"the network takes pixels of format {pixels!r}, and Terrace has Rgb8, Bgr8 and Gray8")
        found["colour"] = _FORMATS[pixels.lower()]
    if values := said.get("image.nominalpixelrange"):
        if values.lower() not in _RANGES:
            raise InvalidInput(f"the network takes pixels in the range {values!r}, which Terrace does not know")
        found |= _RANGES[values.lower()]
    if (gamma := said.get("image.colorspacegamma", "srgb")).lower() != "srgb":
        raise InvalidInput(f"the network takes pixels with the gamma {gamma!r}, and Terrace has SRGB")
    if said.get("author", "").lower() == "ultralytics":
        return PreprocessFacts(**_ultralytics(said) | found)
    if unknown := sorted(
        key for key in metadata if _ABOUT_PIXELS.search(key) and key.lower() not in _KNOWN and not _OTHERS.search(key)
    ):
        raise InvalidInput(
            f"the metadata of the file has {', '.join(f'{key} = {metadata[key]!r:.60}' for key in unknown[:5])}, "
            "which is not understood"
        )
    return PreprocessFacts(**found)


def _ultralytics(said: Mapping[str, str]) -> dict[str, Any]:
    """By `ultralytics.data.augment.classify_transforms`."""
    if (task := said.get("task", "classify")) != "classify":
        raise InvalidInput(f"the network is for the task {task!r}, and not a classifier of pictures")
    try:
        height, width = ast.literal_eval(said["imgsz"])
    except (KeyError, ValueError, SyntaxError, TypeError) as exc:
        raise InvalidInput("the metadata of the file has no 'imgsz' with height and width") from exc
    square = height == width
    return {
        "size": (height, width),
        "resize": "shortest-side" if square else "squash",
        "resize_to": height if square else None,
        "resample": "bilinear",
        "colour": "grey" if said.get("channels") == "1" else "rgb",
        **_RANGES["normalized_0_1"],
    }
