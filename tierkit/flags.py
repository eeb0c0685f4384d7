"""Command-line flags from a settings class: every field but a secret is a flag, and its documentation the help text.

A service's `__main__` holds `run = command(EdgeSettings, start)` and `main() -> run_main(run)`; the CLI mounts the
same `run`, so that there is one way to start a service.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_origin

import typer
from pydantic import SecretStr

from tierkit.errors import AddressUnavailable, ClusterUnavailable, DatabaseUnavailable, SetupError
from tierkit.plaintext import harmless
from tierkit.settings import ServiceSettings, description, load_settings

__all__ = ["command", "run_main"]

S = TypeVar("S", bound=ServiceSettings)

EXIT_SETUP = 2
"""Exit code when a person must act before the service can start; a crash exits with 1."""

_TEMPORARY = (AddressUnavailable, DatabaseUnavailable, ClusterUnavailable)
"""A later start may work."""


def command(settings_class: type[S], start: Callable[[S], int]) -> Callable[..., NoReturn]:
    """A function that typer turns into a command: `--config` and one flag for each field of `settings_class`.

    It loads the settings, calls `start(settings)` and exits with the code that comes back. A `SetupError` on the way
    becomes one sentence on standard error and exit code 2, or 75 (EX_TEMPFAIL) where a later start may work, as while
    the address to listen on is not available: what supervises the service, such as systemd, may then start it again,
    and a person sees it at once.
    """

    def run(config: Path | None = None, **flags: str | bool | list[str] | None) -> NoReturn:
        try:
            # Typer gives an empty list for a flag that may be repeated and is not there.
            given = {name: value for name, value in flags.items() if value != []}
            code = start(load_settings(settings_class, flags=given, config=config))
        except SetupError as exc:
            sys.stderr.write(f"terrace {settings_class.service}: {harmless(str(exc))}\n")
            code = os.EX_TEMPFAIL if isinstance(exc, _TEMPORARY) else EXIT_SETUP
        sys.exit(code)

    about = "TOML file with a table for this service; environment variables and flags take precedence."
    options: dict[str, Any] = {"config": Annotated[Path | None, typer.Option(help=about, metavar="FILE")]}
    for name, field in settings_class.model_fields.items():
        text = _help(settings_class, name)
        if name in settings_class.tables:
            if get_origin(field.annotation) is tuple:  # one flag for each table; a single table has no flag
                metavar = "[NAME=]URL" if name == "also" else "NAME=URL"
                options[name] = Annotated[list[str] | None, typer.Option(help=text, metavar=metavar)]
        elif field.annotation is bool:
            options[name] = Annotated[bool | None, typer.Option(f"--{name.replace('_', '-')}", help=text)]
        elif field.annotation != SecretStr | None:  # every process of the machine can read a command line
            # Flags stay strings here: the settings class parses them, as it does environment variables.
            options[name] = Annotated[str | None, typer.Option(help=text, metavar="VALUE")]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None)
        for name, annotation in options.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the flags from here
    run.__annotations__ = dict(options)
    run.__name__ = settings_class.service
    run.__doc__ = settings_class.__doc__
    return run


def run_main(run: Callable[..., NoReturn]) -> None:
    """Parse `sys.argv` and call `run`, a function that `command` made."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    app()


def _help(settings_class: type[ServiceSettings], name: str) -> str:
    text = description(settings_class, name)
    field = settings_class.model_fields[name]
    if field.is_required():
        return f"{text} Required."
    default = field.default
    return text if default in (None, "", (), False) else f"{text} (default: {default})"
