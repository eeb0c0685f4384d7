"""What a network expects of its pixels: size, resize rule, colour order, scale, mean and spread.

Exporters say it in different places: in the file's metadata, in `preprocessor_config.json` (Hugging Face) or in
`config.json` (timm) beside it. What none of them says stands in a `preprocess.toml`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from models.manifest import Fit, ResizeRule
from tierkit.documents import faults, read_document
from tierkit.errors import DataError, InvalidInput

__all__ = ["MOST_SIDE", "Preprocess", "PreprocessFacts", "assumed", "beside", "from_metadata", "from_toml", "joined"]

MOST_SIDE = 4096
"""Pixels of a network's input."""
Side = Annotated[int, Field(ge=1, le=MOST_SIDE)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Spread = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_MAX_BYTES = 1024 * 1024
"""Of a configuration file; real ones have a few hundred bytes."""


class PreprocessFacts(BaseModel):
    """What one source says; None where it says nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    size: tuple[Side, Side] | None = None
    """Height and width that the network takes."""
    resize: ResizeRule | None = None
    """How a picture gets that size: its shortest side is resized and the middle cut out, it is squashed, or padded."""
    resize_to: Annotated[PositiveInt, Field(le=4 * MOST_SIDE)] | None = None
    """Length of the shortest side before the middle is cut out."""
    colour: Literal["rgb", "bgr"] | None = None
    """Order of the colours."""
    scale: PositiveFloat | None = None
    """By which pixels are divided before `mean` and `std`: 255 where these are for values of 0 to 1."""
    mean: tuple[Finite, Finite, Finite] | None = None
    """Subtracted, by colour in the network's order."""
    std: tuple[Spread, Spread, Spread] | None = None
    """By which the difference is divided, likewise by colour."""
    layout: Literal["nchw", "nhwc"] | None = None
    """Whether colours come before or after height and width."""


class Preprocess(BaseModel):
    """What is known in the end; what no source says is as most networks have it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: tuple[Side, Side]
    resize: ResizeRule = "shortest-side"
    resize_to: PositiveInt
    colour: Literal["rgb", "bgr"] = "rgb"
    scale: PositiveFloat = 255.0
    mean: tuple[Finite, Finite, Finite] = (0.0, 0.0, 0.0)
    std: tuple[Spread, Spread, Spread] = (1.0, 1.0, 1.0)
    layout: Literal["nchw", "nhwc"] = "nchw"

    @model_validator(mode="before")
    @classmethod
    def _whole_side(cls, content: Any) -> Any:
        """Without `resize_to` the shortest side gets the size itself."""
        if isinstance(content, dict) and "resize_to" not in content and "size" in content:
            return {**content, "resize_to": max(content["size"])}
        return content

    @model_validator(mode="after")
    def _holds_together(self) -> Preprocess:
        if self.resize == "shortest-side" and self.resize_to < max(self.size):
            raise ValueError(f"resize_to {self.resize_to} leaves less than the size {self.size[0]} x {self.size[1]}")
        if self.scale == 255 and max(map(abs, self.mean)) > 3:
            raise ValueError(
                f"mean {list(self.mean)} is for values of 0 to 255, and scale 255 makes them 0 to 1: say scale = 1, or "
                "divide mean and std by 255"
            )
        if self.scale == 1 and any(self.mean) and max(*map(abs, self.mean), *self.std) <= 1:
            raise ValueError(
                f"mean {list(self.mean)} and std {list(self.std)} are for values of 0 to 1, and scale 1 leaves them at "
                "0 to 255: say scale = 255"
            )
        return self

    @property
    def fit(self) -> Fit:
        """The pixels that the network takes."""
        return Fit(*self.size, self.resize, self.resize_to)

    @property
    def steps(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Factor and offset by colour: the network gets `pixel * factor + offset`."""
        factor = tuple(1 / (self.scale * spread) for spread in self.std)
        offset = tuple(-mean / spread for mean, spread in zip(self.mean, self.std, strict=True))
        return (factor[0], factor[1], factor[2]), (offset[0], offset[1], offset[2])


def assumed(sources: Mapping[str, PreprocessFacts], preprocess: Preprocess) -> tuple[str, ...]:
    """What is as most networks have it because no source says otherwise, as lines of `preprocess.toml`."""
    said = {name for facts in sources.values() for name in facts.model_dump(exclude_none=True)}
    left = [name for name in ("resize", "colour", "scale", "mean", "std") if name not in said]
    return tuple(f"{name} = {_shown(getattr(preprocess, name))}" for name in left)


def joined(sources: Mapping[str, PreprocessFacts]) -> Preprocess:
    """What all sources say together.

    Args:
        sources: by the name that messages call them, such as "preprocess.toml".

    Raises:
        InvalidInput: two sources contradict each other, the size is unknown, or the values do not fit together.
    """
    known: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    for source, facts in sources.items():
        for name, value in facts.model_dump(exclude_none=True).items():
            if name in known and not _same(known[name], value):
                raise InvalidInput(
                    f"{said_by[name]} says {name} = {_shown(known[name])}, and {source} says {_shown(value)}: make "
                    "them agree, or remove one"
                )
            known.setdefault(name, value)
            said_by.setdefault(name, source)
    if "size" not in known:
        raise InvalidInput(
            "the network takes pictures of any size, and no file says which: add size = [height, width] to a "
            "preprocess.toml and give it with --preprocess"
        )
    try:
        return Preprocess(**known)
    except ValidationError as exc:
        where = " and ".join(dict.fromkeys(said_by.values()))
        raise InvalidInput(f"{where}: {faults(exc, Preprocess)}") from exc


def from_toml(path: Path) -> PreprocessFacts:
    """What a `preprocess.toml` says.

    Raises:
        SetupError: it cannot be read, or has a wrong value.
    """
    return read_document(path, PreprocessFacts, what="preprocessing file")


def from_metadata(metadata: Mapping[str, str]) -> PreprocessFacts:
    """What the metadata of an ONNX file says, by the ONNX standard's names for image networks.

    Raises:
        InvalidInput: a value that no network here can be fed.
    """
    found: dict[str, Any] = {}
    match metadata.get("Image.BitmapPixelFormat", "").lower():
        case "rgb8":
            found["colour"] = "rgb"
        case "bgr8":
            found["colour"] = "bgr"
        case "":
            pass
        case other:
            raise InvalidInput(f"the network takes pixels of format {other!r}, and Terrace has Rgb8 and Bgr8")
    match metadata.get("Image.NominalPixelRange", "").lower():
        case "nominalrange_0_255":
            found |= {"scale": 1.0, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        case "normalized_0_1":
            found |= {"scale": 255.0, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        case "normalized_1_1":
            found |= {"scale": 255.0, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
        case "":
            pass
        case other:
            raise InvalidInput(f"the network takes pixels in the range {other!r}, which Terrace does not know")
    return PreprocessFacts(**found)


def beside(file: Path) -> dict[str, PreprocessFacts]:
    """What the configuration files in the folder of a network say, by their names.

    Raises:
        DataError: one of them is no JSON, or has values that make no sense.
    """
    found = {}
    for name, read in (("preprocessor_config.json", _hugging_face), ("config.json", _timm)):
        path = file.parent / name
        content = _read_json(path)
        if content is None:
            continue
        try:
            facts = read(content)
        except (ValidationError, KeyError, TypeError, ValueError, ZeroDivisionError) as exc:
            raise DataError(f"cannot use {path}: {_reason(exc)}; remove it, or mend it") from exc
        if facts != PreprocessFacts():
            found[name] = facts
    return found


def _read_json(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file, None where there is none.

    Raises:
        DataError: it cannot be read, or is no JSON object.
    """
    try:
        with path.open("rb") as handle:
            raw = handle.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise DataError(f"cannot read {path}: {exc.strerror}") from exc
    if len(raw) > _MAX_BYTES:
        raise DataError(f"{path} has more than {_MAX_BYTES} bytes: it is no configuration")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{path} is no JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object")
    return content


def _hugging_face(content: Mapping[str, Any]) -> PreprocessFacts:
    """`preprocessor_config.json` of an image network."""
    if not {"image_mean", "do_normalize", "do_rescale", "image_processor_type", "feature_extractor_type"} & set(
        content
    ):
        return PreprocessFacts()
    found: dict[str, Any] = {}
    resized = content.get("size") if content.get("do_resize", True) else None
    cropped = content.get("crop_size") if content.get("do_center_crop", "crop_size" in content) else None
    if cropped is not None:
        found["size"] = _two_sides(cropped)
        found["resize"] = "shortest-side"
        if resized is not None:
            found["resize_to"] = _one_side(resized)
    elif resized is not None:
        found["size"] = _two_sides(resized)
        found["resize"] = "shortest-side" if _is_shortest(resized) else "squash"
    rescaled = content.get("do_rescale", True)
    found["scale"] = round(1 / float(content.get("rescale_factor", 1 / 255)), 6) if rescaled else 1.0
    if content.get("do_normalize", True) and "image_mean" in content:
        found["mean"], found["std"] = _three(content["image_mean"]), _three(content["image_std"])
    else:
        found["mean"], found["std"] = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return PreprocessFacts(**found)


def _timm(content: Mapping[str, Any]) -> PreprocessFacts:
    """`config.json` of timm: `pretrained_cfg` within it, or the whole of it."""
    given = content.get("pretrained_cfg", content)
    if not isinstance(given, Mapping) or "input_size" not in given or "mean" not in given:
        return PreprocessFacts()
    colours, height, width = given["input_size"]
    if colours != 3:
        raise ValueError(f"input_size {list(given['input_size'])} has {colours} colours, Terrace has 3")
    crop = float(given.get("crop_pct") or 1.0)
    squashes = given.get("crop_mode") == "squash"
    return PreprocessFacts(
        size=(height, width),
        resize="squash" if squashes else "shortest-side",
        resize_to=None if squashes else int(min(height, width) / crop),
        scale=255.0,
        mean=_three(given["mean"]),
        std=_three(given["std"]),
    )


def _two_sides(value: Any) -> tuple[int, int]:
    if isinstance(value, Mapping):
        if "shortest_edge" in value:
            return value["shortest_edge"], value["shortest_edge"]
        return value["height"], value["width"]
    return value, value


def _one_side(value: Any) -> int:
    if isinstance(value, Mapping):
        return int(value["shortest_edge"] if "shortest_edge" in value else min(value["height"], value["width"]))
    return int(value)


def _is_shortest(value: Any) -> bool:
    return not isinstance(value, Mapping) or "shortest_edge" in value


def _three(value: Any) -> tuple[float, float, float]:
    first, second, third = value if isinstance(value, list) else [value] * 3
    return first, second, third


def _reason(exc: Exception) -> str:
    if isinstance(exc, ValidationError):
        return faults(exc, PreprocessFacts)
    return f"{exc.args[0]!r} is missing" if isinstance(exc, KeyError) else str(exc)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return abs(one - other) < 1e-4 if isinstance(one, float) else bool(one == other)


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
