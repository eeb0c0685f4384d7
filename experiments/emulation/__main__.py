"""Start a service with emulated parts: `python -m experiments.emulation scheduler|end|edge|cloud`, then its flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from experiments.emulation.settings import EmulatedLinks, EmulatedNode
from tierkit.flags import command, run_main
from tierkit.orphan import die_with_parent

__all__ = ["main"]

Run = Callable[..., NoReturn]

# Each imports the service that it starts, and no other: that takes most of the start.


def _scheduler() -> Run:
    from scheduler.__main__ import start
    from scheduler.settings import SchedulerSettings

    class Emulated(EmulatedLinks, SchedulerSettings):
        __doc__ = SchedulerSettings.__doc__

    return command(Emulated, lambda settings: start(settings, settings.middlewares()))


def _end() -> Run:
    from end_node.__main__ import start
    from end_node.settings import EndSettings

    class Emulated(EmulatedNode, EndSettings):
        __doc__ = EndSettings.__doc__

    return command(Emulated, lambda settings: start(settings, settings.substitutes()))


def _edge() -> Run:
    from edge_node.__main__ import start
    from edge_node.settings import EdgeSettings

    class Emulated(EmulatedNode, EdgeSettings):
        __doc__ = EdgeSettings.__doc__

    return command(Emulated, lambda settings: start(settings, settings.substitutes()))


def _cloud() -> Run:
    from cloud_node.__main__ import start
    from cloud_node.settings import CloudSettings

    class Emulated(EmulatedNode, CloudSettings):
        __doc__ = CloudSettings.__doc__

    return command(Emulated, lambda settings: start(settings, settings.substitutes()))


_SERVICES = {"scheduler": _scheduler, "end": _end, "edge": _edge, "cloud": _cloud}


def main() -> None:
    die_with_parent()
    kind = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if kind not in _SERVICES:
        sys.stderr.write(f"python -m experiments.emulation: name a service first: {', '.join(_SERVICES)}\n")
        sys.exit(2)
    run_main(_SERVICES[kind]())


if __name__ == "__main__":
    main()
