"""Options that several commands have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from tierkit.client import DEFAULT_URL, Backoff, Client

__all__ = ["DEFAULT_PORT", "DEFAULT_URL", "Json", "SchedulerUrl", "connect"]

DEFAULT_PORT = 8070
"""Where `terrace up` puts the scheduler, and so where the other commands look for it."""

SchedulerUrl = Annotated[
    str, typer.Option("--scheduler", envvar="TERRACE_SCHEDULER", metavar="URL", help="Where the scheduler listens.")
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs, and nothing else on standard output.")]


def connect(url: str) -> Client:
    """A client for one command: a person waits, so it gives up early."""
    return Client(url, backoff=Backoff(attempts=3))
