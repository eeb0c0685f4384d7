"""The rules of OpenCLIP for the meaning of an `open_clip_config.json`.

They follow `open_clip.transform.image_transform`, including its defaults for missing keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.importing.preprocess import PreprocessFacts

__all__ = ["facts_of"]

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_KEYS = {"size", "mode", "mean", "std", "interpolation", "resize_mode", "fill_color"}


def facts_of(content: Mapping[str, Any]) -> PreprocessFacts:
    """The preprocessing that an `open_clip_config.json` describes.

    Raises:
        ValueError: a key is not known, or the file describes something that cannot be served.
    """
    given = content.get("preprocess_cfg")
    if not isinstance(given, Mapping):
        raise ValueError("it has no object 'preprocess_cfg'")
    said = {key: value for key, value in given.items() if value is not None}
    if unknown := sorted(set(said) - _KEYS):
        raise ValueError(f"OpenCLIP is not known to have the key {', '.join(map(repr, unknown))}")
    if (mode := said.get("mode", "RGB")) != "RGB":
        raise ValueError(f"'mode' is {mode!r}, and OpenCLIP has RGB")
    if (filter_ := said.get("interpolation", "bicubic")) not in ("bicubic", "bilinear"):
        raise ValueError(f"'interpolation' is {filter_!r}, and not bicubic or bilinear")
    rule = said.get("resize_mode", "shortest")
    if rule not in ("shortest", "squash"):
        raise ValueError(f"'resize_mode' is {rule!r}, and only shortest and squash can be served")
    size = _size(content, said)
    if size is not None and rule == "shortest" and size[0] != size[1]:
        raise ValueError(f"'resize_mode' is 'shortest' for {list(size)}: only squares can be served")
    return PreprocessFacts(
        size=size,
        resize="squash" if rule == "squash" else "shortest-side",
        resize_to=size[0] if size is not None and rule == "shortest" else None,
        resample=filter_,
        colour="rgb",
        scale=255.0,
        mean=said.get("mean", _MEAN),
        std=said.get("std", _STD),
    )


def _size(content: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width, which the network's part of the file says as well; None if neither does."""
    network = content.get("model_cfg")
    vision = network.get("vision_cfg") if isinstance(network, Mapping) else None
    given = [said.get("size"), vision.get("image_size") if isinstance(vision, Mapping) else None]
    sizes = {_pair(value) for value in given if value is not None}
    if len(sizes) > 1:
        raise ValueError(f"'size' is {given[0]!r}, and 'image_size' {given[1]!r}")
    return next(iter(sizes), None)


def _pair(value: Any) -> tuple[int, int]:
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise ValueError(f"the size is {value!r}, and not height and width")
    return sides[0], sides[1]
