"""The failure detector's verdict on one node: a pure function of how long it has been silent.

A node is alive while its heartbeats come on time, suspect when they are late or when somebody failed to reach it, and
dead when its lease has run out. Only alive nodes receive new tasks; a suspect keeps the tasks that it has, a dead node
loses them. From the last heartbeat to the verdict "dead" pass at most `lease_s` plus one sweep of the device list.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkit.types import Health

__all__ = ["LeaseTimes", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Seconds of the failure detector, each a multiple of the one before."""

    heartbeat_s: float
    """Between two heartbeats of a node."""
    suspect_s: float
    """Silence after which a node gets no new tasks."""
    lease_s: float
    """Silence after which a node counts as dead and its tasks go to others."""


def judge(
    silent_s: float, times: LeaseTimes, *, accusation: str | None = None, draining: bool = False
) -> tuple[Health, str]:
    """Opinion on a node, and the reason for it.

    Args:
        silent_s: seconds since the node's last sign of life.
        accusation: why an attempt on the node failed since then; its next heartbeat clears it.
        draining: whether the node is about to leave (it said so, or an operator did).
    """
    if silent_s > times.lease_s:
        return Health.DEAD, f"silent for {silent_s:.1f} s, its lease of {times.lease_s:.1f} s has run out"
    if draining:
        return Health.DRAINING, "draining: finishes what it has, takes nothing new"
    if accusation is not None:
        return Health.SUSPECT, accusation
    if silent_s > times.suspect_s:
        return Health.SUSPECT, f"silent for {silent_s:.1f} s of a lease of {times.lease_s:.1f} s"
    return Health.ALIVE, "heartbeats on time"
