"""What the host of a training run tells a scheduler, for tests that play the host with a plain HTTP client."""

from __future__ import annotations

import secrets
from typing import Any

__all__ = ["report", "start", "worker"]

INCARNATION = "1" * 16


def start(**changes: Any) -> dict[str, Any]:
    """The body of POST /v1/runs, with a fresh id."""
    return {
        "id": secrets.token_hex(16),
        "network": "mnist-100",
        "strategy": "downpour",
        "config": {"epochs": 3},
        "url": "https://10.0.0.5:8090",
        "steps": 1000,
        "incarnation": INCARNATION,
        **changes,
    }


def report(**changes: Any) -> dict[str, Any]:
    """The body of PUT /v1/runs/{id}/report."""
    return {
        "incarnation": INCARNATION,
        "state": "running",
        "done": 10,
        "version": 10,
        "loss": 2.25,
        "accuracy": None,
        "workers": [worker("laptop")],
        "result": None,
        "error": None,
        **changes,
    }


def worker(name: str, **changes: Any) -> dict[str, Any]:
    """A worker in a report."""
    figures = {"updates": 10, "staleness": 0.5, "bytes_sent": 4_000_000, "bytes_received": 8_000_000, "idle_s": 0.25}
    return {"name": name, **figures, **changes}
