"""Kept pictures of a device that is too small to learn, fetched from its end node. They stay in memory."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlencode

import aiohttp

from models.hierarchy import Hierarchy
from models.kept.page import KEPT_PICTURES, MOST_PAGE_BYTES, MOST_PICTURES, PageEnd, read_page
from models.kept.sample import KeptPicture, checked
from tierkit.errors import DeadlineExceeded, InvalidAnswer, Unavailable, UpstreamTimeout
from tierkit.http.client import ask, authorization, calling, read_at_most
from tierkit.http.errors import error_of
from tierkit.pacing import backoff_s
from training.improve.kept import Gathering, KeptImages

__all__ = ["KeptDevice", "fetch_kept", "reason_against"]

log = logging.getLogger(__name__)

_PAGE_S = 120.0
"""Budget for a page."""
_ALL_S = 1_800.0
"""Budget for all pages."""
_MOST_PICTURES = 100_000
_MOST_BYTES = 512 << 20
"""Bounds on the pictures of a device, and on its pages on the network. What follows stays on the device."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.2, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDevice:
    """An end node with kept pictures."""

    url: str
    token: Callable[[], str] | None = None
    """Returns the token to show there. It is the token of a node; the token of the worker is never shown."""


def reason_against(picture: KeptPicture, classes: Hierarchy) -> str | None:
    """The reason why the answers that a device has sent with a picture cannot be believed; None if they can."""
    if picture.classes != classes.digest:
        return "other classes"
    try:
        checked(picture, classes)
    except InvalidAnswer:
        return "impossible answers"
    return None


async def fetch_kept(
    device: KeptDevice, gathering: Gathering, http: aiohttp.ClientSession, patience_s: float
) -> KeptImages:
    """The kept pictures of a device as training images, page by page.

    Args:
        patience_s: seconds for which the device may be away.

    Raises:
        Unauthenticated, Forbidden, NotFound: the device gives this worker no pictures.
        InvalidAnswer: it answers something else than pages of kept pictures.
        DataError: too few of the pictures can be trained on.
        DeadlineExceeded: the device was away, or too slow.
    """
    until, after, seen, size = time.monotonic() + _ALL_S, 0, 0, 0
    while True:
        body = await _page(device, after, http, min(until, time.monotonic() + patience_s))
        count, end = await asyncio.to_thread(_take, gathering, body, after)
        after, seen, size = end.after, seen + count, size + len(body)
        if not end.more:
            break
        if seen >= _MOST_PICTURES or size >= _MOST_BYTES:
            log.warning("the device has more kept pictures: only the first %d are used", seen)
            break
    return await asyncio.to_thread(gathering.images)


def _take(gathering: Gathering, body: bytes, after: int) -> tuple[int, PageEnd]:
    """Take the pictures of a page; the number of them, at least 1, and the end of the page."""
    pictures, end = read_page(body, after)
    for key, picture, content in pictures:
        reason = reason_against(picture, gathering.classes)
        if reason is None:
            gathering.add(key, picture, content)
        else:
            gathering.leave_out(reason)
    gathering.leave_out("may not leave the device", end.withheld)
    return max(1, len(pictures) + end.withheld), end


async def _page(device: KeptDevice, after: int, http: aiohttp.ClientSession, until: float) -> bytes:
    """A page as it comes, tried again until then (monotonic seconds) while the device is away."""
    failures, away_since = 0, time.monotonic()
    while True:
        try:
            page = await _asked(device, after, http)
            if failures:
                log.info("the device is back after %.0f s", time.monotonic() - away_since)
            return page
        except (Unavailable, UpstreamTimeout) as error:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(f"the device at {device.url} gives no kept pictures now: {error}") from error
            if failures == 0:
                log.warning("the device is away: %s", error)
            failures += 1
            chance = secrets.randbelow(1000) / 1000
            wait_s = backoff_s(failures, first_s=_FIRST_BACKOFF_S, cap_s=_LONGEST_BACKOFF_S, chance=chance)
            asked_s = error.retry_after_s if isinstance(error, Unavailable) else 0.0
            await asyncio.sleep(min(left_s, max(wait_s, asked_s)))


async def _asked(device: KeptDevice, after: int, http: aiohttp.ClientSession) -> bytes:
    who = f"the device at {device.url}"
    url = f"{device.url}{KEPT_PICTURES}?{urlencode({'after': after, 'limit': MOST_PICTURES})}"
    shown = authorization(None if device.token is None else device.token())
    async with calling(who, budget_s=_PAGE_S), ask(http, "GET", url, headers=shown) as answer:
        body = await read_at_most(answer, MOST_PAGE_BYTES + 1)
    if answer.status != 200:
        raise error_of(who, answer.status, body, answer.headers.get("Retry-After"))
    if len(body) > MOST_PAGE_BYTES:
        raise InvalidAnswer(f"{who} has sent a page of more than {MOST_PAGE_BYTES >> 20} MiB")
    return body
