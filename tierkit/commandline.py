"""What a command says of a wrong command line and of errors: one sentence on standard error, and an exit code."""

from __future__ import annotations

import difflib
import errno
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
import typer.main

from tierkit.errors import DataError, InvalidInput, SetupError, TerraceError
from tierkit.plaintext import harmless

__all__ = ["NO_ROOM", "Json", "UsageError", "as_sentence", "asked_wrongly", "run_module", "usage_fault"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else on standard output.")]

FAILED, WRONG = 1, 2
"""Exit codes. That of a run which Ctrl-C ended, 130, is typer's."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Why a file cannot be written that otherwise could be."""

_CHOICE = re.compile(r"'([^']*)' is not one of ('[^']*'(?:, '[^']*')*)\.$")

_UNREADABLE = {"int_parsing", "int_from_float", "int_parsing_size", "float_parsing"}
_TOO_FAR = {"less_than_equal", "greater_than_equal"}

# Typer shows click's base class of usage errors only through its descendants, and brings its own click of late.
UsageError: Any = typer.BadParameter.__base__


def usage_fault(error: Any) -> str:
    """What a `UsageError` says, with the value that was given, its whole range, and the closest of those to choose
    from; "" for a group without a command, whose help page has been printed."""
    return _with_closest(_with_value(error).replace("Value error, ", ""))


def _with_value(error: Any) -> str:
    """Typer, which reads options with pydantic, passes on the bound that was missed alone; it says little of `nan`."""
    message = str(error.format_message())
    faults = getattr(error.__cause__, "errors", None)
    if faults is None:
        return message
    fault, low, high = faults()[0], getattr(error.param, "min", None), getattr(error.param, "max", None)
    given = repr(fault["input"])
    if low is not None and fault["type"] in _UNREADABLE | _TOO_FAR:
        whole = "whole " if fault["type"].startswith("int") else ""
        reach = f"{low} to {high}" if high is not None else f"{low}"
        return message.replace(fault["msg"], f"{given} is no {whole}number from {reach}")
    return message.replace("Input should be", f"{given} should be", 1)


def _with_closest(message: str) -> str:
    """Of a value that is none of those to choose from, also the one that was probably meant."""
    found = _CHOICE.search(message)
    close = found and difflib.get_close_matches(found[1], [choice.strip("'") for choice in found[2].split(", ")], n=1)
    return f"{message} Did you mean '{close[0]}'?" if close else message


def as_sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def asked_wrongly(error: BaseException) -> bool:
    """Whether a measurement that ended with this error was asked for wrongly: other options, or another folder or file,
    would have helped."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM:
        return False
    return isinstance(error, InvalidInput | DataError) or type(error) is SetupError


def run_module(name: str, function: Callable[..., Any]) -> NoReturn:
    """Run `python -m NAME`: parse `sys.argv`, call `function` with it, and exit.

    The exit code is 2 for what was asked for wrongly, 1 for what could not be done, 130 after Ctrl-C.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(function)
    called = f"python -m {name}"
    try:
        code = typer.main.get_command(app).main(prog_name=called, standalone_mode=False)
    except UsageError as exc:
        _say(name, f"{as_sentence(usage_fault(exc))} See '{called} --help'.")
        code = WRONG
    except TerraceError as exc:
        _say(name, as_sentence(str(exc)))
        code = WRONG if asked_wrongly(exc) else FAILED
    except OSError as exc:
        _say(name, as_sentence(f"{exc.filename or 'the output'}: {exc.strerror or exc}"))
        code = FAILED
    sys.exit(code if isinstance(code, int) else 0)


def _say(name: str, text: str) -> None:
    sys.stderr.write(f"{name}: {harmless(text)}\n")
