"""TOML and JSON files, checked against a pydantic model. Errors are sentences that name the place."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tierkit.errors import SetupError
from tierkit.plaintext import without_passwords

__all__ = ["Frozen", "Strict", "faults", "read_document", "read_json", "read_toml", "sentence"]

_TABLE = re.compile(r"a valid dictionary( or instance of \w+)?")

M = TypeVar("M", bound=BaseModel)


class Frozen(BaseModel):
    """Cannot be changed, and takes no field that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Strict(Frozen):
    """Takes no value of another type either, such as "5" or true for a number, and no infinity."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


def read_json(path: Path, kind: type[M], *, what: str, error: type[SetupError]) -> M:
    """Return the content of a JSON file, read into `kind`.

    Args:
        what: name of the file in messages, such as "manifest".

    Raises:
        error: the file cannot be read, is not JSON, or does not fit.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise error(f"cannot read the {what} {path}: {exc.strerror}") from exc
    except ValidationError as exc:
        raise error(f"the {what} {path} is wrong: {faults(exc, kind)}") from exc


def read_document(path: Path, kind: type[M], *, what: str, content: bytes | None = None) -> M:
    """Return the content of a TOML file, read into `kind`. For the other arguments, see `read_toml`.

    Raises:
        SetupError: the file cannot be read, is not TOML, or does not fit. For an unknown name, the message gives the
            closest known one.
    """
    tables = read_toml(path, what=what, content=content)
    try:
        return kind.model_validate(tables)
    except ValidationError as exc:
        raise SetupError(f"the {what} {path}: {faults(exc, kind)}") from exc


def read_toml(path: Path, *, what: str, content: bytes | None = None) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Args:
        what: name of the file in messages, such as "links file".
        content: content of the file, if it has been read already.

    Raises:
        SetupError: the file cannot be read, or is not TOML.
    """
    try:
        # An editor may have put a byte order mark before the text.
        return tomllib.loads((path.read_bytes() if content is None else content).decode("utf-8-sig"))
    except OSError as exc:
        raise SetupError(f"cannot read the {what} {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise SetupError(f"the {what} {path} is not text in UTF-8") from exc
    except RecursionError as exc:
        raise SetupError(f"the {what} {path} is not valid TOML: its lists are too deep") from exc
    except ValueError as exc:  # also for numbers of thousands of digits
        raise SetupError(f"the {what} {path} is not valid TOML: {exc}") from exc


def faults(error: ValidationError, kind: type[BaseModel]) -> str:
    """All that pydantic found wrong with a document of `kind`, in plain words."""
    # A wrong entry does not count as one of its list: that the list is then too short is no fault of its own.
    found = [each for each in error.errors() if each["type"] != "too_short"] or error.errors()
    return "; ".join(
        sentence(
            each, ".".join(str(part) for part in each["loc"] if part != "[key]"), _fields_around(each["loc"], kind)
        )
        for each in found
    )


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
    return f"{where} is {without_passwords(repr(error['input']))}: {reason}"


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
