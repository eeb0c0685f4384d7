"""`terrace token`: who may use a scheduler or a node. Works on the file of tokens; running services read it again."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from terrace.console import Column, Listing, print_json, screen
from terrace.options import Json, with_options
from tierkit.access import TokenEntry, TokenRole, digest_of, new_token, read_book
from tierkit.access.editing import added, editing, revoked, rotated, write_private
from tierkit.errors import SetupError
from tierkit.types import Tier

__all__ = ["app", "span"]

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Make, list, exchange and revoke the tokens of users and nodes."
)


TokensFile = Annotated[
    Path,
    typer.Option("--tokens", envvar="TERRACE_TOKENS", metavar="FILE", help="The file of tokens.", dir_okay=False),
]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_LONGEST_S = 100 * 366 * 86400

DEFAULT_TOKENS = Path(".terrace/tokens.toml")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the holder of the token.", show_default=False)]

Out = Annotated[
    Path | None,
    typer.Option(
        help="Write the token into this new file, which only you may read, instead of the terminal.", dir_okay=False
    ),
]

Expires = Annotated[
    str | None, typer.Option(metavar="SPAN", help="Time until the token expires: 12h, 30d, 52w. Default: never.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """Options of `terrace token create`."""

    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the holder of the token.", show_default=False)]
    role: Annotated[
        TokenRole,
        typer.Option(
            help="user: own jobs; operator: all jobs, and the nodes; admin: trust and tokens too; node: "
            "register; worker: compute for training runs.",
            show_default=False,
        ),
    ]
    tokens: TokensFile = DEFAULT_TOKENS
    expires: Expires = None
    out: Out = None
    node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Node, worker: an id that it may take; may be repeated. Default: NAME and NAME-*.",
        ),
    ] = None
    tier: Annotated[
        list[Tier] | None, typer.Option(help="Node: a tier that it may join; may be repeated. Default: all.")
    ] = None
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE",
            help="User: a site whose nodes they see and where their jobs may run; node: a site for which it may "
            "register; may be repeated. Default: all.",
        ),
    ] = None
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="People: limit of requests.")] = None
    upload_bytes_per_minute: Annotated[int | None, typer.Option(min=1, help="People: limit of bytes sent.")] = None
    unfinished_jobs: Annotated[int | None, typer.Option(min=1, help="People: limit of jobs at a time.")] = None
    uploads: Annotated[int | None, typer.Option(min=1, help="People: limit of uploads at a time.")] = None
    streams: Annotated[int | None, typer.Option(min=1, help="People: limit of event streams at a time.")] = None
    observations_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Node: limit of observations; its device keeps the rest and waits.")
    ] = None

    def entry(self, token: str, now: datetime) -> TokenEntry:
        """Return what the file of tokens keeps about a token: its rights and its hash."""
        try:
            return TokenEntry(
                name=self.name,
                role=self.role,
                sha256=digest_of(token.encode()).hex(),
                created=now,
                expires=None if self.expires is None else now + span(self.expires),
                requests_per_minute=self.requests_per_minute,
                upload_bytes_per_minute=self.upload_bytes_per_minute,
                unfinished_jobs=self.unfinished_jobs,
                uploads=self.uploads,
                streams=self.streams,
                observations_per_minute=self.observations_per_minute,
                nodes=tuple(self.node or ()),
                tiers=tuple(self.tier or ()),
                sites=tuple(self.site or ()),
            )
        except ValidationError as exc:
            raise typer.BadParameter(_sentence(exc)) from exc


@app.command()
@with_options
def create(options: TokenOptions) -> None:
    """Make a token, show it once or write it into a new file, and add its hash to the file of tokens."""
    token, out = new_token(), options.out
    entry = options.entry(token, _now())
    with editing(options.tokens) as entries:
        entries[:] = added(entries, entry)
        _hand_over(token, out)
    where = "it is shown this once" if out is None else f"it is in {out} and nowhere else"
    _say(f"{entry.name} has a token of the role {entry.role} now; {where}, for {options.tokens} keeps only its hash")


@app.command()
def rotate(
    name: Name,
    tokens: TokensFile = DEFAULT_TOKENS,
    grace: Annotated[
        str, typer.Option(metavar="SPAN", help="Time for which the old token stays valid; 0s: it ends now.")
    ] = "24h",
    expires: Annotated[
        str | None,
        typer.Option(metavar="SPAN", help="Time until the new token expires. Default: the lifetime of the old one."),
    ] = None,
    out: Out = None,
) -> None:
    """Make another token with the same rights, and let the old one expire soon."""
    token, rest = new_token(), span(grace, zero=True)
    with editing(tokens) as entries:
        entries[:] = rotated(
            entries,
            name,
            token,
            now=_now(),
            grace=rest,
            lifetime=None if expires is None else span(expires),
        )
        _hand_over(token, out)
    old = f"is valid for another {grace}" if rest else "is worthless; services know within seconds"
    new = "" if out is None else f"the new token of {name} is in {out}; "
    _say(f"{new}the old token of {name} {old}")


@app.command()
def revoke(
    which: Annotated[str, typer.Argument(metavar="NAME|ID", help="All tokens of a name, or one.", show_default=False)],
    tokens: TokensFile = DEFAULT_TOKENS,
) -> None:
    """Revoke tokens; services refuse them within seconds."""
    with editing(tokens) as entries:
        before = len(entries)
        entries[:] = revoked(entries, which)
        count = before - len(entries)
    what = "token" if count == 1 else "tokens"
    _say(f"{count} {what} revoked; services know within seconds, and a node is off the list when its lease ends")


@app.command("list")
def list_tokens(tokens: TokensFile = DEFAULT_TOKENS, json: Json = False) -> None:
    """List the holders of tokens, with their rights and expiry. The tokens themselves are not stored."""
    book, now = read_book(tokens, any_owner=os.geteuid() == 0), _now()
    if json:
        rows = [{"id": entry.id, **entry.model_dump(mode="json", exclude={"sha256"})} for entry in book]
        print_json({"tokens": rows})
        return
    table = Listing(
        Column(title="name"),
        Column(title="role"),
        Column(title="id"),
        Column(title="expires", rank=1),
        Column(title="for", rank=2, max_width=60),
    )
    for entry in book:
        expired = entry.expired(now.timestamp())
        until = "never" if entry.expires is None else f"{entry.expires:%Y-%m-%d %H:%M}"
        table.add_row(entry.name, entry.role, entry.id, f"{until} (expired)" if expired else until, _scope(entry))
    screen().print(table, crop=False)


def _scope(entry: TokenEntry) -> str:
    """Return what a token is for, or its limits, in a few words."""
    if entry.run is not None:
        return f"{len(entry.used)} of {entry.uses} workers of run {entry.run}"
    sites = [f"{'site' if len(entry.sites) == 1 else 'sites'} {', '.join(entry.sites)}"] if entry.sites else []
    if entry.role in ("node", "worker"):
        most = entry.observations_per_minute
        limit = () if most is None else (f"{most:,} observations a minute",)
        names = entry.nodes or (entry.name, f"{entry.name}-*")
        return ", ".join([*names, *(f"{tier} only" for tier in entry.tiers), *limit, *sites])
    limits = {
        "requests a minute": entry.requests_per_minute,
        "bytes a minute": entry.upload_bytes_per_minute,
        "unfinished jobs": entry.unfinished_jobs,
        "uploads at a time": entry.uploads,
        "event streams": entry.streams,
    }
    set_limits = [f"{limit:,} {name}" for name, limit in limits.items() if limit is not None]
    return ", ".join([*set_limits, *sites]) or "no limits"


def _hand_over(token: str, out: Path | None) -> None:
    """Print the token or write it to a file, before its hash is kept: a token that was never shown is useless."""
    if out is None:
        sys.stdout.write(f"{token}\n")
        sys.stdout.flush()
        return
    try:
        write_private(out, f"{token}\n")
    except OSError as exc:
        raise SetupError(f"cannot write the token into {out}: {exc.strerror}") from exc


def _say(text: str) -> None:
    screen(stderr=True).print(text, soft_wrap=True, markup=False)


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def span(text: str, *, zero: bool = False, longest_s: int = _LONGEST_S) -> timedelta:
    """ "30d", "12h", "90m", "45s" or "2w" as a span of time; "0s" only with `zero`."""
    found = re.fullmatch(r"([0-9]{1,20})([smhdw])", text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else -1
    if seconds > longest_s:
        raise typer.BadParameter(f"{text!r} is longer than {longest_s // 86400} days")
    if not -zero < seconds:
        raise typer.BadParameter(f"{text!r} is not a span of time: write a number and s, m, h, d or w, such as 30d")
    return timedelta(seconds=seconds)


def _sentence(exc: ValidationError) -> str:
    error = exc.errors(include_url=False, include_input=False)[0]
    reason = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:  # a sentence that begins with the name of a field
        field, rest = reason.split(" ", 1)
        flag = {"nodes": "node", "tiers": "tier", "sites": "site"}.get(field, field.replace("_", "-"))
        return f"--{flag} {rest}"
    return f"--{str(error['loc'][0]).rstrip('s')}: {reason}"
