"""Configuration files next to a network, in which exporters describe the expected pixels and the class names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from models.importing import hugging_face, open_clip, timm_config
from models.importing.hints import hints_in
from models.importing.preprocess import PreprocessFacts
from tierkit.documents import faults
from tierkit.errors import DataError, InvalidInput

__all__ = [
    "CONFIG",
    "OPEN_CLIP",
    "PROCESSORS",
    "check_exclusive",
    "neighbour",
    "not_followed",
    "others_about_pixels",
    "pixels_by_clip",
    "pixels_by_config",
    "pixels_by_processor",
    "read_json",
]

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of Hugging Face about pixels."""
CONFIG = "config.json"
"""File of timm or Hugging Face about the network."""

OPEN_CLIP = "open_clip_config.json"
"""File of OpenCLIP about the network and its pixels."""

_ABOUT_PIXELS = re.compile(
    r"(?i)pre[_-]?proc|image[_-]?proc|transforms?(?![a-z])|feature[_-]?extractor|normali[sz]|mean[_-]?(?:and[_-]?)?std"
)
"""Names of files that are about pixels, by whatever tool."""
_SUFFIXES = {".json", ".toml", ".yaml", ".yml"}
_NETWORKS = {".onnx", ".pt", ".pth", ".safetensors", ".keras", ".h5", ".tflite", ".engine"}

_NOT_PIXELS = {
    *("label_descriptions", "description", "license", "notes"),
    *("quantization_config", "task_specific_params", "architectures", "architecture", "model_type", "_name_or_path"),
}
"""Keys of a `config.json` that hold texts, or numbers of a network's inside."""

_SEVERAL = {"multi_label_classification", "regression"}
"""Values of `problem_type` in a file of Hugging Face for networks whose classes do not exclude each other."""

_MAX_BYTES = 4 * 1024 * 1024
"""Configurations have a few hundred bytes, but for the names of many classes."""


def neighbour(network: Path, name: str) -> Path | None:
    """The file of that name in the network's folder, or in the folder above one called `onnx`; None if there is
    none."""
    # A broken link is there, and cannot be read.
    return next((path for folder in _folders(network) if os.path.lexists(path := folder / name)), None)


def _folders(network: Path) -> list[Path]:
    folder = network.absolute().parent
    return [network.parent, *([folder.parent] if folder.name == "onnx" else [])]


def others_about_pixels(network: Path) -> list[Path]:
    """Files next to the network that are about pixels by their name, but that nothing here reads.

    A file that is named after another network in these folders is that network's.

    Raises:
        DataError: a folder cannot be listed.
    """
    found: dict[str, Path] = {}
    stems = {network.stem.lower()}
    for folder in _folders(network):
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries]
        except OSError as exc:
            raise DataError(f"cannot list {folder}: {exc.strerror}") from exc
        for path in map(Path, sorted(names)):
            if path.suffix.lower() in _NETWORKS and not _ABOUT_PIXELS.search(path.stem):
                stems.add(path.stem.lower())
            its_own = path.suffix.lower() == ".toml" and path.stem == network.stem
            about = path.suffix.lower() in _SUFFIXES and _ABOUT_PIXELS.search(path.stem)
            if (its_own or about) and path.name not in (*PROCESSORS, OPEN_CLIP):
                found.setdefault(path.name, folder / path)
    return [path for path in found.values() if not _is_of_another(path, network, stems)]


def _is_of_another(path: Path, network: Path, stems: set[str]) -> bool:
    """True if a file is named after another network than this one, and than one that this is a form of."""
    owner = max((stem for stem in stems if _begins(path.stem, stem)), key=len, default=None)
    return owner is not None and not _begins(network.stem, owner)


def _begins(name: str, stem: str) -> bool:
    rest = name.lower().removeprefix(stem)
    return name.lower().startswith(stem) and not rest[:1].isalnum()


def not_followed(path: Path) -> PreprocessFacts:
    """Refuse a file of `others_about_pixels`.

    Raises:
        DataError: always.
    """
    raise DataError(f"cannot follow {path}: by its name it is about pixels, and files of that name are not read")


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file.

    Raises:
        DataError: it cannot be read, or is not a JSON object.
    """
    try:
        with path.open("rb") as handle:
            raw = handle.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise DataError(f"cannot read {path}: {exc.strerror}") from exc
    if len(raw) > _MAX_BYTES:
        raise DataError(f"{path} has more than {_MAX_BYTES} bytes: it is not a configuration")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise DataError(f"{path} does not hold a JSON object")
    return content


def pixels_by_processor(path: Path, size: tuple[int, int] | None = None) -> PreprocessFacts:
    """Read the facts in a file of `PROCESSORS`. See `timm_config.facts_of` for `size`.

    Raises:
        DataError: it has a class, key or value that is not understood.
    """
    content = read_json(path)
    for key in ("preprocessor_config", "image_processor"):
        if isinstance(inner := content.get(key), Mapping):
            if outside := [name for name in content if hugging_face.is_image_processor({name: None})]:
                raise DataError(f"cannot follow {path}: {outside[0]!r} is outside of {key!r}")
            content = dict(inner)
    if path.name == PROCESSORS[1] and not hugging_face.is_image_processor(content):
        return PreprocessFacts()  # of texts
    if content.get("image_processor_type") == "TimmWrapperImageProcessor" and "pretrained_cfg" in content:
        return _understood(path, lambda: timm_config.facts_of(content, size))
    return _understood(path, lambda: hugging_face.facts_of(content) if content else PreprocessFacts())


def pixels_by_clip(path: Path) -> PreprocessFacts:
    """Read the facts in an `open_clip_config.json`.

    Raises:
        DataError: it has a key or value that is not understood.
    """
    return _understood(path, lambda: open_clip.facts_of(read_json(path)))


def pixels_by_config(path: Path, size: tuple[int, int] | None, channels: int | None = None) -> PreprocessFacts:
    """Read the facts in a `config.json`. See `timm_config.facts_of` for `size`.

    Args:
        channels: number of channels of the network's input, if it is fixed.

    Raises:
        DataError: it has a key or value that is not understood, or describes a network of another size.
    """
    content = read_json(path)
    if others := sorted({"image_mean", "image_std", "do_normalize", "do_rescale", "rescale_factor"} & set(content)):
        raise DataError(f"cannot follow {path}: {others[0]!r} belongs into {PROCESSORS[0]}")
    facts = _understood(path, lambda: timm_config.facts_of(content, size))
    read = {"pretrained_cfg"} if "pretrained_cfg" in content else set()
    if facts != PreprocessFacts() and not read:
        read = timm_config.PIXELS
    rest = {key: value for key, value in content.items() if key not in read}
    if unread := sorted({*hints_in(rest, _NOT_PIXELS), *({"default_cfg", "pretrained_cfgs"} & set(content))}):
        raise DataError(
            f"cannot follow {path}: {', '.join(map(repr, unread[:5]))} may be about pixels, and is not read"
        )
    if channels is not None and content.get("num_channels", channels) not in (channels, None):
        raise DataError(f"{path} says num_channels = {content['num_channels']!r}, and the network has {channels}")
    side = content.get("image_size")
    if size is not None and side is not None and _sides(side) != size:
        raise DataError(f"{path} says image_size = {side!r}, and the network takes {list(size)}")
    return facts


def _sides(value: Any) -> tuple[Any, Any] | None:
    """Height and width of an `image_size`; None if it is of no known form."""
    if isinstance(value, Mapping):
        value = [value.get("height"), value.get("width")]
    if not isinstance(value, list):
        return value, value
    return (value[0], value[1]) if len(value) == 2 else None


def check_exclusive(path: Path) -> None:
    """Refuse a `config.json` of a network whose classes do not exclude each other.

    Raises:
        InvalidInput: it is one.
        DataError: the file cannot be read.
    """
    content = read_json(path)
    for key, values in (("problem_type", _SEVERAL), ("function_to_apply", {"sigmoid"})):
        if isinstance(content.get(key), str) and content[key] in values:
            raise InvalidInput(
                f"{path} says {key} = {content[key]!r}: several classes may be right at once, or none is meant, "
                "and Terrace answers one class. Remove the key if it is wrong"
            )


def _understood(path: Path, read: Any) -> PreprocessFacts:
    try:
        facts = read()
    except ValidationError as exc:
        raise DataError(f"{path} is wrong: {faults(exc, PreprocessFacts)}") from exc
    except ValueError as exc:
        raise DataError(f"cannot follow {path}: {exc}") from exc
    assert isinstance(facts, PreprocessFacts)
    return facts
