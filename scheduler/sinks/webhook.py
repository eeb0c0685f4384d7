"""Webhooks: each event is a POST, signed as Standard Webhooks says (https://www.standardwebhooks.com)."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import aiohttp
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from standardwebhooks import Webhook
from yarl import URL

from scheduler.core.outbox import LANES
from scheduler.sinks.addresses import CheckedResolver, check_host
from scheduler.sinks.protocol import SinkContext, SinkEvent, SinkKind, payload, plain_path, read_secret
from tierkit.errors import InvalidInput, ReceiverGone, Rejected, Unavailable
from tierkit.http.client import ask, calling, open_client, read_at_most
from tierkit.plaintext import one_line

__all__ = ["WEBHOOK", "WebhookKind", "WebhookOptions", "signers_of"]

_BUDGET_S = 15.0
_MOST_ANSWER_BYTES = 4096
_DRAIN_S = 1.0
"""Seconds to read the rest of a good answer, so that the connection can be used again."""
_MOST_SAID = 200
_AGAIN = {401, 403, 404, 408, 425, 429}
"""Refusals that may end by themselves, or by a change at the receiver or here."""
_GONE = 410
_PREFIX = "whsec_"
_SECRET_BYTES = range(16, 65)


def _plain_url(text: str) -> str:
    if not text.isprintable() or " " in text:
        raise ValueError("must have no spaces and no control characters")
    try:
        url = URL(text)
        host, port = url.host, url.port
    except ValueError as exc:
        raise ValueError(f"no URL: {exc}") from None
    if url.user is not None or url.password is not None or "@" in text.partition("://")[2].partition("/")[0]:
        raise ValueError("must not hold a user name or password: sign the events with secret_file instead")
    if url.scheme not in ("http", "https") or not host or not port:
        raise ValueError("must be http://HOST... or https://HOST...")
    if url.fragment:
        raise ValueError("must not have a fragment (#...)")
    return text


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("must be an absolute path on the scheduler's machine")
    return plain_path(path)


class WebhookOptions(BaseModel):
    """Options of a webhook."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: Annotated[str, Field(max_length=2000), AfterValidator(_plain_url)]
    """Address of the receiver, http or https, without a user name or password."""

    secret_file: Annotated[Path, AfterValidator(_absolute)] | None = None
    """File on the scheduler's machine with the secret (whsec_...) that signs the events. While the secret changes, it
    holds the new and the old one, one a line. Default: events are not signed."""


def signers_of(text: str) -> list[Webhook]:
    """The signers for a file of secrets, one a line, in base64 with or without `whsec_`.

    Raises:
        InvalidInput: a line is not such a secret. The error does not show it.
    """
    signers = []
    for number, line in enumerate(text.split(), start=1):
        secret = line.removeprefix(_PREFIX).rstrip("=")
        try:
            key = base64.b64decode(secret + "=" * (-len(secret) % 4), validate=True)
        except ValueError:
            raise InvalidInput(f"line {number} of the secret file is not base64, with or without {_PREFIX}") from None
        if len(key) not in _SECRET_BYTES:
            raise InvalidInput(f"line {number} of the secret file must be base64 of 16 to 64 bytes, not of {len(key)}")
        signers.append(Webhook(key))
    return signers


class _Webhook:
    """Sends events to one URL.

    Args:
        wall: returns seconds since 1970.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        signers: Sequence[Webhook],
        context: SinkContext,
        wall: Callable[[], float],
    ) -> None:
        self._http = http
        self._url = url
        self._signers = signers
        self._context = context
        self._wall = wall

    async def deliver(self, event: SinkEvent) -> None:
        """POST an event. Any answer of 200 to 299 says that the receiver has it."""
        body, now = payload(event), int(self._wall())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "Terrace",
            "webhook-id": event.id,
            "webhook-timestamp": str(now),
        }
        if self._signers:
            at, text = datetime.fromtimestamp(now, UTC), body.decode()
            headers["webhook-signature"] = " ".join(each.sign(event.id, at, text) for each in self._signers)
        name = self._context.name
        async with (
            calling(f"the receiver of {name}", budget_s=_BUDGET_S),
            ask(self._http, "POST", self._url, (body,), headers) as answer,
        ):
            if 200 <= answer.status < 300:
                with suppress(TimeoutError, aiohttp.ClientError):
                    async with asyncio.timeout(_DRAIN_S):
                        await read_at_most(answer, _MOST_ANSWER_BYTES)
                return
            said = await read_at_most(answer, _MOST_ANSWER_BYTES)
        raise _refusal(answer.status, said, answer.headers.get("Retry-After"))


def _refusal(status: int, said: bytes, retry_after: str | None) -> Exception:
    reason = f"the receiver answered {status}"
    if text := one_line(said.decode(errors="replace"))[:_MOST_SAID].strip():
        reason += f": {text}"
    if status == _GONE:
        return ReceiverGone(f"{reason}: it wants no more events", status_code=status)
    if 400 <= status < 500 and status not in _AGAIN:
        return Rejected(reason, status_code=status)
    if 300 <= status < 400:
        reason += " (redirects are not followed)"
    try:
        return Unavailable(reason, retry_after_s=max(0.0, float(retry_after or 0)))
    except ValueError:
        return Unavailable(reason, retry_after_s=0.0)


class WebhookKind:
    """Webhooks as a kind of sink."""

    Options = WebhookOptions

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall

    @asynccontextmanager
    async def open(self, options: WebhookOptions, context: SinkContext) -> AsyncIterator[_Webhook]:
        """Each sink has its own client, so a receiver that holds connections holds up no other.

        Raises:
            Forbidden: the address is one that sinks may not use.
            InvalidInput: the secret file cannot be used.
            OSError: the name of the receiver has no address.
        """
        url = URL(options.url)
        # aiohttp asks no resolver about an IP address.
        await check_host(url.host or "", url.port or 0, allow_private=context.allow_private, resolve=context.resolve)
        text = "" if options.secret_file is None else await asyncio.to_thread(read_secret, options.secret_file)
        resolver = CheckedResolver(allow_private=context.allow_private, resolve=context.resolve)
        async with open_client(max_connections=LANES, tls_ca=context.tls_ca, resolver=resolver) as http:
            yield _Webhook(http, options.url, signers_of(text), context, self._wall)


WEBHOOK: SinkKind = WebhookKind()
