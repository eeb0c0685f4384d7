"""Start a service with emulated parts: `python -m experiments.emulation scheduler|end|edge|cloud`, then its flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from experiments.emulation.settings import EmulatedLinks, EmulatedNode
from tierkit.flags import command, run_main
from tierkit.memory import importing
from tierkit.orphan import die_with_parent

__all__ = ["main"]

_SERVICES = {
    "scheduler": ("scheduler", "SchedulerSettings"),
    "end": ("end_node", "EndSettings"),
    "edge": ("edge_node", "EdgeSettings"),
    "cloud": ("cloud_node", "CloudSettings"),
}
"""Package and settings."""


def main() -> None:
    die_with_parent()
    kind = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if kind not in _SERVICES:
        sys.stderr.write(f"python -m experiments.emulation: name a service first: {', '.join(_SERVICES)}\n")
        sys.exit(2)
    package, name = _SERVICES[kind]
    # No other service is imported: that takes most of the start.
    with importing(freeze=True):
        settings = getattr(import_module(f"{package}.settings"), name)
        start = import_module(f"{package}.__main__").start
    about = {"__doc__": settings.__doc__, "__module__": __name__}
    run: Callable[..., NoReturn]
    if kind == "scheduler":
        run = command(type("Emulated", (EmulatedLinks, settings), about), lambda it: start(it, it.middlewares()))
    else:
        run = command(type("Emulated", (EmulatedNode, settings), about), lambda it: start(it, it.substitutes()))
    run_main(run)


if __name__ == "__main__":
    main()
