"""The command `terrace`. Each subcommand is a module of its own, imported when it is called.

That keeps `terrace end` as light as the service itself: no rich, no client, no database in a node's process. Expected
errors end here as one sentence on standard error: exit code 1, and 2 for a wrong command line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from terrace import __version__
from tierkit.errors import TerraceError, UpstreamUnavailable
from tierkit.orphan import die_with_parent

__all__ = ["app", "main", "run"]

# Name, and where its typer application or plain command function is. The order is that of the help page.
_COMMANDS = {
    "demo": "terrace.commands.demo:app",
    "up": "terrace.commands.up:app",
    "classify": "terrace.commands.classify:app",
    "jobs": "terrace.commands.jobs:app",
    "devices": "terrace.commands.devices:app",
    "models": "terrace.commands.models:app",
    "doctor": "terrace.commands.doctor:app",
    "scheduler": "scheduler.__main__:run",
    "end": "end_node.__main__:run",
    "edge": "edge_node.__main__:run",
    "cloud": "cloud_node.__main__:run",
}

_NO_SCHEDULER = "start a fleet with 'terrace up', or name another scheduler with --scheduler or TERRACE_SCHEDULER"

# Typer shows click's base class of usage errors only through its descendants, and brings its own click of late.
_UsageError: Any = typer.BadParameter.__base__


class _LazyGroup(typer.core.TyperGroup):
    """Commands from `_COMMANDS`, imported when they are looked up."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # Their names are enough to list them and to guess what a misspelt one was meant to be.
        self.commands = dict.fromkeys(_COMMANDS, None)  # type: ignore[assignment]  # get_command fills in

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].partition(":")
        target = getattr(importlib.import_module(module), attribute)
        if not isinstance(target, typer.Typer):
            service = typer.Typer(add_completion=False)
            service.command()(target)
            target = service
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_LazyGroup, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"terrace {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def terrace(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Image classification over end, edge and cloud: a coarse answer at once, the fine one a little later."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(list(arguments), prog_name="terrace", standalone_mode=False)
    except _UsageError as exc:
        called = " ".join(["terrace", *arguments[:1]]) if arguments and arguments[0] in _COMMANDS else "terrace"
        path = exc.ctx.command_path if exc.ctx else called
        message = exc.format_message()
        end = "" if message.endswith((".", "?")) else "."
        typer.echo(f"{path}: {message}{end} See '{path} --help'.", err=True)
        return 2
    except TerraceError as exc:
        hint = f"; {_NO_SCHEDULER}" if isinstance(exc, UpstreamUnavailable) else ""
        typer.echo(f"terrace: {exc}{hint}.", err=True)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("stopped", err=True)
        return 130
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the console script."""
    die_with_parent()
    sys.exit(run(sys.argv[1:]))
