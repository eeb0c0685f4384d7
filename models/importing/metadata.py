"""Pixel values described by the metadata of an ONNX file, with the keys of the ONNX standard or of Ultralytics."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from models.importing.hints import hints_in, is_for_names, names_a_colour_order
from models.importing.preprocess import PreprocessFacts
from tierkit.errors import InvalidInput

__all__ = ["facts_of", "structure_of"]

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
_NAMES = re.compile(r"(?i)names?$|labels?$|^(onnx|terrace)\.")
_FREE_WORDS = re.compile(r"(?i)\bbgr|\b(?:pixel_?|image_?|img_?)?(?:mean|std)s?['\"]?\s*[=:]\s*[\[({\d.-]")
"""Words in a longer text that can only be about pixels."""
_MOST_CHARACTERS = 4 * 1024**2


def facts_of(metadata: Mapping[str, str]) -> PreprocessFacts:
    """Read the facts about pixels from the metadata.

    Raises:
        InvalidInput: a key or a value about pixels is not known, or cannot be served.
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
    if unknown := sorted(key for key in metadata if key.lower() not in _KNOWN and _is_unread(key, metadata[key])):
        raise InvalidInput(
            f"the metadata of the file has {', '.join(f'{key} = {metadata[key]!r:.60}' for key in unknown[:5])}, "
            "which is not understood"
        )
    if said.get("author", "").lower() == "ultralytics":
        return PreprocessFacts(**_ultralytics(said) | found)
    return PreprocessFacts(**found)


def _is_unread(key: str, value: str) -> bool:
    """True if a key or its value says something about pixels."""
    if is_for_names(key):
        return False
    if _OTHERS.search(key):
        return bool(_FREE_WORDS.search(value)) and not _NAMES.search(key)
    if _ABOUT_PIXELS.search(key) or names_a_colour_order(value) or _FREE_WORDS.search(value):
        return True
    return next(hints_in(structure_of(value)), None) is not None


def structure_of(text: str) -> Any:
    """The list or object that a value holds, as JSON or as Python writes it; None for anything else."""
    if not text.lstrip().startswith(("{", "[", "(")) or len(text) > _MOST_CHARACTERS:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return None


def _ultralytics(said: Mapping[str, str]) -> dict[str, Any]:
    """Facts from Ultralytics' metadata, by the rules of `ultralytics.data.augment.classify_transforms`."""
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
