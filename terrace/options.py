"""Options that several commands have in common."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import TypeAdapter, ValidationError

from terrace.console import screen
from tierkit import access
from tierkit.access import checked_token
from tierkit.client import DEFAULT_URL, Backoff, Client
from tierkit.commandline import Json
from tierkit.plaintext import one_line
from tierkit.types import Tier

__all__ = [
    "DEFAULT_PORT",
    "DEFAULT_URL",
    "PATIENCE_S",
    "Data",
    "DatasetName",
    "Json",
    "LowestTier",
    "ModelSet",
    "OtherDataset",
    "Scheduler",
    "TlsCa",
    "TokenFile",
    "Untrusted",
    "check_tls_ca",
    "connect",
    "connected",
    "on_command_line",
    "optional_plain_name",
    "plain_name",
    "token_from",
]

DEFAULT_PORT = 8070
"""Where `terrace up` puts the scheduler, and so where the other commands look for it."""

PATIENCE_S = 10.0

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="TERRACE_TOKEN_FILE",
        metavar="FILE",
        help="File with your token, yours alone; or put the token itself into TERRACE_TOKEN.",
    ),
]

TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca", envvar="TERRACE_TLS_CA", metavar="FILE", help="Certificates (PEM) to trust; default: public ones."
    ),
]

ModelSet = Annotated[
    Path | None,
    typer.Option(
        envvar="TERRACE_MODELS",
        metavar="SET",
        help="Model set (folder of networks and manifest); Terrace's own unless given.",
    ),
]
Data = Annotated[
    Path | None, typer.Option(envvar="TERRACE_DATA", help="Folder that holds cifar-100-python/ and mnist/.")
]
_DATASET = typer.Option(
    "--dataset",
    metavar="NAME",
    help="cifar100, mnist, or a folder with hierarchy.toml, train/ and test/. A command that only measures also takes "
    "pictures in folders called like their classes.",
)
DatasetName = Annotated[str, _DATASET]
OtherDataset = Annotated[str | None, _DATASET]
"""The configuration's unless given."""


LowestTier = Literal["end", "edge"]
"""A tier whose answer may stand: an upper one gives the next."""

_HELD_BACK = (Tier.EDGE, Tier.CLOUD)
"""Tiers that may be kept from pixels; end devices hold them anyway."""


def _upper_tiers(values: list[str] | None) -> list[str]:
    """The tiers of one or more lists with commas."""
    names = [name.strip() for value in values or () for name in value.split(",")]
    for name in names:
        if name not in _HELD_BACK:
            raise typer.BadParameter(f"{name!r} is no tier that may be kept from pixels: {', '.join(_HELD_BACK)}")
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


def connect(url: str, token_file: Path | None = None, tls_ca: Path | None = None) -> Client:
    """A client for one command: a person waits, so it gives up early. What takes long (an upload, following a job) is
    bounded by other means."""
    # /v1: as the routes in the documentation begin.
    urls = (each.strip().rstrip("/").removesuffix("/v1") for each in url.split(","))
    return Client(
        ",".join(urls),
        timeout_s=PATIENCE_S,
        backoff=Backoff(attempts=2),
        token=token_from(token_file),
        tls_ca=tls_ca,
        on_wait=_tell_wait,
    )


Scheduler = Annotated[
    str,
    typer.Option(
        envvar="TERRACE_SCHEDULER",
        metavar="URL",
        help="Where the scheduler listens; of several, all URLs, comma-separated.",
    ),
]


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of a connection, which it takes as a client, its first argument."""

    def call(
        *,
        context: typer.Context,
        scheduler: Scheduler = DEFAULT_URL,
        token_file: TokenFile = None,
        tls_ca: TlsCa = None,
        **own: Any,
    ) -> None:
        check_tls_ca(context, scheduler)
        with connect(scheduler, token_file, tls_ca) as client:
            command(client, **own)

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    *options, _ = inspect.signature(call, eval_str=True).parameters.values()
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *options)]
    functools.update_wrapper(call, command)
    call.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # what typer reads
    call.__annotations__ = {each.name: each.annotation for each in keywords}
    return call


def on_command_line(context: typer.Context, name: str) -> bool:
    """Whether a parameter was given there, and not by the environment or as a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_tls_ca(context: typer.Context, url: str) -> None:
    """Refuse certificates for a connection that has none. Those of the environment may be meant for other commands."""
    if on_command_line(context, "tls_ca") and "https://" not in url:
        raise typer.BadParameter(
            f"it goes with a URL that begins with https://, and not with {url}", param_hint="--tls-ca"
        )


def _tell_wait(reason: str, wait_s: float) -> None:
    screen(stderr=True).print(f"{one_line(reason)}; trying again in {wait_s:.0f} s", soft_wrap=True, markup=False)


def token_from(token_file: Path | None) -> Callable[[], str] | None:
    """Gives the user's token: from the file, which is read again when it changes, or, without one, from TERRACE_TOKEN.
    No flag holds it: command lines are public.

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
    """The name of a network, or of its run: no path, and nothing that a URL would take for something else."""
    from models.manifest import PlainName  # most commands have no use for it

    try:
        return TypeAdapter(PlainName).validate_python(name)
    except ValidationError as error:
        raise typer.BadParameter(
            f"{name!r} is no name of a network: letters, digits, dots, dashes and underscores, "
            "beginning with a letter or a digit"
        ) from error


def optional_plain_name(name: str | None) -> str | None:
    """As `plain_name`, where one may be left out."""
    return None if name is None else plain_name(name)
