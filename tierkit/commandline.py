"""Common parts of the command lines of Terrace and its experiments."""

from __future__ import annotations

import errno
import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperOption

from tierkit.errors import DataError, InvalidInput, NotFound, ProviderUnavailable, SetupError, WeightsError

__all__ = ["NO_ROOM", "Json", "UsageError", "as_sentence", "asked_wrongly", "show_to_typer", "with_options"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else on standard output.")]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error codes of a write that fails for lack of room or by a fault of the disk."""

# Typer shows click's base class of usage errors only through its descendants, and brings its own click of late.
UsageError: Any = typer.BadParameter.__base__


_type_shown = TyperOption.display_type_rich


def _type_of_values(option: TyperOption, ctx: Any) -> str | None:
    """Hide the type of flags: Typer's help pages show `<bool>` at flags, as if they took a value."""
    return None if option.is_flag else _type_shown(option, ctx)


TyperOption.display_type_rich = _type_of_values  # type: ignore[method-assign, assignment]  # it has no setting for this


def as_sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def asked_wrongly(error: BaseException) -> bool:
    """True if a command that ended with this error was asked for wrongly: other options, or another name, folder or
    file, would have helped."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM:
        return False
    wrong = InvalidInput | NotFound | DataError | ProviderUnavailable | WeightsError
    return isinstance(error, wrong) or type(error) is SetupError


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer a flat signature: each parameter that is a dataclass of options becomes one option per field."""
    signature = inspect.signature(command, eval_str=True)
    taken = {name: each.annotation for name, each in signature.parameters.items()}
    groups = {name: kind for name, kind in taken.items() if isinstance(kind, type) and is_dataclass(kind)}
    fields = {name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()}

    @functools.wraps(command)
    def call(**given: Any) -> None:
        made = {name: group(**{field: given.pop(field) for field in fields[name]}) for name, group in groups.items()}
        command(**given, **made)

    flat = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        for each in (fields[name].values() if name in fields else [parameter])
    ]
    show_to_typer(call, flat)
    return call


def show_to_typer(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Have typer read these parameters as the command's options."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {each.name: each.annotation for each in parameters}
