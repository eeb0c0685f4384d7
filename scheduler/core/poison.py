"""Poison tasks: tasks that kill the nodes they run on, and the deaths of nodes that they explain. Pure; time is passed
in."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from scheduler.core.fleet import Ledger
from scheduler.core.work import OpenJob, OpenTask, is_suspect
from tierkit.types import Health, Recovery

__all__ = ["DeathLog", "Suspicion", "is_poison"]


_POISON_NODES = 3
"""A task that this many nodes died with is given to no other, unless nodes die without it as well."""
_REMEMBERED_S = 60.0
_REMEMBERED = 64

TaskKey = tuple[str, int]
"""A task: the id of its job, and its index."""


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
    die anyway, an unlucky task must not count as one that kills."""
    return len(deaths) >= max(_POISON_NODES, unexplained + 1)


class Suspicion:
    """The tasks that nodes have died with.

    A process that ends breaks its connections before the failure detector declares the node dead, so tasks whose
    connection broke are remembered until it has decided.
    """

    def __init__(self) -> None:
        self._broken: dict[tuple[str, str], dict[TaskKey, Collection[str]]] = {}
        """By node and incarnation: unanswered tasks that it may have had when a connection to it broke, each with the
        nodes that died with it."""
        self._deaths = DeathLog()
        self._down: set[str] = set()
        """Nodes whose present death is in the log."""

    def suspect(self, node_id: str, incarnation: str, job: OpenJob, task: OpenTask) -> None:
        """Remember a task whose connection broke while the node may have had it."""
        if not (task.closed or job.ending) and incarnation:
            key = job.facts.job_id, task.facts.index
            self._broken.setdefault((node_id, incarnation), {})[key] = task.blame.deaths

    def note_death(self, ledger: Ledger, node_id: str, held: Iterable[Collection[str]], now: float) -> None:
        """Write the death of a node into the log.

        Args:
            held: as for `DeathLog.add`, of the tasks that are still on the node.
        """
        if ledger.has_left(node_id) or ledger.keeps_tasks(node_id, now):
            self._down.discard(node_id)
        elif node_id not in self._down:
            self._down = {node_id, *(other for other in self._down if not ledger.has_left(other))}
            broken = (deaths for key, tasks in self._broken.items() if key[0] == node_id for deaths in tasks.values())
            self._deaths.add(now, [*held, *broken])

    def judge(self, ledger: Ledger, node_id: str, now: float) -> list[TaskKey]:
        """The tasks with which a node has died, once its health has changed."""
        died: list[TaskKey] = []
        for key in [key for key in self._broken if key[0] == node_id]:
            view = ledger.view_of(*key, now)
            if view is not None and view.health is not Health.ALIVE and view.keeps_tasks and not view.set_aside:
                continue  # not decided yet
            tasks = self._broken.pop(key)
            if view is None or not view.keeps_tasks:
                died += tasks
        return died

    def poison(self, ledger: Ledger, job: OpenJob, task: OpenTask, node_id: str, now: float) -> str:
        """Count a node's death against a task. A node that an operator has removed has not died.

        Returns:
            Why the task is given up, or ""."""
        left, deaths = ledger.has_left(node_id), task.blame.deaths
        if job.facts.policy.recovery is not Recovery.MONITOR or task.closed or job.ending or left:
            return ""
        deaths.add(node_id)
        if not is_poison(deaths, self._deaths.unexplained(now)):
            return ""
        return f"{len(deaths)} nodes died or got stuck with it ({', '.join(sorted(deaths))}); no other gets it"

    def forget_job(self, job_id: str) -> None:
        """Forget the tasks of a job that is over."""
        for key, tasks in list(self._broken.items()):
            self._broken[key] = {task: deaths for task, deaths in tasks.items() if task[0] != job_id}
            if not self._broken[key]:
                del self._broken[key]
