"""Registration, heartbeats and farewell of a node: they renew its lease, and feed the scheduler's failure detector.

The scheduler may be away, restart with an empty list, or come later than the node; of several, another one may lead.
The sender keeps trying for as long as the node lives, and logs each change once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Self

import aiohttp
from pydantic import ValidationError

from tierkit.errors import Conflict, Forbidden, NotFound, NotTerrace, TerraceError, Unauthenticated, Unavailable
from tierkit.http.client import ask, authorization, calling, read_at_most
from tierkit.http.errors import error_of
from tierkit.http.failover import Ring, Round
from tierkit.http.lifecycle import Lifecycle
from tierkit.pacing import backoff_s
from tierkit.wire.messages import NODE_HEADER, Heartbeat, Lease, Registration

__all__ = ["HeartbeatSender"]

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.2, 5.0
_JITTER = 0.1
"""Beats of many nodes that started together spread by this share of the interval."""

_REGISTER_BUDGET_S = 5.0
_FAREWELL_BUDGET_S = 1.0
_CURRENT_BUDGET_S = 5.0
_MAX_ANSWER_BYTES = 64 * 1024
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class HeartbeatSender:
    """Keeps a node in the device list inside `async with`, and removes it at the end.

    Args:
        schedulers: their URLs. The sender finds the leader, and the next leader when it changes.
        registration: called with the scheduler's URL for each registration, so that its content is fresh; an error
            counts as a failed attempt.
        heartbeat: called for each heartbeat; returns its content.
        http: client to send with.
        lifecycle: lifecycle of the service. Registration waits until it is ready, and the scheduler learns at once when
            it drains. Before a registration it is asked whether the service still has the right networks.
        token: gives the token for the scheduler; None if it asks for none.
        heard: called with the headers of each answer.
        name: name of the scheduler if the node serves several; "" otherwise.
        gives_networks: the node serves the model set of this scheduler. A scheduler with another set refuses the node.
    """

    def __init__(
        self,
        schedulers: Sequence[str],
        registration: Callable[[str], Registration],
        heartbeat: Callable[[], Heartbeat],
        http: aiohttp.ClientSession,
        *,
        lifecycle: Lifecycle,
        token: Callable[[], str | None] = lambda: None,
        heard: Callable[[Mapping[str, str]], None] = lambda _: None,
        name: str = "",
        gives_networks: bool = True,
    ) -> None:
        self._who = f"the scheduler {name}" if name else "the scheduler"
        self._gives_networks = gives_networks
        self._ring = Ring(schedulers)
        self._registration = registration
        self._heartbeat = heartbeat
        self._http = http
        self._lifecycle = lifecycle
        self._token = token
        self._heard = heard
        self._hurry = asyncio.Event()
        self._renewals: list[asyncio.Event] = []
        """Events of callers that wait for a registration that has not begun yet."""
        self._registered: Registration | None = None
        self._lease = Lease(lease_s=1.0, heartbeat_s=1.0)
        self._said_draining = False
        self._last_news = ""
        self._loop: asyncio.Task[None] | None = None
        self._refusal = ""
        self._node_id = ""
        self._asked_lease_s = 0.0

    async def check_refusal(self) -> None:
        """Raises Unavailable while the scheduler does not want this node: it gets no tasks."""
        if self._refusal:
            raise Unavailable(self._refusal)

    @property
    def registered(self) -> bool:
        """True if the scheduler has the node in its list, as far as the node knows."""
        return self._registered is not None

    @property
    def incarnation(self) -> str:
        """The incarnation that is registered; "" if none is."""
        return "" if self._registered is None else self._registered.incarnation

    def renew(self) -> asyncio.Event:
        """Register again under the same incarnation, since what the node offers has changed. The event that is returned
        is set once the scheduler has taken the new registration."""
        if not self._renewals:
            self._renewals = [asyncio.Event()]
        self.hurry()
        return self._renewals[-1]

    def hurry(self) -> None:
        """Send the next heartbeat now: the scheduler may not know this node any more, or may be back."""
        self._hurry.set()

    async def ask(
        self, method: str, target: str, *, budget_s: float, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> bytes:
        """Send a request to the leading scheduler, and return the body of its answer.

        Args:
            target: path and query.
            headers: further ones; by default the body is JSON.

        Raises:
            TerraceError: no scheduler took it, or the leader refused it.
        """
        asked = Round(self._ring)
        while True:
            scheduler = self._ring.current
            try:
                said, heard = await self._send(method, target, budget_s, body, headers)
                self._heard(heard)
                return said
            except TerraceError as exc:
                trouble = asked.failed(scheduler, exc)
                if trouble is not None:
                    raise trouble from exc

    async def __aenter__(self) -> Self:
        self._loop = self._lifecycle.own(self._run(), name="heartbeats")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the list; takes at most 1 s where the scheduler does not answer."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        if self._registered is None:
            return
        target = f"/v1/devices/{self._registered.node_id}?incarnation={self._registered.incarnation}"
        budget_s = _FAREWELL_BUDGET_S / len(self._ring.addresses)
        asked = Round(self._ring)
        while True:
            scheduler = self._ring.current
            try:
                await self._send("DELETE", target, budget_s)
            except TerraceError as exc:
                trouble = asked.failed(scheduler, exc)
                if trouble is None:
                    continue
                # The lease will run out; nothing else can be done.
                log.info("left without a word to %s", self._who, extra={"reason": str(trouble)})
            else:
                log.info("left the device list of %s", self._who)
            return

    async def _run(self) -> None:
        await self._lifecycle.wait_ready()
        failures, asked = 0, Round(self._ring)
        while True:
            scheduler = self._ring.current
            if self._registered is None and self._gives_networks and await self._outdated():
                self._lifecycle.restart("the model set has been replaced")
                return
            try:
                if self._registered is None or self._renewals or (failures and await self._has_moved(self._registered)):
                    self._registered = await self._register()
                else:
                    await self._beat(self._registered)
            except (NotFound, Conflict) as exc:
                if self._lifecycle.draining:
                    return
                if self._registered is not None:
                    # The scheduler restarted, or has given the node up: its place is gone, not the scheduler.
                    self._registered = None
                    self._tell(logging.WARNING, f"{self._who} does not know this node any more; registering again")
                    continue
                failures += 1
                self._refused(f"{self._who} refuses this node: {exc}")
            except (Unauthenticated, Forbidden) as exc:
                # Perhaps its token is known soon, or exchanged, or an operator lets it in. Its place is lost.
                self._registered = None
                failures += 1
                which = "'s token (token_file)" if isinstance(exc, Unauthenticated) else ""
                self._refused(f"{self._who} refuses this node{which}: {exc}")
            except TerraceError as exc:
                trouble = asked.failed(scheduler, exc)
                if trouble is None:
                    continue
                failures += 1
                tried = ", ".join(self._ring.addresses)
                self._tell(logging.WARNING, f"no contact with {self._who} at {tried}, trying on: {trouble}")
            else:
                failures, self._refusal, asked = 0, "", Round(self._ring)
                self._tell(logging.INFO, f"registered with {self._who} at {scheduler}")
            await self._pause(failures)

    async def _outdated(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CURRENT_BUDGET_S):
                return not await self._lifecycle.is_current()
        return False

    def _refused(self, why: str) -> None:
        self._refusal = why
        self._tell(logging.ERROR, why)

    async def _pause(self, failures: int) -> None:
        """Wait until the next beat is due, or the service begins to drain, which the scheduler must hear at once."""
        pause_s = self._lease.heartbeat_s * (1.0 + _JITTER * (2.0 * random.random() - 1.0))
        if failures:
            # A refusal costs bytes, of which a node with a long lease has few.
            longest_s = max(_LONGEST_BACKOFF_S, self._asked_lease_s / 10 if self._refusal else 0.0)
            backoff = backoff_s(failures, first_s=_FIRST_BACKOFF_S, cap_s=longest_s, chance=random.random())
            # A node that is still on the list has a lease to lose: it never waits longer than between two beats.
            pause_s = backoff if self._registered is None else min(backoff, pause_s)
        hurried = asyncio.create_task(self._hurry.wait())
        draining = asyncio.create_task(self._lifecycle.wait_draining())
        told = self._registered is None or self._said_draining
        try:
            await asyncio.wait(
                {hurried} if told else {hurried, draining}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            hurried.cancel()
            draining.cancel()
            self._hurry.clear()

    async def _has_moved(self, registered: Registration) -> bool:
        """True if the node's address has changed since it registered; no connection outlasts that."""
        return (await self._offer()).url != registered.url

    async def _offer(self) -> Registration:
        # It may look up the scheduler's name, which blocks.
        async with calling("the scheduler", budget_s=_REGISTER_BUDGET_S):
            return await asyncio.to_thread(self._registration, self._ring.current)

    async def _register(self) -> Registration:
        renewals, self._renewals = self._renewals, []
        try:
            registered = await self._register_now()
        except BaseException:
            self._renewals = [*renewals, *self._renewals]
            raise
        for renewed in renewals:
            renewed.set()
        return registered

    async def _register_now(self) -> Registration:
        registration = await self._offer()
        self._node_id = registration.node_id
        self._asked_lease_s = registration.lease_s or 0.0
        body = registration.model_dump_json().encode()
        answer, headers = await self._send("POST", "/v1/devices", _REGISTER_BUDGET_S, body)
        try:
            self._lease = Lease.model_validate_json(answer)
        except ValidationError as exc:
            raise NotTerrace(f"{self._ring.current} answers a registration with something that is not a lease") from exc
        self._said_draining = False
        self._heard(headers)
        return registration

    async def _beat(self, registration: Registration) -> None:
        beat = self._heartbeat()
        self._said_draining = beat.draining
        # A scheduler that is slow drops the beats whose senders have given up on them. Two tries within a lease.
        budget_s = max(0.5, self._lease.lease_s / 2.0)
        target = f"/v1/devices/{registration.node_id}/heartbeat"
        _, headers = await self._send("POST", target, budget_s, beat.model_dump_json().encode())
        self._heard(headers)

    async def _send(
        self,
        method: str,
        target: str,
        budget_s: float,
        body: bytes = b"",
        more: Mapping[str, str] = NO_HEADERS,
    ) -> tuple[bytes, Mapping[str, str]]:
        """The body and the headers of the answer."""
        url, pieces = self._ring.current + target, [body] if body else ()
        headers = {
            "Content-Type": "application/json",
            NODE_HEADER: self._node_id,
            **authorization(self._token()),
            **more,
        }
        async with (
            calling("the scheduler", budget_s=budget_s),
            ask(self._http, method, url, pieces, headers) as answer,
        ):
            said = await read_at_most(answer, _MAX_ANSWER_BYTES)
        if not 200 <= answer.status < 300:
            raise error_of("the scheduler", answer.status, said, answer.headers.get("Retry-After"))
        return said, answer.headers

    def _tell(self, level: int, news: str) -> None:
        """Log what has changed since the last time."""
        if news != self._last_news:
            self._last_news = news
            log.log(level, "%s", news)
