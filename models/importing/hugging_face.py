"""The rules of Hugging Face's image processors: the meaning of a `preprocessor_config.json` depends on the class that
wrote it.

The same key means different things: `size: 224` squashes a picture for ViT and resizes its shortest side for CLIP. So
each class has its defaults and its rule here, after transformers 4.57 and 5.24. A default that changed between the two
is left open, because the file does not name the version that wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from models.importing.preprocess import PreprocessFacts
from models.manifest import Resample

__all__ = ["facts_of", "is_image_processor"]

Sides = tuple[int, int]
Three = tuple[float, float, float]

_IMAGENET: tuple[Three, Three] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HALF: tuple[Three, Three] = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_CLIP: tuple[Three, Three] = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

_FILTERS: tuple[Resample, ...] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters by Pillow's number, which `resample` holds."""

_OPEN: Any = object()
"""A default that differs between versions of transformers."""

_COMMON = {
    *("do_resize", "size", "default_to_square", "resample", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std", "do_center_crop", "crop_size", "data_format"),
}
_NEUTRAL = {
    *(
        "image_processor_type",
        "feature_extractor_type",
        "processor_class",
        "_valid_processor_keys",
        "model_input_names",
    ),
    *("_name_or_path", "transformers_version", "do_convert_rgb", "do_reduce_labels", "reduce_labels", "return_tensors"),
    *("input_data_format", "device", "disable_grouping", "_processor_class"),
}
"""Keys that change no pixel of an RGB picture: labels of segmentation, names, where the processor computes."""

_CLASS = re.compile(r"(.+?)(?:ImageProcessor(?:Fast|Pil)?|FeatureExtractor)$")


@dataclass(frozen=True, kw_only=True)
class _Processor:
    """Defaults of a class, and the rule by which it resizes."""

    size: Any
    square: bool = True
    """True if a `size` that is one number means a square, and not the shortest side."""
    crop: Any = None
    """Default of `crop_size`; None if the class has no centre crop."""
    crops: Any = True
    """Default of `do_center_crop`."""
    resample: Resample | None
    """None if the default differs between versions."""
    usual: tuple[Three, Three]
    """Default mean and standard deviation."""
    normalises: bool = True
    """False if the class never normalises."""
    rule: str = "plain"
    own: Mapping[str, Any] = field(default_factory=dict)
    """Keys that only some classes have, with their defaults."""


_SHORTEST_CROPPED = _Processor(size={"shortest_edge": 224}, square=False, crop=224, resample="bicubic", usual=_CLIP)
_SQUASHED = _Processor(size=224, resample="bilinear", usual=_HALF)
_MOBILENET = replace(_SHORTEST_CROPPED, size={"shortest_edge": 256}, resample="bilinear", usual=_HALF)

_PROCESSORS: dict[str, _Processor] = {
    "Beit": _Processor(size=_OPEN, crop=224, crops=_OPEN, resample="bicubic", usual=_HALF),
    "Bit": _SHORTEST_CROPPED,
    "Blip": replace(_SQUASHED, size=384, resample="bicubic", usual=_CLIP),
    "CLIP": _SHORTEST_CROPPED,
    "ChineseCLIP": _SHORTEST_CROPPED,
    "ConvNext": _Processor(
        size=384, square=False, resample=None, usual=_HALF, rule="convnext", own={"crop_pct": 224 / 256}
    ),
    "DINOv3ViT": replace(_SQUASHED, usual=_IMAGENET),
    "DeiT": _Processor(size=256, crop=224, resample="bicubic", usual=_HALF),
    "EfficientFormer": _Processor(size=224, crop=224, resample="bicubic", usual=_IMAGENET),
    "EfficientNet": _Processor(
        size=346,
        crop=289,
        crops=False,
        resample=None,
        usual=_HALF,
        own={"rescale_offset": False, "include_top": True},
    ),
    "Levit": replace(_SHORTEST_CROPPED, usual=_IMAGENET, rule="levit"),
    "MobileNetV1": _MOBILENET,
    "MobileNetV2": _MOBILENET,
    "MobileViT": _Processor(
        size={"shortest_edge": 224},
        square=False,
        crop=256,
        resample=None,
        usual=_HALF,
        normalises=False,
        own={"do_flip_channel_order": True},
    ),
    "Perceiver": _Processor(size=224, crop=256, resample="bicubic", usual=_IMAGENET, rule="perceiver"),
    "PPLCNet": _Processor(
        size=256,
        crop=224,
        resample="bilinear",
        usual=((0.406, 0.456, 0.485), (0.225, 0.224, 0.229)),
        rule="pplcnet",
        own={"resize_short": 256, "size_divisor": 1},
    ),
    "PoolFormer": replace(_SHORTEST_CROPPED, usual=_IMAGENET, rule="poolformer", own={"crop_pct": 0.9}),
    "Pvt": replace(_SQUASHED, resample=None, usual=_IMAGENET),
    "Segformer": replace(_SQUASHED, size=512, usual=_IMAGENET),
    "Siglip": replace(_SQUASHED, square=False, size={"height": 224, "width": 224}, resample="bicubic"),
    "ViT": _SQUASHED,
    "ViTHybrid": _SHORTEST_CROPPED,
}


def is_image_processor(content: Mapping[str, Any]) -> bool:
    """True if a configuration says anything about images."""
    return bool({"image_processor_type", "feature_extractor_type", *_COMMON} & set(content))


def facts_of(content: Mapping[str, Any]) -> PreprocessFacts:
    """The preprocessing that a `preprocessor_config.json` describes, by the rules of the class that wrote it.

    Raises:
        ValueError: the class or a key is not known, a key is missing whose default is not, or the file describes
            something that cannot be served. The message names it.
    """
    name, processor = _class_of(content)
    said = {key: value for key, value in content.items() if value is not None}
    own = dict(processor.own)
    if unknown := sorted(set(said) - _COMMON - _NEUTRAL - set(own)):
        idle = [key for key in unknown if said[key] is False and key.startswith("do_")]
        if unknown := [key for key in unknown if key not in idle]:
            raise ValueError(f"{name} is not known to have the key {', '.join(map(repr, unknown))}")
    own |= {key: said[key] for key in own if key in said}
    if unclear := sorted(key for key in content if content[key] is None and _is_on(processor, key)):
        raise ValueError(f"{unclear[0]!r} is null, which versions of transformers read differently: say true or false")
    if "resample" in content and content["resample"] is None and processor.resample != "bilinear":
        raise ValueError("'resample' is null, which versions of transformers read differently: say its number")
    if name == "PoolFormer" and "crop_pct" in content and content["crop_pct"] is None:
        raise ValueError("'crop_pct' is null, which versions of PoolFormer read differently")
    bgr = processor.rule == "pplcnet" or _flag(own, "do_flip_channel_order", False)
    found: dict[str, Any] = _geometry(name, processor, said, own)
    found |= _values(name, processor, said, own, bgr)
    one = isinstance(mean := said.get("image_mean"), list) and len(mean) == 1
    found["colour"] = "grey" if one else "bgr" if bgr else "rgb"
    if "data_format" in said:
        layouts = {"channels_first": "nchw", "channels_last": "nhwc"}
        if said["data_format"] not in layouts:
            raise ValueError(f"'data_format' is {said['data_format']!r}")
        found["layout"] = layouts[said["data_format"]]
    return PreprocessFacts(**found)


def _is_on(processor: _Processor, key: str) -> bool:
    """True for a step that the class takes unless the file says otherwise: a null may mean no, or this default."""
    if key == "do_center_crop":
        return processor.crop is not None and processor.crops is not False
    usual = {"do_resize": True, "do_rescale": True, "do_normalize": processor.normalises}
    return usual.get(key, processor.own.get(key)) is True


def _class_of(content: Mapping[str, Any]) -> tuple[str, _Processor]:
    if content.get("auto_map"):
        raise ValueError("'auto_map' names a processor whose rules are code of its author")
    types = [content[key] for key in ("image_processor_type", "feature_extractor_type") if content.get(key)]
    if not types:
        raise ValueError("it does not name its class: 'image_processor_type' is missing")
    names = {match[1] if (match := _CLASS.match(str(each))) else str(each) for each in types}
    if len(names) > 1:
        raise ValueError(f"it names two classes, {' and '.join(map(repr, types))}")
    (name,) = names
    if name not in _PROCESSORS:
        raise ValueError(
            f"the rules of {types[0]!r} are not known, or cannot be served; known are: {', '.join(_PROCESSORS)}"
        )
    return name, _PROCESSORS[name]


# --- size -------------------------------------------------------------------------------------------------------------


def _geometry(name: str, processor: _Processor, said: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields `size`, `resize`, `resize_to` and `resample`."""
    if not _flag(said, "do_resize", True):
        raise ValueError("'do_resize' is false, so it does not say how a picture gets the network's size")
    crop = _crop(name, processor, said)
    size = said.get("size", processor.size)
    if size is _OPEN:
        raise ValueError(f"'size' is missing, and versions of {name} differ in it")
    square = _flag(said, "default_to_square", processor.square)
    shortest, exact = _size(size, square)
    found: dict[str, Any] = {}
    if (filter_ := _resample(said, processor)) is not None:
        found["resample"] = filter_
    match processor.rule:
        case "convnext":
            if shortest is None:
                raise ValueError(f"'size' is {size}, and {name} needs its shortest edge")
            crop = shortest, shortest
            if shortest >= 384:
                shortest, exact = None, crop
            else:
                shortest = int(shortest / _number(own, "crop_pct"))
        case "poolformer":
            side = shortest or (exact[0] if exact is not None and exact[0] == exact[1] else None)
            if side is None:
                raise ValueError(f"'size' is {size}, which is not a square")
            shortest, exact = int(side / _number(own, "crop_pct")), None
        case "levit" if shortest is not None:
            shortest = int((256 / 224) * shortest)
        case "perceiver" if crop is not None:
            # It cuts out the middle before it resizes: the result is that of the usual order.
            if exact is None or exact[0] != exact[1] or crop[0] != crop[1]:
                raise ValueError(f"'size' is {size} and 'crop_size' {list(crop)}: only squares can be served")
            shortest, exact, crop = crop[0], None, exact
        case "pplcnet":
            if own["size_divisor"] != 1:
                raise ValueError(f"'size_divisor' is {own['size_divisor']!r}, so the aspect ratio changes")
            shortest, exact = _whole(own["resize_short"], "resize_short"), None
    return found | _fit(shortest, exact, crop)


def _fit(shortest: int | None, exact: Sides | None, crop: Sides | None) -> dict[str, Any]:
    if crop is None:
        if exact is None:
            raise ValueError(
                f"the shortest side becomes {shortest} and nothing is cut out, so each picture would have another size"
            )
        return {"size": exact, "resize": "squash"}
    if exact == crop:
        return {"size": crop, "resize": "squash"}
    sides = exact or (shortest or 0,) * 2
    if sides[0] < crop[0] or sides[1] < crop[1]:
        raise ValueError(f"{list(crop)} is cut out of {list(sides)}, which is less: black borders cannot be served")
    if sides[0] != sides[1]:
        raise ValueError(f"the middle is cut out of {list(sides)}, which is not a square")
    return {"size": crop, "resize": "squash" if exact else "shortest-side", "resize_to": sides[0]}


def _crop(name: str, processor: _Processor, said: Mapping[str, Any]) -> Sides | None:
    """Height and width that are cut out of the middle; None for nothing."""
    if processor.crop is None:
        if _flag(said, "do_center_crop", False):
            raise ValueError(f"'do_center_crop' is true, which versions of {name} read differently")
        return None
    if processor.crops is _OPEN and "do_center_crop" not in said:
        raise ValueError(f"'do_center_crop' is missing, and versions of {name} differ in it")
    if not _flag(said, "do_center_crop", processor.crops):
        return None
    value = said.get("crop_size", processor.crop)
    _, exact = _size(value, square=True, key="crop_size")
    if exact is None:
        raise ValueError(f"'crop_size' is {value}: it needs height and width")
    return exact


def _size(value: Any, square: bool, key: str = "size") -> tuple[int | None, Sides | None]:
    """The length of the shortest side, or height and width."""
    if isinstance(value, Mapping):
        given = {name: each for name, each in value.items() if each is not None}
        if set(given) == {"shortest_edge"}:
            return _whole(given["shortest_edge"], key), None
        if set(given) == {"height", "width"}:
            return None, (_whole(given["height"], key), _whole(given["width"], key))
        raise ValueError(f"{key!r} has {', '.join(map(repr, sorted(given))) or 'nothing'}, which cannot be served")
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise ValueError(f"{key!r} is {value}: versions differ in whether height or width comes first")
        return None, (_whole(value[0], key), _whole(value[1], key))
    side = _whole(value, key)
    return (None, (side, side)) if square else (side, None)


def _resample(said: Mapping[str, Any], processor: _Processor) -> Resample | None:
    if "resample" not in said:
        return processor.resample
    code = said["resample"]
    if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code < len(_FILTERS):
        raise ValueError(f"'resample' is {code!r}, which is not a filter of Pillow")
    return _FILTERS[code]


# --- values -----------------------------------------------------------------------------------------------------------


def _values(
    name: str, processor: _Processor, said: Mapping[str, Any], own: Mapping[str, Any], bgr: bool
) -> dict[str, Any]:
    """Fields `scale`, `mean` and `std`, by colour in the network's order."""
    rescales = _flag(said, "do_rescale", True)
    scale = round(1 / _number(said, "rescale_factor", 1 / 255), 6) if rescales else 1.0
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    normalises = _flag(said, "do_normalize", processor.normalises)
    if normalises and not processor.normalises:
        raise ValueError(f"'do_normalize' is true, and {name} does not normalise")
    given = [
        _three(said[key], key) if key in said else usual
        for key, usual in zip(("image_mean", "image_std"), processor.usual, strict=True)
    ]
    if normalises:
        mean, std = given
    if _flag(own, "rescale_offset", False) and rescales:  # the pixels lose 1 before they are normalised
        mean = mean[0] + 1, mean[1] + 1, mean[2] + 1
    if _flag(own, "include_top", False):  # which normalises a second time, without a mean
        std = std[0] * given[1][0], std[1] * given[1][1], std[2] * given[1][2]
    if bgr:  # they are in the order of the picture, which turns round afterwards
        mean, std = (mean[2], mean[1], mean[0]), (std[2], std[1], std[0])
    return {"scale": scale, "mean": mean, "std": std}


def _flag(said: Mapping[str, Any], key: str, usual: bool) -> bool:
    value = said.get(key, usual)
    if not isinstance(value, bool):
        raise ValueError(f"{key!r} is {value!r}, and not true or false")
    return value


def _number(said: Mapping[str, Any], key: str, usual: float | None = None) -> float:
    value = said.get(key, usual)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{key!r} is {value!r}, and no number above 0")
    return float(value)


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key!r} is {value!r}, and no number of pixels")
    return value


def _three(value: Any, key: str) -> Three:
    values = value if isinstance(value, list) else [value]
    values = values * 3 if len(values) == 1 else values
    if len(values) != 3 or any(isinstance(each, bool) or not isinstance(each, int | float) for each in values):
        raise ValueError(f"{key!r} is {value!r}, and not a number for each colour")
    return float(values[0]), float(values[1]), float(values[2])
