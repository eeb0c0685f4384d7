"""The pixels that a network expects: size, resize rule, filter, colour order, scale, mean and spread.

Exporters write these facts into the file's metadata or into configuration files next to it
(`models.importing.neighbours`). A `preprocess.toml` supplies the facts that are missing there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from models.manifest import Fit, Resample, ResizeRule
from tierkit.documents import faults, read_document
from tierkit.errors import InvalidInput

__all__ = ["MOST_SIDE", "Preprocess", "PreprocessFacts", "assumed", "from_toml", "joined"]

MOST_SIDE = 4096
"""Pixels of a network's input."""
Side = Annotated[int, Field(ge=1, le=MOST_SIDE)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Spread = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Colour = Literal["rgb", "bgr", "grey"]


def _by_colour(value: Any) -> Any:
    """One number stands for all colours."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (value,) * 3
    return (*value,) * 3 if isinstance(value, list | tuple) and len(value) == 1 else value


Mean = Annotated[tuple[Finite, Finite, Finite], BeforeValidator(_by_colour)]
Std = Annotated[tuple[Spread, Spread, Spread], BeforeValidator(_by_colour)]


class PreprocessFacts(BaseModel):
    """Facts from one source; None for each fact that it does not give."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    size: tuple[Side, Side] | None = None
    """Height and width that the network takes."""
    resize: ResizeRule | None = None
    """Way to bring a picture to that size: its shortest side is resized and the middle cut out, it is squashed, or
    padded.
    """
    resize_to: Annotated[PositiveInt, Field(le=4 * MOST_SIDE)] | None = None
    """Length of the shortest side, or of both sides if they are squashed, before the middle is cut out."""
    resample: Resample | None = None
    """Filter of Pillow by which a picture is resized."""
    colour: Colour | None = None
    """Order of the colours, or grey for one channel."""
    scale: PositiveFloat | None = None
    """Divisor of the pixels before `mean` and `std`: 255 if these are for values of 0 to 1."""
    mean: Mean | None = None
    """Subtracted, by colour in the network's order."""
    std: Std | None = None
    """Divisor after the subtraction of `mean`, by colour in the network's order."""
    layout: Literal["nchw", "nhwc"] | None = None
    """Place of the colours: before or after height and width."""

    @property
    def is_whole(self) -> bool:
        """True if nothing but the size is left to others."""
        needed = [self.resize, self.resample, self.colour, self.scale, self.mean, self.std]
        return None not in needed and (self.resize != "shortest-side" or self.resize_to is not None)


class Preprocess(BaseModel):
    """The preprocessing in the end: facts from all sources, and usual values for the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: tuple[Side, Side]
    resize: ResizeRule = "shortest-side"
    resize_to: PositiveInt | None = None
    """None if nothing is cut out."""
    resample: Resample = "bicubic"
    colour: Colour = "rgb"
    scale: PositiveFloat = 255.0
    mean: Mean = (0.0, 0.0, 0.0)
    std: Std = (1.0, 1.0, 1.0)
    layout: Literal["nchw", "nhwc"] = "nchw"

    @model_validator(mode="before")
    @classmethod
    def _whole_side(cls, content: Any) -> Any:
        """Set the shortest side to the size itself if `resize_to` is missing."""
        shortest = isinstance(content, dict) and content.get("resize", "shortest-side") == "shortest-side"
        if shortest and "resize_to" not in content and "size" in content:
            return {**content, "resize_to": max(content["size"])}
        return content

    @model_validator(mode="after")
    def _holds_together(self) -> Preprocess:
        if self.resize == "pad" and self.resize_to is not None:
            raise ValueError("resize_to and resize = pad do not go together")
        if self.resize_to is not None and self.resize_to < max(self.size):
            raise ValueError(f"resize_to {self.resize_to} leaves less than the size {self.size[0]} x {self.size[1]}")
        if self.colour == "grey" and (len(set(self.mean)) > 1 or len(set(self.std)) > 1):
            raise ValueError(
                f"the network takes one channel, and mean {list(self.mean)}, std {list(self.std)} are for three"
            )
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
        return Fit(*self.size, self.resize, self.resize_to, self.resample)

    @property
    def channels(self) -> Literal[1, 3]:
        """Planes of the network's input."""
        return 1 if self.colour == "grey" else 3

    @property
    def steps(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Factor and offset by channel: the network gets `pixel * factor + offset`."""
        factor = tuple(1 / (self.scale * spread) for spread in self.std)
        offset = tuple(-mean / spread for mean, spread in zip(self.mean, self.std, strict=True))
        return factor[: self.channels], offset[: self.channels]


def assumed(sources: Mapping[str, PreprocessFacts], preprocess: Preprocess) -> tuple[str, ...]:
    """Return the usual values taken where no source gives any, as lines of `preprocess.toml`."""
    said = {name for facts in sources.values() for name in facts.model_dump(exclude_none=True)}
    left = [name for name in ("resize", "resample", "colour", "scale", "mean", "std") if name not in said]
    return tuple(f"{name} = {_shown(getattr(preprocess, name))}" for name in left)


def joined(sources: Mapping[str, PreprocessFacts]) -> Preprocess:
    """Combine the facts of all sources.

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
            "the network takes pictures of any size, and no file gives one: add size = [height, width] to a "
            "preprocess.toml and give it with --preprocess"
        )
    if "colour" not in known and "mean" in known and _same(_in_range(known["mean"]), _BGR_MEAN, within=0.01):
        raise InvalidInput(
            f"{said_by['mean']} says mean = {_shown(known['mean'])}, which is ImageNet's by blue, green and red, "
            'and nothing says the order of the colours: say colour = "bgr" or "rgb" in a preprocess.toml'
        )
    try:
        return Preprocess(**known)
    except ValidationError as exc:
        where = " and ".join(dict.fromkeys(said_by.values()))
        raise InvalidInput(f"{where}: {faults(exc, Preprocess)}") from exc


def from_toml(path: Path) -> PreprocessFacts:
    """Read the facts in a `preprocess.toml`.

    Raises:
        SetupError: it cannot be read, or has a wrong value.
    """
    return read_document(path, PreprocessFacts, what="preprocessing file")


_BGR_MEAN = (0.406, 0.456, 0.485)


def _in_range(mean: tuple[float, ...]) -> tuple[float, ...]:
    """A mean for values of 0 to 1."""
    return tuple(each / 255 for each in mean) if max(mean) > 3 else mean


def _same(one: Any, other: Any, within: float = 1e-4) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(_same(a, b, within) for a, b in zip(one, other, strict=True))
    return abs(one - other) < within if isinstance(one, float) else bool(one == other)


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
