"""Options that several commands have in common."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import TypeAdapter, ValidationError

from terrace.console import screen
from tierkit import access
from tierkit.access import checked_token
from tierkit.client import DEFAULT_URL, Backoff, Client
from tierkit.commandline import Json, show_to_typer, with_options
from tierkit.plaintext import one_line
from tierkit.types import Tier

__all__ = [
    "DEFAULT_PORT",
    "DEFAULT_URL",
    "PATIENCE_S",
    "Credentials",
    "Data",
    "DatasetName",
    "Json",
    "LowestTier",
    "ModelSet",
    "OnlySite",
    "OtherDataset",
    "Scheduler",
    "TlsCa",
    "TokenFile",
    "Untrusted",
    "check_tls_ca",
    "connected",
    "on_command_line",
    "optional_plain_name",
    "plain_name",
    "token_from",
    "with_options",
]

DEFAULT_PORT = 8070
"""Port at which `terrace up` starts the scheduler and the other commands look for it."""

PATIENCE_S = 10.0

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="TERRACE_TOKEN_FILE",
        metavar="FILE",
        help="File with your token, which only you may read; or put the token itself into TERRACE_TOKEN.",
    ),
]

TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", envvar="TERRACE_TLS_CA", metavar="FILE", help="Certificates (PEM) to trust; default: public ones."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Options that prove who the user is and which certificates the user trusts."""

    token_file: TokenFile = None
    tls_ca: TlsCa = None

    def connect(self, url: str) -> Client:
        """Return a client for one command, which gives up early because a person waits.

        Uploads have other bounds, and so has following a job.
        """
        # /v1: as the routes in the documentation begin.
        urls = (each.strip().rstrip("/").removesuffix("/v1") for each in url.split(","))
        return Client(
            ",".join(urls),
            timeout_s=PATIENCE_S,
            backoff=Backoff(attempts=2),
            token=token_from(self.token_file),
            tls_ca=self.tls_ca,
            on_wait=_tell_wait,
        )


ModelSet = Annotated[
    Path | None,
    typer.Option(
        envvar="TERRACE_MODELS",
        metavar="SET",
        help="Model set (folder of networks and manifest). Default: Terrace's own.",
    ),
]
Data = Annotated[
    Path | None, typer.Option(envvar="TERRACE_DATA", help="Folder that holds cifar-100-python/ and mnist/.")
]
_DATASET = typer.Option(
    "--dataset",
    metavar="NAME",
    help="cifar100, mnist, or a folder with hierarchy.toml, train/ and test/. A command that only measures "
    "also takes pictures in folders named after their classes.",
)
DatasetName = Annotated[str, _DATASET]
OtherDataset = Annotated[str | None, _DATASET]
"""A data set that replaces the configuration's."""


LowestTier = Literal["end", "edge"]
"""A tier that may give the final answer although a higher tier exists."""

_HELD_BACK = (Tier.EDGE, Tier.CLOUD)
"""Tiers that may get features instead of pixels; end devices always hold the pixels."""


def _upper_tiers(values: list[str] | None) -> list[str]:
    """Split comma-separated lists of tiers."""
    names = [name.strip() for value in values or () for name in value.split(",")]
    for name in names:
        if name not in _HELD_BACK:
            raise typer.BadParameter(f"{name!r} is not a tier that may be kept from pixels: {', '.join(_HELD_BACK)}")
    return list(dict.fromkeys(names))


Untrusted = Annotated[
    list[str] | None,
    typer.Option(
        "--untrusted",
        metavar="TIERS",
        callback=_upper_tiers,
        help="Tiers that must not see pixels, and get features instead: edge, cloud or edge,cloud.",
    ),
]


Scheduler = Annotated[
    str,
    typer.Option(
        envvar="TERRACE_SCHEDULER",
        metavar="URL",
        help="URL of the scheduler; of several, all URLs, comma-separated.",
    ),
]

OnlySite = Annotated[str | None, typer.Option("--site", metavar="SITE", help="Only this site.")]


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a connection to a command, whose first argument is the client."""

    def call(
        *, context: typer.Context, scheduler: Scheduler = DEFAULT_URL, credentials: Credentials, **own: Any
    ) -> None:
        check_tls_ca(context, scheduler)
        with credentials.connect(scheduler) as client:
            command(client, **own)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    *options, _ = inspect.signature(call, eval_str=True).parameters.values()
    functools.update_wrapper(call, command)
    show_to_typer(call, [*(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), *options])
    return with_options(call)


def on_command_line(context: typer.Context, name: str) -> bool:
    """True if a parameter was given there, and not by the environment or as a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_tls_ca(context: typer.Context, url: str) -> None:
    """Refuse `--tls-ca` for a URL without TLS. The environment may set it for other commands."""
    if on_command_line(context, "tls_ca") and "https://" not in url:
        raise typer.BadParameter(
            f"it goes with a URL that begins with https://, and not with {url}", param_hint="--tls-ca"
        )


def _tell_wait(reason: str, wait_s: float) -> None:
    screen(stderr=True).print(f"{one_line(reason)}; trying again in {wait_s:.0f} s", soft_wrap=True, markup=False)


def token_from(token_file: Path | None) -> Callable[[], str] | None:
    """Return a function that gives the user's token: from the file, or without a file from TERRACE_TOKEN.

    The file is read again when it changes. No flag holds a token, because other users can read command lines.

    Raises:
        SetupError: the file cannot be read, holds no token, or others may read it; TERRACE_TOKEN holds none.
    """
    if token_file is not None:
        return access.TokenFile(token_file)
    if not (token := os.environ.get("TERRACE_TOKEN")):
        return None
    checked = checked_token(token, "TERRACE_TOKEN")
    return lambda: checked


def plain_name(name: str) -> str:
    """Check the name of a network or of its run: not a path, and safe in a URL."""
    from models.manifest import PlainName  # most commands have no use for it

    try:
        return TypeAdapter(PlainName).validate_python(name)
    except ValidationError as error:
        raise typer.BadParameter(
            f"{name!r} is not a name of a network: letters, digits, dots, dashes and underscores, "
            "beginning with a letter or a digit"
        ) from error


def optional_plain_name(name: str | None) -> str | None:
    """Check a name with `plain_name` if there is one."""
    return None if name is None else plain_name(name)
