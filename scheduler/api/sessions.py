"""Routes of the caller: whose token it shows, and session cookies for browsers."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from scheduler.api.routing import (
    CHECKS,
    CallerOf,
    SmallBody,
)
from scheduler.api.schemas import SignIn, WhoAmI
from tierkit.access import SESSION_COOKIE, SESSION_PATH, Authenticator

__all__ = ["sessions"]


sessions = APIRouter(tags=["about"], dependencies=CHECKS, route_class=SmallBody)


@sessions.get("/v1/whoami", response_model=WhoAmI, summary="Holder of the token")
async def get_caller(caller: CallerOf) -> WhoAmI:
    """Name, role and sites of the token, or of the session, and its expiry. All fields are null if the scheduler asks
    for no tokens."""
    if caller is None:
        return WhoAmI()
    if caller.entry is None:
        return WhoAmI(name=caller.name, role=caller.role)
    return WhoAmI(name=caller.name, role=caller.role, expires=caller.entry.expires, sites=caller.entry.sites)


@sessions.post(
    SESSION_PATH, response_model=WhoAmI, summary="Exchange a user's token for a session cookie, in a browser"
)
async def sign_in(request: Request, response: Response, given: SignIn) -> WhoAmI:
    """The cookie is valid for 12 hours, and no longer than the token. A scheduler without tokens sets no cookie."""
    authenticator: Authenticator | None = request.app.state.authenticator
    if authenticator is None:
        return WhoAmI()
    caller, value, seconds = authenticator.sign_in(given.token)
    _set_session(request, response, value, seconds)
    return await get_caller(caller)


@sessions.delete(SESSION_PATH, status_code=204, summary="Forget the session cookie")
async def sign_out(request: Request, response: Response) -> None:
    """Deletes the cookie in the browser."""
    _set_session(request, response, "", 0)


def _set_session(request: Request, response: Response, value: str, seconds: int) -> None:
    # The origin has been checked: it is https as well where TLS ends in front of this service.
    secure = "https" in (request.url.scheme, request.headers.get("origin", "").partition(":")[0])
    root_path = request.scope["root_path"] or "/"  # other services of the same site need not see it
    response.set_cookie(
        SESSION_COOKIE, value, max_age=seconds, path=root_path, secure=secure, httponly=True, samesite="strict"
    )
