"""Start the scheduler: `python -m scheduler`, `terrace scheduler`."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
from starlette.applications import Starlette

from scheduler.api.app import create_app
from scheduler.settings import SchedulerSettings
from tierkit.flags import command, run_main
from tierkit.http.lifecycle import Lifecycle
from tierkit.http.server import serve

__all__ = ["main", "run", "start"]


def start(settings: SchedulerSettings, middlewares: Sequence[aiohttp.ClientMiddlewareType] = ()) -> int:
    """Run the scheduler until a signal stops it; returns its exit code.

    Args:
        middlewares: that its own requests pass.
    """

    def build(lifecycle: Lifecycle) -> Starlette:
        return create_app(settings, lifecycle, middlewares)

    return serve(build, settings)


run = command(SchedulerSettings, start)


def main() -> None:
    run_main(run)


if __name__ == "__main__":
    main()
