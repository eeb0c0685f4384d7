"""The command `terrace`. Each subcommand is a separate module, imported when it is called.

That keeps `terrace end` as light as the service itself: no rich, no client, no database in a node's process. Expected
errors end here as one sentence on standard error: exit code 1, and 2 for a wrong command line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import typer.core
import typer.main

from terrace import __version__
from tierkit.commandline import NO_ROOM, UsageError, as_sentence, asked_wrongly
from tierkit.errors import Standby, TerraceError, Unauthenticated, UpstreamTimeout, UpstreamUnavailable
from tierkit.memory import importing
from tierkit.orphan import die_with_parent
from tierkit.plaintext import harmless

__all__ = ["app", "main", "run"]

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_START, _USE, _SERVE = "Start here", "Use a fleet", "Services, one process each"


class _Command(NamedTuple):
    """A subcommand before it is imported."""

    target: str
    """Module and attribute of its typer application or plain command function."""
    summary: str
    panel: str


# The order is that of the help page.
_COMMANDS = {
    "demo": _Command("terrace.commands.demo:app", "See it all work, in a few seconds.", _START),
    "up": _Command("terrace.commands.up:app", "Run a fleet on this machine until Ctrl-C.", _START),
    "doctor": _Command("terrace.commands.doctor:app", "Find out what is wrong, and what to do.", _START),
    "sample": _Command("terrace.commands.sample:app", "Write pictures to try it with.", _START),
    "classify": _Command("terrace.commands.classify:app", "Classify files, folders, zips and arrays.", _USE),
    "watch": _Command("terrace.commands.watch:app", "Classify a camera, a stream or a folder, right here.", _USE),
    "jobs": _Command("terrace.commands.jobs:app", "List, follow, read and cancel jobs.", _USE),
    "top": _Command("terrace.commands.top:app", "Watch the nodes and jobs of a fleet.", _USE),
    "devices": _Command("terrace.commands.devices:app", "See the nodes, drain or remove them.", _USE),
    "sites": _Command("terrace.commands.sites:app", "See the sites of a fleet, drain or remove them.", _USE),
    "sources": _Command("terrace.commands.sources:app", "See and change where devices take pictures from.", _USE),
    "observations": _Command("terrace.commands.observations:app", "See what the sources of devices saw.", _USE),
    "sinks": _Command("terrace.commands.sinks:app", "Send events to webhooks and other systems.", _USE),
    "learning": _Command("terrace.commands.learning:app", "See what devices keep, and how far tiers agree.", _USE),
    "datasets": _Command("terrace.commands.datasets:app", "Make data sets of labelled pictures.", _USE),
    "token": _Command("terrace.commands.token:app", "Make and revoke the tokens of users and nodes.", _USE),
    "models": _Command("terrace.commands.models:app", "The networks: list, check, measure, make.", _USE),
    "train": _Command("terrace.commands.train:app", "Train a network on many machines.", _USE),
    "privacy": _Command("terrace.commands.privacy:app", "Measure what the encoders give away.", _USE),
    "bench": _Command("terrace.commands.bench:app", "Measure latency and throughput under load.", _USE),
    "experiment": _Command("terrace.commands.experiment:app", "Measure the paper's tables and figures.", _USE),
    "scheduler": _Command("scheduler.__main__:run", "Takes jobs, keeps the device list, spreads the work.", _SERVE),
    "end": _Command("end_node.__main__:run", "The coarse answer, next to where images arise.", _SERVE),
    "edge": _Command("edge_node.__main__:run", "The fine answer, near by.", _SERVE),
    "cloud": _Command("cloud_node.__main__:run", "The fine answer, from the largest machines.", _SERVE),
}

_HINTS: dict[type[TerraceError], str] = {
    UpstreamUnavailable: "start a fleet with 'terrace up', or name another scheduler with --scheduler or"
    " TERRACE_SCHEDULER",
    Standby: "if another one leads, name all of them: --scheduler URL,URL",
    Unauthenticated: "show your token with --token-file FILE or in TERRACE_TOKEN; the scheduler's operator makes one"
    " with 'terrace token create'",
    UpstreamTimeout: "it hangs or has too much to do: look at its log, or restart it (no job is lost)",
}


class _LazyGroup(typer.core.TyperGroup):
    """Command group that lists the table above and imports only the called command."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, command in _COMMANDS.items():
            self.add_command(typer.core.TyperCommand(name, help=command.summary, rich_help_panel=command.panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        # As a path it would be the current folder. A service has settings that may be empty, such as --trusted.
        if name and _COMMANDS[name].panel != _SERVE and any(re.fullmatch("(--[a-z-]+=)?", word) for word in rest):
            raise UsageError("an empty value stands where one is needed: give it, or leave the option out")
        return name, _load(name) if name else listed, rest


def _load(name: str) -> Any:
    module, _, attribute = _COMMANDS[name].target.partition(":")
    with importing(freeze=_COMMANDS[name].panel == _SERVE):
        target = getattr(importlib.import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        service = typer.Typer(add_completion=False)
        service.command()(target)
        target = service
    command = typer.main.get_command(target)
    command.name = name
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


def run(arguments: Sequence[str], commands: typer.Typer = app, name: str = "terrace") -> int:
    """Run one command line of `commands`; returns the exit code."""
    command = typer.main.get_command(commands)
    try:
        code = command.main(list(arguments), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except UsageError as exc:
        called = " ".join([name, *arguments[:1]]) if arguments and arguments[0] in _COMMANDS else name
        path = exc.ctx.command_path if exc.ctx else called
        message = exc.format_message().replace("Value error, ", "")
        if not message:
            return 2  # a group without a command: its help page has been printed
        typer.echo(harmless(f"{path}: {as_sentence(message)} See '{path} --help'."), err=True)
        return 2
    except TerraceError as exc:
        hint = next((f"; {hint}" for kind, hint in _HINTS.items() if isinstance(exc, kind)), "")
        typer.echo(harmless(f"{name}: {as_sentence(f'{exc}{hint}')}"), err=True)
        return 2 if asked_wrongly(exc) else 1
    except BrokenPipeError:
        _drop_output()  # the reader has closed the pipe and knows it
        return 1
    except OSError as exc:
        if exc.errno not in NO_ROOM:
            raise
        _drop_output()
        typer.echo(harmless(f"{name}: cannot write {exc.filename or 'the output'}: {exc.strerror}."), err=True)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("stopped", err=True)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _drop_output() -> None:
    """Discard the rest of the output: Python would write it again at exit and print another error."""
    with open(os.devnull, "wb") as nowhere, contextlib.suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _foreign_package() -> str:
    """Return why Terrace cannot run from the current folder, in a sentence; "" if it can.

    `python -m` looks for packages in the current folder first, and several of ours have names that others use, too.
    """
    home = Path(__file__).parents[1]
    ours = "cloud_node edge_node encryption end_node experiments models scheduler tierkit training"
    for name in ours.split():
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and Path(spec.origin).parents[1] != home:
            return (
                f"the package {name!r} in {Path(spec.origin).parents[1]} hides Terrace's own: "
                "take that folder out of PYTHONPATH, and start 'terrace' in place of 'python -m terrace', "
                "or start it from another folder."
            )
    return ""


def main() -> None:
    """Entry point of the console script."""
    die_with_parent()
    if fault := _foreign_package():
        typer.echo(harmless(f"terrace: {fault}"), err=True)
        sys.exit(2)
    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        # A thread may still compute, and Python would wait for it.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
