"""TOML files that people write, checked against a pydantic model. Errors are sentences that name the place."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tierkit.errors import SetupError

__all__ = ["faults", "parse_document", "read_document", "read_toml", "sentence"]

_TABLE = re.compile(r"a valid dictionary( or instance of \w+)?")

M = TypeVar("M", bound=BaseModel)


def read_document(path: Path, kind: type[M], *, what: str) -> M:
    """The content of a TOML file as `kind`.

    Args:
        what: how messages call the file, such as "links file".

    Raises:
        SetupError: it cannot be read, is no TOML, or does not fit; an unknown name brings the closest known one.
    """
    return parse_document(read_toml(path, what=what), kind, f"the {what} {path}")


def parse_document(document: Mapping[str, Any], kind: type[M], where: str) -> M:
    """What `read_toml` returned, as `kind`. Raises SetupError."""
    try:
        return kind.model_validate(document)
    except ValidationError as exc:
        raise SetupError(f"{where}: {faults(exc, kind, document)}") from exc


def read_toml(path: Path, *, what: str, content: bytes | None = None) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        what: how messages call the file.
        content: of the file, where it has been read already.

    Raises:
        SetupError: it cannot be read, or is no TOML.
    """
    try:
        # An editor may have put a byte order mark before the text.
        return tomllib.loads((path.read_bytes() if content is None else content).decode("utf-8-sig"))
    except OSError as exc:
        raise SetupError(f"cannot read the {what} {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SetupError(f"the {what} {path} is no text in UTF-8") from exc
    except tomllib.TOMLDecodeError as exc:
        raise SetupError(f"the {what} {path} is not valid TOML: {exc}") from exc


def faults(error: ValidationError, kind: type[BaseModel], document: Any = None) -> str:
    """All that pydantic found wrong with a document of `kind`, in plain words.

    Args:
        document: as it was read, if parts of lists shall be called by their names where they have one.
    """
    errors = error.errors()
    # A part that is wrong in itself counts as none of a list: that the list is then too short is no fault of its own.
    own = [each for each in errors if each["type"] != "too_short" or not _any_within(each["loc"], errors)]
    return "; ".join(
        sentence(
            each, _where([part for part in each["loc"] if part != "[key]"], document), _fields_around(each["loc"], kind)
        )
        for each in own
    )


def _any_within(place: tuple[int | str, ...], errors: Sequence[ErrorDetails]) -> bool:
    return any(len(each["loc"]) > len(place) and each["loc"][: len(place)] == place for each in errors)


def sentence(error: ErrorDetails, where: str, known: Mapping[str, FieldInfo]) -> str:
    """One fault in plain words.

    Args:
        where: the place of the value; "" for the whole document.
        known: the fields that may stand there.
    """
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        return f"{where} is unknown; " + (f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}")
    if error["type"] == "missing":
        field = known.get(str(error["loc"][-1]))
        meaning = " ".join((field.description if field and field.description else "").split()).rstrip(".")
        return f"{where} is missing" + (f" ({meaning[0].lower()}{meaning[1:]})" if meaning else "")
    if error["type"] == "too_short":
        return f"{where} has too few entries: {error['ctx']['actual_length']}, at least {error['ctx']['min_length']}"
    # In the words of TOML, which has lists and tables.
    reason = _TABLE.sub("a table", error["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list"))
    if not where:
        return reason
    reason = f"{reason[0].lower()}{reason[1:]}"
    field = known.get(str(error["loc"][-1]))
    # A list or table is too long for a sentence, and a secret is not repeated.
    if isinstance(error["input"], dict | list) or (field and not field.repr):
        return f"{where}: {reason}"
    return f"{where} is {error['input']!r}: {reason}"


def _where(location: Sequence[int | str], document: Any) -> str:
    """A place in a document: `delay_s of link 'up'`, or `link.0.delay_s` where the link has no name of its own."""
    named, rest = "", 0
    for number, part in enumerate(location):
        parent = document
        try:
            document = parent[part]
        except (LookupError, TypeError):  # what is missing
            break
        if isinstance(part, int) and (name := _own_name(document, parent)):
            named, rest = f"{location[number - 1]} {name!r}", number + 1
    inner = ".".join(str(part) for part in location[rest:])
    return f"{inner} of {named}" if inner and named else inner or named


def _own_name(part: Any, siblings: Sequence[Any]) -> str | None:
    """What a part of a list is called, if nothing beside it is called so, too."""
    names = [each.get("name") for each in siblings if isinstance(each, dict)]
    name = part.get("name") if isinstance(part, dict) else None
    return name if isinstance(name, str) and name and names.count(name) == 1 else None


def _fields_around(location: tuple[int | str, ...], kind: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Fields by the names that may stand where the last part of `location` does."""
    inner: Any = kind
    for part in location[:-1]:
        if isinstance(part, str) and _is_model(inner) and part in _fields(inner):
            inner = _fields(inner)[part].annotation
        # Lists, tuples and mappings: what they hold is their last type argument that is one.
        while (arguments := getattr(inner, "__args__", ())) and not _is_model(inner):
            inner = next((a for a in reversed(arguments) if a is not Ellipsis and a is not type(None)), None)
    return _fields(inner) if _is_model(inner) else {}


def _fields(kind: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Fields by the name under which a file has them."""
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
