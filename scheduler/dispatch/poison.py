"""Poison tasks: tasks that kill the nodes they run on, and the deaths of nodes that they explain. Pure; time is passed
in."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from scheduler.core.fleet import DeviceList
from scheduler.core.work import ActiveJob, ActiveTask, Attempt, is_suspect
from tierkit.types import Health, Recovery

__all__ = ["DeathLog", "Suspicion", "is_poison"]


_POISON_NODES = 3
"""A task that this many nodes died with is given to no other, unless nodes die without it as well."""
_REMEMBERED_S = 60.0
_REMEMBERED = 64


class DeathLog:
    """The deaths of nodes in the last minute. They tell a poison task from a fleet that is dying anyway."""

    def __init__(self) -> None:
        self._deaths: deque[tuple[float, tuple[Collection[str], ...]]] = deque(maxlen=_REMEMBERED)

    def add(self, now: float, held: Iterable[Collection[str]]) -> None:
        """A node has died.

        Args:
            held: of each task that was on it, the nodes that died with that task; the collections themselves, since
                what they hold later decides whether they explain this death.
        """
        self._deaths.append((now, tuple(held)))

    def unexplained(self, now: float) -> int:
        """Deaths of the last minute with no suspect on the node."""
        return sum(
            at >= now - _REMEMBERED_S and not any(is_suspect(deaths) for deaths in held) for at, held in self._deaths
        )


def is_poison(deaths: Collection[str], unexplained: int) -> bool:
    """True if a task that these nodes died with is given up for good. As many unexplained deaths clear it: where nodes
    die anyway, an unlucky task must not be taken for one that kills."""
    return len(deaths) >= max(_POISON_NODES, unexplained + 1)


class Suspicion:
    """The tasks that nodes have died with.

    A process that ends breaks its connections before the failure detector declares the node dead, so tasks whose
    connection broke are remembered until it has decided.
    """

    def __init__(self, devices: DeviceList) -> None:
        self._devices = devices
        self._broken: dict[tuple[str, str], dict[ActiveTask, ActiveJob]] = {}
        """By node and incarnation: unanswered tasks that it may have had when a connection to it broke."""
        self._deaths = DeathLog()
        self._down: set[str] = set()
        """Nodes whose present death is in the log."""

    def suspect(self, node_id: str, incarnation: str, job: ActiveJob, task: ActiveTask) -> None:
        """Remember a task whose connection broke while the node may have had it."""
        if not (task.closed or job.ending) and incarnation:
            self._broken.setdefault((node_id, incarnation), {})[task] = job

    def note_death(self, node_id: str, attempts: Iterable[Attempt], now: float) -> None:
        """Write the death of a node into the log, with the tasks that it held."""
        if self._devices.has_left(node_id) or self._devices.keeps_tasks(node_id, now):
            self._down.discard(node_id)
        elif node_id not in self._down:
            self._down = {node_id, *(other for other in self._down if not self._devices.has_left(other))}
            held = [attempt.task for attempt in attempts]
            held += [task for key, tasks in self._broken.items() if key[0] == node_id for task in tasks]
            self._deaths.add(now, [task.deaths for task in held])

    def judge(self, node_id: str, now: float) -> list[tuple[ActiveJob, ActiveTask]]:
        """The tasks with which a node has died, once its health has changed."""
        died: list[tuple[ActiveJob, ActiveTask]] = []
        for key in [key for key in self._broken if key[0] == node_id]:
            view = self._devices.view_of(*key, now)
            if view is not None and view.health is not Health.ALIVE and view.keeps_tasks and not view.set_aside:
                continue  # not decided yet
            tasks = self._broken.pop(key)
            if view is None or not view.keeps_tasks:
                died += [(job, task) for task, job in tasks.items()]
        return died

    def poison(self, job: ActiveJob, task: ActiveTask, node_id: str, now: float) -> str:
        """Count a node's death against a task. A node that an operator has removed has not died.

        Returns:
            Why the task is given up, or ""."""
        left = self._devices.has_left(node_id)
        if job.policy.recovery is not Recovery.MONITOR or task.closed or job.ending or left:
            return ""
        task.deaths.add(node_id)
        if not is_poison(task.deaths, self._deaths.unexplained(now)):
            return ""
        nodes = ", ".join(sorted(task.deaths))
        return f"{len(task.deaths)} nodes died or got stuck with it ({nodes}); no other gets it"

    def forget_job(self, job: ActiveJob) -> None:
        """Forget the tasks of a job that is over."""
        for key, tasks in list(self._broken.items()):
            self._broken[key] = {task: other for task, other in tasks.items() if other is not job}
            if not self._broken[key]:
                del self._broken[key]
