"""The rules of timm for the meaning of the `pretrained_cfg` of a `config.json`.

They follow `timm.data.resolve_data_config` and `create_transform`, including their defaults for missing keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from models.importing.preprocess import PreprocessFacts
from models.manifest import Resample

__all__ = ["PIXELS", "facts_of"]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CROP = 0.875

PIXELS = {"input_size", "test_input_size", "interpolation", "crop_pct", "test_crop_pct", "crop_mode", "mean", "std"}
"""Keys about pixels."""
_NEUTRAL = {
    *("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag", "custom_load"),
    *("min_input_size", "fixed_input_size", "num_classes", "label_offset", "label_names", "label_descriptions"),
    *("labels", "pool_size", "test_pool_size", "first_conv", "classifier", "license", "description", "origin_url"),
    *("paper_name", "paper_ids", "notes", "num_features", "global_pool", "model_args", "has_weights"),
}
"""Keys that change no pixel."""


def facts_of(content: Mapping[str, Any], size: tuple[int, int] | None = None) -> PreprocessFacts:
    """Return the preprocessing that a `config.json` describes, in its `pretrained_cfg` or, in old files, at its top
    level. It is empty if the file is not timm's.

    Args:
        size: height and width of the network's input, if they are fixed; if they equal `test_input_size`,
            `test_crop_pct` applies.

    Raises:
        ValueError: a key is not known, or the file describes something that cannot be served.
    """
    given = content.get("pretrained_cfg", content)
    if not isinstance(given, Mapping):
        raise ValueError("'pretrained_cfg' is not an object")
    is_ours = {"mean", "std", "crop_pct"} & set(content) or ("architecture" in content and PIXELS & set(content))
    if given is content and not is_ours:
        return PreprocessFacts()
    if unknown := sorted(key for key in set(given) - PIXELS - _NEUTRAL if given[key] is not None):
        raise ValueError(f"timm is not known to have the key {', '.join(map(repr, unknown))}")
    arguments = content.get("model_args") or {}
    said = {key: value for key, value in given.items() if value is not None}

    channels, *sides = _input_size(said, "input_size") if "input_size" in said else (3, 224, 224)
    crop = said.get("crop_pct", _CROP)
    if "test_input_size" in said and size is not None and tuple(sides) != size:
        _, *test = _input_size(said, "test_input_size")
        if tuple(test) == size:
            sides, crop = test, said.get("test_crop_pct", crop)
    if isinstance(side := arguments.get("img_size"), int) and said.get("fixed_input_size"):
        sides = [side, side]
    channels = arguments.get("in_chans") or channels
    if channels not in (1, 3):
        raise ValueError(f"'input_size' has {channels} colours, and Terrace has 1 or 3")
    if isinstance(crop, bool) or not isinstance(crop, int | float) or not crop > 0:
        raise ValueError(f"'crop_pct' is {crop!r}")
    filter_ = said.get("interpolation", "bicubic")
    if filter_ not in get_args(Resample):
        raise ValueError(f"'interpolation' is {filter_!r}, which is not a filter of Pillow")
    return PreprocessFacts(
        **_fit(said.get("crop_mode", "center"), sides[0], sides[1], float(crop)),
        colour="rgb" if channels == 3 else "grey",
        resample=filter_,
        scale=255.0,
        mean=said.get("mean", _MEAN),
        std=said.get("std", _STD),
    )


def _input_size(said: Mapping[str, Any], key: str) -> tuple[int, int, int]:
    value = said[key]
    if not isinstance(value, list) or len(value) != 3 or not all(type(each) is int and each > 0 for each in value):
        raise ValueError(f"{key!r} is {value!r}, and not colours, height and width")
    return value[0], value[1], value[2]


def _fit(mode: Any, height: int, width: int, crop: float) -> dict[str, Any]:
    size = height, width
    scaled = int(height / crop), int(width / crop)
    if mode not in ("center", "squash"):
        raise ValueError(f"'crop_mode' is {mode!r}, and Terrace has center and squash")
    if mode == "squash" and scaled == size:
        return {"size": size, "resize": "squash"}
    if height != width:
        raise ValueError(f"'crop_mode' is {mode!r} for {width} x {height} pixels: only squares can be served")
    if scaled < size:
        raise ValueError(f"'crop_pct' is {crop:g}: black borders cannot be served")
    return {"size": size, "resize": "squash" if mode == "squash" else "shortest-side", "resize_to": scaled[0]}
