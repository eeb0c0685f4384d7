"""Routes of tokens for admins. They change the same file as the command `terrace token` does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path as FilePath
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat

from scheduler.api.routing import ADMINS, CHECKS, MISSING, SmallBody
from tierkit.access import Authenticator, TokenEntry, TokenRights, digest_of, new_token, read_book
from tierkit.access.editing import added, editing, revoked, rotated
from tierkit.errors import Conflict, SetupError
from tierkit.wire.messages import NodeId

__all__ = ["LONGEST_S", "change_tokens", "tokens"]

LONGEST_S = 100 * 366 * 86400

tokens = APIRouter(tags=["tokens"], dependencies=[*CHECKS, *ADMINS], route_class=SmallBody)

T = TypeVar("T")
Lifetime = Annotated[PositiveFloat, Field(le=LONGEST_S)]
Name = Annotated[NodeId, Path(description="Name of the token. To revoke, its id is accepted too.")]


class NewToken(TokenRights):
    """Rights of a token to create; names are the same as in the file of tokens."""

    expires_s: Lifetime | None = Field(None, description="Validity in seconds; null: until it is revoked.")


class Rotation(BaseModel):
    """Exchange of a token for another one with the same rights."""

    model_config = ConfigDict(extra="forbid")

    grace_s: Annotated[NonNegativeFloat, Field(le=LONGEST_S)] = Field(
        86400.0, description="Seconds for which the old token stays valid."
    )
    expires_s: Lifetime | None = Field(None, description="Validity in seconds; null: as long as the old token had.")


class TokenNow(TokenRights):
    """A token without its secret."""

    id: str = Field(description="The beginning of its hash: tells tokens of one name apart.")
    created: datetime | None = Field(description="Time at which it was made.")
    expires: datetime | None = Field(description="Time until which it is valid; null: until it is revoked.")
    used: tuple[str, ...] = Field(description="Names under which workers have come with an invitation.")
    inviter: str | None = Field(description="Name of the token that made the invitation; null for other tokens.")


class Tokens(BaseModel):
    """All tokens of the file."""

    tokens: list[TokenNow] = Field(description="Tokens, in the order of the file.")


class Secret(BaseModel):
    """A token that was made; it is shown only once."""

    token: str = Field(description="The token itself; the scheduler keeps only its hash.")
    expires: datetime | None = Field(description="Time until which it is valid; null: until it is revoked.")


@tokens.get("/v1/tokens", response_model=Tokens, summary="The tokens")
async def list_tokens(request: Request) -> Tokens:
    """Tokens without their secrets, in the order of the file."""
    _, path = _authenticator(request)
    entries = await _safely(lambda: read_book(path))
    return Tokens(tokens=[TokenNow(id=entry.id, **entry.model_dump(exclude={"sha256"})) for entry in entries])


@tokens.post(
    "/v1/tokens",
    status_code=201,
    response_model=Secret,
    responses={409: {"description": "The name has a token, or the file of tokens cannot be changed."}},
    summary="Make a token",
)
async def make(request: Request, wanted: NewToken) -> Secret:
    """The token is returned only here. This service accepts it at once, the others within seconds."""
    token, now = new_token(), _now()
    expires = None if wanted.expires_s is None else now + timedelta(seconds=wanted.expires_s)
    rights = wanted.model_dump(exclude={"expires_s"})
    entry = TokenEntry(sha256=_hash(token), created=now, expires=expires, **rights)
    await change_tokens(request, lambda entries: added(entries, entry))
    return Secret(token=token, expires=expires)


@tokens.post(
    "/v1/tokens/{name}/rotate",
    status_code=201,
    response_model=Secret,
    responses={**MISSING, 409: {"description": "It is an invitation, or the file of tokens cannot be changed."}},
    summary="Exchange a token for another with the same rights",
)
async def rotate(request: Request, name: Name, how: Rotation) -> Secret:
    """The old token stays valid for `grace_s` seconds. The new token is returned only here."""
    token = new_token()
    changed = await change_tokens(
        request,
        lambda entries: rotated(
            entries,
            name,
            token,
            now=_now(),
            grace=timedelta(seconds=how.grace_s),
            lifetime=None if how.expires_s is None else timedelta(seconds=how.expires_s),
        ),
    )
    return Secret(token=token, expires=next(each.expires for each in changed if each.sha256 == _hash(token)))


@tokens.delete(
    "/v1/tokens/{name}",
    status_code=204,
    responses={**MISSING, 409: {"description": "The file of tokens cannot be changed."}},
    summary="Revoke tokens by name or id",
)
async def revoke(request: Request, name: Name) -> None:
    """Revokes all tokens of a name, or the token with this id. Services refuse them within seconds."""
    await change_tokens(request, lambda entries: revoked(entries, name))


def _authenticator(request: Request) -> tuple[Authenticator, FilePath]:
    """The authenticator of the scheduler, and its file of tokens."""
    authenticator: Authenticator | None = request.app.state.authenticator
    if authenticator is None or authenticator.path is None:
        raise Conflict("this scheduler asks for no tokens; start it with --tokens FILE")
    return authenticator, authenticator.path


async def change_tokens(request: Request, change: Callable[[list[TokenEntry]], list[TokenEntry]]) -> list[TokenEntry]:
    """Change the file of tokens, and let it count here at once; the entries as they are then."""
    authenticator, path = _authenticator(request)

    def work() -> list[TokenEntry]:
        if not path.exists():
            raise SetupError(f"the file of tokens {path} is gone: the tokens that were in it count until a restart")
        with editing(path) as entries:
            entries[:] = change(entries)
        authenticator.load()
        return entries

    return await _safely(work)


async def _safely(work: Callable[[], T]) -> T:
    """Work on the file in a thread, to its end whatever becomes of the request."""
    try:
        return await asyncio.shield(asyncio.to_thread(work))
    except SetupError as exc:
        raise Conflict(str(exc)) from exc


def _hash(token: str) -> str:
    return digest_of(token.encode()).hex()


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
