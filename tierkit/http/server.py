"""Run a service: bind, answer health checks, load, serve, shut down gracefully on a signal, exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import uvicorn
from prometheus_client import Histogram, generate_latest
from starlette.applications import Starlette

from tierkit import logs, spans
from tierkit.access import Authenticator, ServerTls, follow_files, signature, trust_further
from tierkit.errors import SetupError
from tierkit.http.address import bind, is_loopback, url_of
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.protocol import bounded_protocol
from tierkit.http.shell import Shell
from tierkit.http.tls import TlsListener
from tierkit.orphan import own_environment
from tierkit.settings import NodeSettings, ServiceSettings

__all__ = ["Build", "running", "serve", "spare_collections"]

log = logging.getLogger(__name__)

Build = Callable[[Lifecycle], Starlette | Awaitable[Starlette]]
"""Makes the application. Its lifespan begins after the address is bound and ends after the last answer."""

_EXIT_CRASHED = 1
_GC_THRESHOLD = 20_000
"""Objects made, and not yet gone again, before the garbage collector looks for cycles: more than all the requests
under way consist of."""

_LAG_PERIOD_S = 0.05
"""Seconds between two looks at the event loop: a longer block cannot hide between them."""

_CUT_S = 1.0
"""Seconds for aborted answers to release their resources; they have nothing else to wait for."""

_LOOK_S = 0.01
"""Seconds between two looks whether the last connections have gone."""

_event_loop_lag = Histogram(
    "terrace_event_loop_lag_seconds",
    "How late the event loop ran a timer that was due, 20 times a second; above 0.1 something blocks it.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)


def serve(build: Build, settings: ServiceSettings, *, node_id: str = "") -> int:
    """Run the service until a signal stops it, and return its exit code.

    The address is bound first, and `/livez` answers while the rest loads. When the application's lifespan has begun,
    `/readyz` turns 200 and the ready file is written. The first SIGTERM or SIGINT drains: `/readyz` turns 503, new
    work is refused with 503 and `Retry-After`, work under way finishes within `settings.drain_s`. A second signal
    stops at once.

    Args:
        node_id: name of the node in logs, health answers and the ready file; "" if the service is not a node.

    After `Lifecycle.restart` the process drains and then starts again with the same command.

    Returns:
        0 after a drain; 1 when a background loop of the service crashed.

    Raises:
        AddressUnavailable: the address is not there, or in use; nothing has been loaded.
        SetupError: what `build` or the lifespan found missing.
    """
    logs.configure(settings.log_level, settings.log_format, node_id=node_id or settings.service)
    spans.configure(settings.service, node_id)
    # uvicorn knows which event loop is the fast one here (uvloop where it is installed).
    loop_factory = uvicorn.Config("", log_config=None).get_loop_factory()
    lifecycle = Lifecycle()
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            code = runner.run(_serve(build, settings, lifecycle, node_id))
    finally:
        spans.close()
    if lifecycle.restarting and lifecycle.crash is None:
        # The same process for whoever watches it, with nothing left in memory. Sockets and files are closed by now.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], own_environment())
    return code


def spare_collections() -> None:
    """Let the garbage collector look rarely, and never at what is there now, which stays.

    It would look through all of it again and again, which takes a quarter of the event loop's time under load; and
    through the requests under way a tenth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


async def _serve(build: Build, settings: ServiceSettings, lifecycle: Lifecycle, node_id: str) -> int:

    async def run() -> None:
        async with running(build, settings, lifecycle=lifecycle, node_id=node_id):
            spare_collections()
            log.info("ready", extra={"url": lifecycle.url, "pid": os.getpid()})
            await lifecycle.wait_draining()
        log.info("stopped")

    with _signals(lifecycle, settings):
        service = asyncio.create_task(run(), name=settings.service)
        draining = asyncio.create_task(lifecycle.wait_draining())
        await asyncio.wait({service, draining}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        if not lifecycle.ready:
            # Told to stop while it loads, which may take long: there is no work to wait for.
            service.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await service
    return 0 if lifecycle.crash is None else _EXIT_CRASHED


@contextlib.asynccontextmanager
async def running(
    build: Build, settings: ServiceSettings, *, lifecycle: Lifecycle, node_id: str = "", asks: bool = False
) -> AsyncIterator[None]:
    """Run the service inside the present event loop: ready on entry, drained and stopped on exit.

    `serve` adds a process and its signals; tests use this function directly.

    Args:
        asks: True if the application asks its callers for its own secret instead of a token; it then has no metrics.
    """
    tls = None if settings.tls_cert is None else ServerTls(settings.tls_cert, settings.tls_key)
    tls_seen = () if tls is None else signature(tls.paths)
    trusted_seen = () if settings.tls_ca is None else signature([settings.tls_ca])
    tokens_seen = () if settings.tokens is None else signature([settings.tokens])
    authenticator = lifecycle.authenticator = _authenticator(settings, lifecycle)
    sock = bind(settings.host, settings.port)
    try:
        _check_exposure(sock, settings, asks=asks or authenticator is not None, encrypted=tls is not None)
    except SetupError:
        sock.close()
        raise
    lifecycle.url = url_of(sock, tls=tls is not None)
    local_only = authenticator is None and is_loopback(sock)
    shell = Shell(
        lifecycle,
        None if asks else generate_latest,
        node_id=node_id,
        authenticator=authenticator,
        local_only=local_only,
        proxies=settings.proxies,
    )
    server = _Server(
        uvicorn.Config(
            shell,
            http=bounded_protocol(settings),
            ws="none",
            lifespan="off",  # entered below, so that its errors are ours and health checks are answered meanwhile
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_s,
        ),
        settings,
        tls,
    )
    http = lifecycle.own(server.serve(sockets=[sock]), name="http server")
    lifecycle.own(_measure_loop_lag(), name="event loop lag")
    if authenticator is not None and authenticator.path is not None:
        lifecycle.own(follow_files([authenticator.path], tokens_seen, authenticator.load, what="tokens"), name="tokens")
    if tls is not None:
        lifecycle.own(follow_files(tls.paths, tls_seen, tls.load, what="TLS certificate and key"), name="certificate")
    if settings.tls_ca is not None:
        further = partial(trust_further, settings.tls_ca)
        lifecycle.own(
            follow_files([settings.tls_ca], trusted_seen, further, what="certificates to trust"), name="tls_ca"
        )
    try:
        with _ready_file(
            settings.ready_file, {"url": lifecycle.url, "pid": os.getpid(), "node_id": node_id}
        ) as announce:
            made = build(lifecycle)
            app = await made if inspect.isawaitable(made) else made
            async with app.router.lifespan_context(app):
                shell.serve(app)
                lifecycle.set_ready()
                announce()
                try:
                    yield
                finally:
                    await _drain(lifecycle, server, http, settings.drain_s)
    finally:
        server.stop()
        await http
        await lifecycle.cancel_owned()


def _authenticator(settings: ServiceSettings, lifecycle: Lifecycle) -> Authenticator | None:
    """The authenticator of the service; None if it asks for no token."""
    asks = settings.tokens is not None
    if isinstance(settings, NodeSettings):
        schedulers = settings.schedulers
        has_token = settings.own_token()() is not None or any(each.token() is not None for each in schedulers)
        if has_token or len(schedulers) > 1:  # several are told apart by their keys
            lifecycle.keys = {name: secrets.token_urlsafe(32) for name in [each.name for each in schedulers] or [""]}
        asks = asks or has_token
    if not asks:
        return None
    authenticator = Authenticator(settings.tokens, keys=lifecycle.keys.values(), roles=settings.callers)
    authenticator.roles_at = settings.callers_at
    if authenticator.admits_nobody:
        log.warning(
            "the file of tokens %s has no valid token, so %s is let in: 'terrace token create' makes one",
            authenticator.path,
            "nobody but the fleet" if lifecycle.keys else "nobody",
        )
    return authenticator


def _check_exposure(sock: socket.socket, settings: ServiceSettings, *, asks: bool, encrypted: bool) -> None:
    """Refuse to serve a network without asking callers for a token; warn if secrets would cross it unencrypted."""
    if is_loopback(sock):
        return
    if not asks and not settings.insecure:
        own = " or --token-file FILE" if isinstance(settings, NodeSettings) else ""
        raise SetupError(
            f"the address {settings.host} can be reached from other machines, and no token would be asked for: "
            f"give --tokens FILE{own} (see 'terrace token create'), listen on 127.0.0.1, or say --insecure"
        )
    if not asks:
        log.warning("INSECURE: everyone who reaches this address may use the service", extra={"host": settings.host})
    elif not encrypted:
        log.warning("tokens and images cross the network unencrypted; give --tls-cert", extra={"host": settings.host})


async def _drain(lifecycle: Lifecycle, server: _Server, http: asyncio.Task[None], drain_s: float) -> None:
    """Wait for the work in flight while the socket still answers (with refusals), then close the connections."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + drain_s
    lifecycle.drain()
    try:
        async with asyncio.timeout_at(deadline):
            await lifecycle.wait_idle()
    except TimeoutError:
        log.warning("drain time is over; giving up work under way", extra={"in_flight": lifecycle.in_flight})
    # What is left are answers that are being read (downloads, event streams): they have the rest of the time.
    server.stop(deadline)
    await http


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, settings: ServiceSettings, tls: ServerTls | None) -> None:
        super().__init__(config)
        self._settings = settings
        self._tls = tls
        self._stopped = asyncio.Event()
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as in uvicorn, except that a `TlsListener` takes TLS connections: uvicorn neither counts nor bounds
        handshakes."""
        if self._tls is None or sockets is None:
            await super().startup(sockets)
            return

        def protocol() -> asyncio.Protocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg]  # uvicorn's union of its own classes
                config=self.config, server_state=self.server_state, app_state={}
            )

        self.servers = [
            TlsListener(sock, self._tls.context, protocol, self.server_state.connections, self._settings)  # type: ignore[misc]  # has what uvicorn needs of a server
            for sock in sockets
        ]
        self.started = True

    def stop(self, deadline: float | None = None) -> None:
        """Stop; answers that are still being read may end until then (time of the event loop), or in their own time."""
        self._deadline = self._deadline if deadline is None else deadline
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        """uvicorn's own wakes ten times a second to look whether it should stop; this one sleeps, and stops at once."""
        while not await self.on_tick(0):  # which renews the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop as in uvicorn, but look for open connections every `_LOOK_S`: uvicorn sleeps 0.1 s before each look,
        nearly all of the time that a service takes to stop."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        # One that was accepted a moment ago is not among them yet.
        await asyncio.sleep(_LOOK_S)
        try:
            async with asyncio.timeout_at(self._deadline):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110  # uvicorn's sets
                    await asyncio.sleep(_LOOK_S)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            left = set(self.server_state.tasks)
            log.warning("cutting off answers that are still being read", extra={"answers": len(left)})
            for task in left:
                task.cancel()
            for connection in list(self.server_state.connections):
                connection.abort()  # type: ignore[union-attr]  # of `bounded_protocol`
            if left:
                # What they read from, such as a database, is closed after them.
                await asyncio.wait(left, timeout=_CUT_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled in `_signals`: uvicorn's own way closes the socket at once and re-raises at the end."""
        yield


@contextlib.contextmanager
def _signals(lifecycle: Lifecycle, settings: ServiceSettings) -> Iterator[None]:
    def stop(number: signal.Signals) -> None:
        if lifecycle.restarting:
            lifecycle.restarting = False  # it drains already, and stays away
            return
        if lifecycle.draining:
            log.warning("second signal; stopping at once")
            if settings.ready_file is not None:
                settings.ready_file.unlink(missing_ok=True)
            # Not sys.exit: inference threads would be waited for.
            os._exit(128 + number)
        log.info(
            "draining; a second signal stops at once",
            extra={"signal": number.name, "in_flight": lifecycle.in_flight, "drain_s": settings.drain_s},
        )
        lifecycle.drain()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _ready_file(path: Path | None, content: dict[str, object]) -> Iterator[Callable[[], None]]:
    """Yields what writes the file, in one step; it is gone before and after."""
    if path is None:
        yield lambda: None
        return
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a process that was killed

    def announce() -> None:
        with _writing(path):
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(path)

    try:
        yield announce
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise SetupError(f"cannot write the ready file {path}: {exc.strerror}") from exc


async def _measure_loop_lag() -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        _event_loop_lag.observe(max(0.0, loop.time() - due))
