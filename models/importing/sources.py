"""All facts that the files of a network give: the names of its classes, and the pixels that it expects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx

from models.importing import first_steps, metadata as onnx_metadata
from models.importing.graph import Signature, class_numbers
from models.importing.labels import names_in_config, names_in_metadata
from models.importing.neighbours import (
    CONFIG,
    OPEN_CLIP,
    PROCESSORS,
    check_exclusive,
    neighbour,
    not_followed,
    others_about_pixels,
    pixels_by_clip,
    pixels_by_config,
    pixels_by_processor,
    read_json,
)
from models.importing.preprocess import PreprocessFacts
from tierkit.errors import InvalidInput, TerraceError

__all__ = ["class_names_of", "pixels_said"]

Say = Callable[[str], None]


def class_names_of(file: Path, model: onnx.ModelProto, say: Say) -> dict[str, tuple[str, ...] | None]:
    """Collect the class names in the network's files, by source.

    Raises:
        InvalidInput: the numbers of its classes are not in order, or its classes do not exclude each other.
        DataError: a file cannot be read.
    """
    numbers = class_numbers(model)
    if any(type(each) is int for each in numbers) and numbers != sorted(numbers):
        raise InvalidInput(
            f"the ZipMap of {file} numbers its outputs {numbers[:10]}: their names are in no clear order"
        )
    config = neighbour(file, CONFIG)
    if config is not None:
        check_exclusive(config)
    found = {"the ZipMap of the network": tuple(map(str, numbers)) or None}
    for each in model.metadata_props:  # each key by itself: they may contradict each other
        found[f"{each.key} in the metadata of the file"] = names_in_metadata({each.key: each.value}, say)
        if isinstance(inner := onnx_metadata.structure_of(each.value), dict):
            for key, value in inner.items():
                found[f"{each.key}.{key} in the metadata of the file"] = names_in_config({key: value})
    for key, value in ({} if config is None else read_json(config)).items():
        found[f"{key} in {CONFIG}"] = names_in_config({key: value})
    return found


def pixels_said(
    file: Path, model: onnx.ModelProto, known: Signature, toml: tuple[str, PreprocessFacts] | None, say: Say
) -> dict[str, PreprocessFacts]:
    """Collect the facts about pixels from each source.

    Raises:
        TerraceError: a source is not understood and `preprocess.toml` does not replace it, or a `preprocess.toml` was
            found but not given.
    """
    stated = None if toml is None else toml[1]
    readers: dict[str, Callable[[], PreprocessFacts]] = {
        "the metadata of the file": lambda: onnx_metadata.facts_of(
            {each.key: each.value for each in model.metadata_props}
        )
    }
    for name in PROCESSORS:
        if (path := neighbour(file, name)) is not None:
            readers[name] = partial(pixels_by_processor, path, known.size)
    if (path := neighbour(file, CONFIG)) is not None:
        readers[CONFIG] = partial(pixels_by_config, path, known.size, known.channels)
    if (path := neighbour(file, OPEN_CLIP)) is not None:
        readers[OPEN_CLIP] = partial(pixels_by_clip, path)
    for path in others_about_pixels(file):
        if path.suffix.lower() != ".toml":
            readers[path.name] = partial(not_followed, path)
        elif toml is None:
            raise InvalidInput(f"{path} is there, and was not given: give it with --preprocess, or take it away")
        elif path.name != toml[0]:
            say(f"{path} is not read, as --preprocess gives {toml[0]}")
    found = {"the shape of the network's input": _by_shape(known)}
    first = first_steps.facts_of(model.graph, known.input)
    if stated is None or stated.scale is None:
        found["the network's first operators (--preprocess may say otherwise)"] = first
    elif first.scale not in (None, stated.scale):
        say(f"warning: the network's first operators look as if scale = {first.scale:g}, and not {stated.scale:g}")
    for source, read in readers.items():
        try:
            found[source] = read()
        except TerraceError as exc:
            if stated is None or not stated.is_whole:
                raise type(exc)(
                    f"{exc}. To import the network nevertheless, say resize, resize_to, resample, colour, scale, mean "
                    "and std in a preprocess.toml, and give it with --preprocess"
                ) from exc
            say(f"{source} is not followed, as --preprocess says it all: {exc}")
    if toml is not None:
        found[toml[0]] = toml[1]
    return {name: facts for name, facts in found.items() if facts != PreprocessFacts()}


def _by_shape(known: Signature) -> PreprocessFacts:
    """Facts from the type and the shape of the input: UINT8 means unscaled pixels."""
    facts = PreprocessFacts(
        size=known.size,
        colour="grey" if known.channels == 1 else None,
        layout=known.layout if known.channels else None,  # type: ignore[arg-type]
    )
    if known.element == onnx.TensorProto.UINT8:
        return facts.model_copy(update={"scale": 1.0, "mean": (0.0,) * 3, "std": (1.0,) * 3})
    return facts
