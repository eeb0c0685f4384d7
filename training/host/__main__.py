"""Start a host: `python -m training.host`, `terrace train host`."""

from __future__ import annotations

import asyncio
import gc

from starlette.applications import Starlette

from tierkit.access import Tickets
from tierkit.errors import MissingExtra, SetupError
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import serve
from training.host.settings import HostSettings

__all__ = ["run", "start"]


def start(settings: HostSettings) -> int:
    """Run the host until its run has ended or a signal stops it; returns its exit code.

    Raises:
        SetupError: the run cannot begin, or cannot continue.
    """
    try:
        from training.host.aggregator import open_aggregator
        from training.host.app import create_app, largest_body
        from training.host.chief import compute_as_chief
        from training.host.offering import offer_runs
        from training.host.opening import open_host
        from training.host.own import open_own_host
        from training.host.reporting import HostReports, report_to_scheduler
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "safetensors"):
            raise
        raise MissingExtra("learn", "training on the fleet") from error
    if settings.offer:
        return offer_runs(settings)
    if settings.base is not None:
        host = open_own_host(settings)
    else:
        host = open_host(settings) if settings.parent is None else open_aggregator(settings)
    most = largest_body(host.spec.values, host.spec.buffers)
    settings = settings.model_copy(update={"max_body_bytes": max(settings.max_body_bytes, most)})

    def build(lifecycle: Lifecycle) -> Starlette:
        if settings.scheduler is not None:
            tickets = Tickets(host.spec.id)
            if lifecycle.authenticator is not None:
                lifecycle.authenticator.tickets = tickets
            reports = report_to_scheduler(
                HostReports(host, settings, lifecycle.url, tickets),
                settings.scheduler,
                token=settings.own_token(),
                tls_ca=settings.tls_ca,
                tickets=tickets,
            )
            reporting = lifecycle.own(reports, name="reports")
            host.farewell = lambda: asyncio.shield(reporting)
        if settings.work:
            host.beside["worker 0"] = lambda: compute_as_chief(host, host.images)
        return create_app(host, lifecycle)

    code = serve(build, settings)
    gc.unfreeze()  # or what torch is built on complains that its objects are left over
    if host.error:
        raise SetupError(host.error)
    return code


run = command(HostSettings, start)

if __name__ == "__main__":
    run_main(run)
