"""Routes of the model set: the manifest and the weights that nodes fetch."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from scheduler.api.routing import (
    CHECKS,
    NOSNIFF,
    USERS_AND_NODES,
    Service,
    SmallBody,
)
from scheduler.metrics import NETWORK_BYTES
from tierkit.errors import InvalidInput, NotFound
from tierkit.wire.messages import RELEASES_HEADER

__all__ = ["networks"]

_log = logging.getLogger(__name__)


networks = APIRouter(tags=["about"], dependencies=CHECKS, route_class=SmallBody)


class _File(FileResponse):
    """Refuses a `Range` in the form of all errors; the framework would do so in plain text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def checked(message: Message) -> None:
            status = message.get("status")
            if status == 400:
                raise InvalidInput("Range must name bytes of the file, such as bytes=0-99")
            if status == 416:
                length = Headers(raw=message["headers"])["Content-Range"]
                raise HTTPException(416, "Range names no bytes that the file has", {"Content-Range": length})
            if message["type"] == "http.response.body":
                NETWORK_BYTES.labels("scheduler").inc(len(message.get("body", b"")))
            await send(message)

        await super().__call__(scope, receive, checked)


@networks.get(
    "/v1/models",
    summary="The manifest of the release in force",
    response_class=Response,
    responses={
        200: {"content": {"application/json": {}}},
        304: {"description": "The manifest that `If-None-Match` names is this one."},
    },
    dependencies=USERS_AND_NODES,
)
async def list_models(request: Request, scheduler: Service) -> Response:
    """Classes, networks and encoders, with their digests and accuracies. The header `ETag` is the digest of the
    manifest, and `Terrace-Releases` the number of the release."""
    etag = f'"{scheduler.manifest.digest}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag, RELEASES_HEADER: str(scheduler.releases.in_force)})
    headers = {"ETag": etag, RELEASES_HEADER: str(scheduler.releases.in_force)}
    return Response(scheduler.manifest.as_json(), media_type="application/json", headers=headers)


@networks.get(
    "/v1/models/{name}/file",
    summary="The file of a network",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {}}},
        206: {"description": "The bytes that `Range` names.", "content": {"application/octet-stream": {}}},
        304: {"description": "The version that `If-None-Match` names is this one."},
        404: {"description": "Not here, or another version."},
        416: {"description": "`Range` names no bytes that the file has."},
    },
    dependencies=USERS_AND_NODES,
)
async def get_weights(
    request: Request,
    scheduler: Service,
    name: Annotated[str, Path(description="Name of the network, or of a part of an encoder.")],
    sha256: Annotated[
        str | None,
        Query(
            pattern="^[0-9a-f]{64}$",
            description="sha256 of the wanted version. Default: the version of the release in force.",
        ),
    ] = None,
) -> Response:
    """Weights of the release in force, or of any other release by sha256. `Range` and `If-None-Match` are supported."""
    entry = scheduler.releases.file(name, sha256)
    etag = f'"{entry.sha256}"'
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"ETag": etag})
    try:
        path = await scheduler.releases.files.find(entry)
    except NotFound as exc:
        _log.error("weights cannot be given to nodes", extra={"model": name, "why": str(exc)})
        raise
    return _File(path, media_type="application/octet-stream", headers={"ETag": etag, **NOSNIFF})
