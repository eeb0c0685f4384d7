"""Tokens and the token file, which gives their owners and rights.

A token is 256 random bits, so its plain SHA-256 gives nothing away and cannot be guessed. Salt or a slow hash, which
protect passwords, would only make each request more expensive. The file holds only hashes:

    [[token]]
    name = "alice"
    role = "user"
    sha256 = "9f86d081…"
    expires = 2027-01-31T00:00:00Z
    requests_per_minute = 600
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from tierkit.access.files import read_private
from tierkit.documents import read_document
from tierkit.errors import SetupError
from tierkit.types import Tier
from tierkit.wire.messages import NodeId, SiteName

__all__ = [
    "MOST_TOKENS",
    "TokenEntry",
    "TokenRights",
    "TokenRole",
    "digest_of",
    "invitation_of",
    "new_token",
    "read_book",
    "write_book",
]

_Limit = Annotated[int, Field(gt=0, le=10**12)]

TokenRole = Literal["user", "operator", "admin", "node", "worker"]

_PREFIX = "terrace_"
"""Lets people and scanners for leaked secrets see what it is."""

_PATTERN = r"^[a-z0-9*?][a-z0-9._*?-]{0,62}$"
_ID_LENGTH = 8
_INVITED = re.compile(r"terrace_invite~([a-z0-9][a-z0-9._-]{0,62})~.*", re.ASCII)


def new_token(invited: str = "") -> str:
    """A fresh token: 256 random bits as text.

    Args:
        invited: the name of an invitation, whose token says it, so that its worker can be called after it.
    """
    return _PREFIX + (f"invite~{invited}~" if invited else "") + secrets.token_urlsafe(32)


def invitation_of(token: str) -> str | None:
    """The name of the invitation that a token is; None for any other token."""
    found = _INVITED.fullmatch(token)
    return None if found is None else found[1]


def digest_of(token: bytes) -> bytes:
    """SHA-256 of a token, 32 bytes."""
    return hashlib.sha256(token).digest()


class TokenRights(BaseModel):
    """Owner and rights of a token."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: NodeId
    """Name of its owner. Several tokens may have one name while they are exchanged; limits count per name."""
    role: TokenRole
    """Role of the token. `user` submits jobs, sees and cancels their own, and uses a node's models. `operator` sees and
    cancels all jobs, and drains and removes nodes as well. `admin` also decides on trust and tokens. `node` registers
    and fetches networks. `worker` computes for training runs, and may find their hosts."""
    requests_per_minute: _Limit | None = None
    """People: requests on average, and at once at most."""
    upload_bytes_per_minute: _Limit | None = None
    """People: bytes of images on average. An upload that has begun is completed; the next one waits."""
    unfinished_jobs: _Limit | None = None
    """People: jobs that wait or run at a time."""
    uploads: _Limit | None = None
    """People: uploads under way at a time."""
    streams: _Limit | None = None
    """People: event streams open at a time."""
    observations_per_minute: _Limit | None = None
    """Node: observations on average. A batch that has begun is taken; the next one waits on its device."""
    nodes: Annotated[tuple[Annotated[str, Field(pattern=_PATTERN)], ...], Field(max_length=64)] = ()
    """Node and worker: ids that it may take, `*` and `?` as in a shell. Default: the token's name, and that with "-"
    and more."""
    tiers: tuple[Tier, ...] = ()
    """Node: tiers that it may register for. Default: all."""
    sites: Annotated[tuple[SiteName, ...], Field(max_length=1_000)] = ()
    """User: sites whose nodes they see and where their jobs run. Node: sites for which it may register; one that names
    none gets the only one. Default: all."""
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    """Worker: an invitation to this training run. It gives no other right, and is shown only to the scheduler."""
    uses: Annotated[int, Field(ge=1, le=1_000)] | None = None
    """Invitation: number of names under which workers may come with it."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        limits = ("requests_per_minute", "upload_bytes_per_minute", "unfinished_jobs", "uploads", "streams")
        invitation = ("run", "uses")
        observations = "observations_per_minute"
        others = {"node": (*limits, *invitation), "worker": (*limits, "tiers", observations)}.get(
            self.role, ("nodes", "tiers", observations, *invitation)
        )
        if self.role not in ("user", "node"):
            others = (*others, "sites")
        for name in others:
            if getattr(self, name):
                raise ValueError(f"{name} is not for tokens of the role {self.role}")
        if (self.run is None) != (self.uses is None):
            raise ValueError("uses and run belong together, in an invitation")
        return self


class TokenEntry(TokenRights):
    """One token of the file."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    """sha256 of the token. Messages do not repeat it: it may be the token itself, by mistake."""
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    """Refused from then on, by the clock of the service that is asked. None: never."""
    used: Annotated[tuple[NodeId, ...], Field(max_length=1_000)] = ()
    """Invitation: names under which workers have come with it."""
    inviter: NodeId | None = None
    """Invitation: who has made it."""

    @property
    def id(self) -> str:
        """Tells tokens of one name apart: the beginning of the hash."""
        return self.sha256[:_ID_LENGTH]

    def expired(self, now: float) -> bool:
        """True if it has expired at `now`, in seconds since 1970."""
        return self.expires is not None and self.expires.timestamp() <= now

    def may_take(self, node_id: str) -> bool:
        """True if a node or worker with this token may have this id."""
        patterns = self.nodes or (self.name, f"{self.name}-*")
        return any(fnmatchcase(node_id, pattern) for pattern in patterns)


MOST_TOKENS = 10_000
"""Most tokens of a file."""


class _File(BaseModel):
    """Content of a file of tokens: tables [[token]]."""

    model_config = ConfigDict(extra="forbid")

    token: Annotated[tuple[TokenEntry, ...], Field(max_length=MOST_TOKENS)] = ()


def read_book(path: Path, *, any_owner: bool = False) -> tuple[TokenEntry, ...]:
    """Return the tokens of a file.

    Args:
        any_owner: see `read_private`.

    Raises:
        SetupError: see `read_private`; or the file is empty, or an entry is wrong. The message names file and entry.
    """
    content = read_private(path, "the file of tokens", any_owner=any_owner)
    if not content:
        raise SetupError(f"the file of tokens {path} is empty: 'terrace token create' writes one")
    file = read_document(path, _File, what="file of tokens", content=content)
    roles: dict[str, str] = {}
    for entry in file.token:
        if roles.setdefault(entry.name, entry.role) != entry.role:
            raise SetupError(
                f"the file of tokens {path}: {entry.name!r} has tokens of two roles: give one another name"
            )
    if len({entry.sha256 for entry in file.token}) != len(file.token):
        raise SetupError(f"the file of tokens {path}: two entries have the same sha256: each token needs its own entry")
    return file.token


def write_book(entries: Iterable[TokenEntry]) -> str:
    """The content of a token file; `read_book` reads it."""
    lines = [
        "# Who may use Terrace: hashes of tokens. Written by `terrace token`; services read it again on change.",
        "",
    ]
    for entry in entries:
        lines.append("[[token]]")
        for name in TokenEntry.model_fields:
            value = getattr(entry, name)
            if value is not None and value != ():
                lines.append(f"{name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: str | int | datetime | tuple[str, ...]) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z"
    # Names, hashes and patterns are plain ASCII, which JSON and TOML write alike.
    return re.sub(r"\s+", " ", json.dumps(value))
