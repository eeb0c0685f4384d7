"""Class names of an imported network: their sources, and their match with the classes of its set."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.hierarchy import Hierarchy, few
from models.importing.hints import is_for_names
from models.importing.neighbours import read_json
from tierkit.errors import DataError, InvalidInput

__all__ = [
    "LabelPlace",
    "agreed",
    "names_in",
    "names_in_config",
    "names_in_metadata",
    "numbered",
    "place_in",
    "read_labels",
]

_MOST_BYTES = 4 * 1024**2
_LONGEST = 200


_PLACEHOLDER = re.compile(r"(?i)(?:label|class)?[_ -]?\d+")
"""A name that only numbers its class."""


def read_labels(path: Path) -> tuple[str, ...]:
    """Class names in the order of the network's outputs: one in each line of a text file; or in a JSON file, such as
    the `config.json` of Hugging Face with its `id2label`.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or a name is missing, too long or there twice.
    """
    if path.suffix.lower() == ".json":
        names = names_in(read_json(path))
        if names is None:
            raise DataError(
                f"the labels {path} have no class names: it needs a list, numbers, or a key such as id2label"
            )
        return _checked(names, f"the labels {path}", "class {}")
    try:
        with path.open("rb") as handle:
            raw = handle.read(_MOST_BYTES + 1)
    except OSError as exc:
        raise DataError(f"cannot read the labels {path}: {exc.strerror}") from exc
    if len(raw) > _MOST_BYTES:
        raise DataError(f"the labels {path} have more than {_MOST_BYTES} bytes")
    try:
        lines = [line.strip() for line in raw.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as exc:
        raise DataError(f"the labels {path} are not UTF-8 (byte {exc.start}): save the file as UTF-8") from exc
    while lines and not lines[-1]:
        del lines[-1]
    return _checked(lines, f"the labels {path}", "line {}", first=1)


def _checked(names: Sequence[str], what: str, place: str, first: int = 0) -> tuple[str, ...]:
    """Check the names and return them.

    Args:
        what: description of the names in messages; `place` describes one of them.

    Raises:
        DataError: one is missing, too long or there twice.
    """
    for number, name in enumerate(names, first):
        if not name:
            raise DataError(
                f"{what} have no name in {place.format(number)}: one for each class, in the order of the outputs"
            )
        if len(name) > _LONGEST or not name.isprintable():
            raise DataError(f"{what}, {place.format(number)}: a name has at most {_LONGEST} printable characters")
    if len(names) < 2:
        raise DataError(f"{what} name {len(names)} classes: a classifier has at least two")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"{what} name {', '.join(map(repr, twice[:5]))} twice")
    return tuple(names)


def names_in(content: Any) -> tuple[str, ...] | None:
    """The class names in the content of a JSON file: a list; names by number, or numbers by name; or one of these under
    a key that files use for it. None if there are none."""
    if isinstance(content, list):
        return tuple(map(str.strip, content)) if all(isinstance(each, str) for each in content) else None
    if not isinstance(content, Mapping):
        return None
    for key, value in content.items():
        if isinstance(key, str) and is_for_names(key) and (names := names_in(value)) is not None:
            return names
    if isinstance(inner := content.get("pretrained_cfg"), Mapping):
        return names_in_config(inner)
    if all(_number(key) is not None for key in content):
        by_number = {_number(key): value for key, value in content.items()}
    elif all(type(value) is not bool and _number(value) is not None for value in content.values()):
        by_number = {_number(value): key for key, value in content.items()}
    else:
        return None
    if not content or set(by_number) != set(range(len(content))):
        return None
    values = [by_number[number] for number in range(len(content))]
    # Keras keeps the identifier of a class before its name.
    return names_in([value[-1] if isinstance(value, list) and len(value) == 2 else value for value in values])


def names_in_config(content: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The class names in a `config.json`, which says other things as well."""
    return names_in({key: content[key] for key in content if key == "pretrained_cfg" or is_for_names(str(key))})


def _number(key: Any) -> int | None:
    return int(key) if isinstance(key, int) or (isinstance(key, str) and key.isdecimal() and key.isascii()) else None


def names_in_metadata(metadata: Mapping[str, str], say: Callable[[str], None]) -> tuple[str, ...] | None:
    """Return the class names in the metadata of an ONNX file, and report the keys that could not be read."""
    for key, text in metadata.items():
        if not is_for_names(key) or not text.strip() or len(text) > _MOST_BYTES:
            continue
        for read in (json.loads, ast.literal_eval, _as_text):
            try:
                names = names_in(read(text))
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                continue
            if names is not None:
                return names
        say(f"the metadata of the file has {key} = {text!r:.80}, which is not understood as class names")
    return None


def _as_text(text: str) -> list[str]:
    """Names with a line, a comma or a space between them."""
    mark = next((mark for mark in "\n,;" if mark in text.strip()), None)
    if set("{}[]()") & set(text):
        raise ValueError("neither JSON nor Python")
    return [name for part in text.strip().split(mark) if (name := part.strip())]


def numbered(names: Sequence[str]) -> bool:
    """True if the names only number their classes, as LABEL_0, LABEL_1."""
    return all(_PLACEHOLDER.fullmatch(name) for name in names)


def agreed(
    given: tuple[str, ...] | None, found: Mapping[str, Sequence[str] | None], say: Callable[[str], None]
) -> tuple[str, ...]:
    """Return the class names from the user, or else from the files.

    Args:
        given: names from `--labels`.
        found: names in files, by the name of the file in messages.

    Raises:
        InvalidInput: two sources contradict each other, or there are no names.
        DataError: a name of a file is too long, or there twice.
    """
    sources = {} if given is None else {"--labels": given}
    for source, names in found.items():
        if names is not None and not numbered(names):
            sources[source] = tuple(names)
    if not sources:
        raise InvalidInput("no file says how the classes are called: give their names with --labels, one in each line")
    first, *others = sources
    for other in others:
        one, two = _keys(sources[first]), _keys(sources[other])
        differ = [number for number, (a, b) in enumerate(zip(one, two, strict=False)) if a.isdisjoint(b)]
        if not differ and len(one) == len(two):
            continue
        if len(one) != len(two):
            raise InvalidInput(f"{first} names {len(one)} classes, and {other} names {len(two)}: make them agree")
        shown = "; ".join(f"class {at} is {sources[first][at]!r} and {sources[other][at]!r}" for at in differ[:3])
        if set().union(*one) & set().union(*two):
            raise InvalidInput(
                f"the class names of {first} and {other} contradict each other ({shown}): correct them, or leave out "
                "--labels"
            )
        say(f"warning: {first} and {other} have no class name in common ({shown}): is the order the same?")
    return sources[first] if given is not None else _checked(sources[first], f"the class names of {first}", "class {}")


def _keys(names: Sequence[str]) -> list[set[str]]:
    """Return the forms by which each name is compared: itself, and its first synonym if no other name starts so."""
    plain = [" ".join(name.replace("_", " ").casefold().split()) for name in names]
    short = [name.partition(",")[0].strip() for name in plain]
    count = Counter(short)
    return [{name, brief} if count[brief] == 1 else {name} for name, brief in zip(plain, short, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelPlace:
    """Relation between a network's outputs and the classes of its set."""

    target: Literal["coarse", "fine"]
    order: tuple[int, ...] | None
    """The network's output for each class of the set; None where the order is the same."""


def place_in(hierarchy: Hierarchy, labels: Sequence[str], tier: str, *, source: str = "the set") -> LabelPlace:
    """Match the network's classes with the classes of the set.

    Args:
        source: where the hierarchy is from; messages name it.

    Raises:
        InvalidInput: neither the classes nor the superclasses of the set, or superclasses above the end tier.
    """
    for target, names in (("coarse", hierarchy.coarse), ("fine", hierarchy.fine)):
        if set(labels) != set(names) or (target == "coarse" and tier != "end"):
            continue
        position = {name: index for index, name in enumerate(labels)}
        order = tuple(position[name] for name in names)
        return LabelPlace(target=target, order=None if order == tuple(range(len(order))) else order)  # type: ignore[arg-type]
    missing = [name for name in hierarchy.fine if name not in set(labels)]
    stray = [name for name in labels if name not in set(hierarchy.fine)]
    differ = "; ".join(
        f"{what} {few(names)}" for what, names in ((f"{source} lacks", stray), ("the labels lack", missing)) if names
    )
    raise InvalidInput(
        f"the network's classes differ from the classes of {source} ({differ}). All networks of a set answer the same "
        "classes, and a hierarchy lists each of them in `fine` and in one superclass. On the end tier a network may "
        "answer the superclasses of the hierarchy that --hierarchy names"
    )
