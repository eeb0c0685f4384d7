"""Routes of the privacy audit: reconstructions from what encoders send."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Path as InPath, Response

from encryption.audit.kept import RECORD, KeptAudit, read_audit, read_picture
from models.manifest import weights_folder
from scheduler.api.routing import CHECKS, NOSNIFF, USERS, Service
from scheduler.api.schemas import AuditReport
from scheduler.api.streams import NO_STORE
from scheduler.settings import SchedulerSettings
from tierkit.errors import DataError, NotFound

__all__ = ["has_audit", "privacy"]

_FOLDER = "privacy"
"""Folder of the audit in the state folder or the model set."""

_log = logging.getLogger(__name__)

_NONE = (
    "there is no audit of the encoders of this fleet: 'terrace privacy audit --all --models SET --out SET/privacy' "
    "makes one, where SET is its model set"
)

privacy = APIRouter(tags=["watching"], dependencies=[*CHECKS, *USERS])

Found = tuple[Literal["state", "models", "bundled"], Path, KeptAudit]


def _find(settings: SchedulerSettings) -> Found:
    """Return the audit of the state folder, else the audit of the model set. Blocks.

    Raises:
        NotFound: there is none, or it is damaged.
    """
    of_set = settings.models or weights_folder()
    bundled = of_set.resolve() == weights_folder().resolve()
    places = ("state", settings.state), ("bundled" if bundled else "models", of_set)
    for source, parent in places:
        folder = parent / _FOLDER
        try:
            audit = read_audit(folder)
        except DataError as exc:
            _log.error("the audit cannot be shown", extra={"why": str(exc)})
            raise NotFound(f"the audit that is kept for this fleet is damaged ({source}): make it again") from exc
        if audit is not None:
            return source, folder, audit  # type: ignore[return-value]  # the literals of the tuple above
    raise NotFound(_NONE)


def has_audit(settings: SchedulerSettings) -> bool:
    """True if there is one; it is not read."""
    parents = settings.state, settings.models or weights_folder()
    return any((parent / _FOLDER / RECORD).is_file() for parent in parents)


@privacy.get(
    "/v1/privacy/audit",
    response_model=AuditReport,
    responses={404: {"description": "There is none, or it is damaged."}},
    summary="The audit of the encoders",
)
async def get_audit(scheduler: Service, response: Response) -> AuditReport:
    """One row per encoder, form and attack. The pictures of row 3 are at `/v1/privacy/audit/3.png`, the originals at
    `/v1/privacy/audit/originals.png`. The audit of the state folder takes precedence over the audit of the model
    set."""
    source, _, audit = await asyncio.to_thread(_find, scheduler.settings)
    heads = {entry.name: entry.head.sha256 for entry in scheduler.manifest.encoders}
    outdated = tuple(sorted(name for name, sha256 in audit.heads.items() if heads.get(name) != sha256))
    response.headers.update({**NO_STORE, **NOSNIFF})
    return AuditReport(**dict(audit), source=source, outdated=outdated)


@privacy.get(
    "/v1/privacy/audit/{picture}.png",
    summary="Pictures of the audit, side by side",
    response_class=Response,
    responses={
        200: {"content": {"image/png": {}}},
        404: {"description": "No such picture, or no audit."},
    },
)
async def get_audit_picture(
    scheduler: Service,
    picture: Annotated[
        str, InPath(pattern="^(originals|[0-9]{1,3})$", description="`originals`, or the number of a row, from 0.")
    ],
) -> Response:
    """At most 8 pictures, in the order of the originals."""
    _, folder, _ = await asyncio.to_thread(_find, scheduler.settings)
    content = await asyncio.to_thread(read_picture, folder, picture)
    if content is None:
        raise NotFound(f"the audit has no picture {picture}")
    headers = {**NO_STORE, "Content-Disposition": "inline", "Content-Security-Policy": "default-src 'none'", **NOSNIFF}
    return Response(content, media_type="image/png", headers=headers)
